"""The chat on a real pseudo-terminal, with a scripted engine: keys in, a screen out."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from terminal_support import Terminal

from moechat.chat.terminal.input_history import open_history
from moechat.history.session_database import Sessions, sessions_path

PATIENCE_S = 20
ALT_ENTER, UP = "\x1b\r", "\x1b[A"


class ScriptedChat(Terminal):
    """A chat whose model says what the test wrote down."""

    def __init__(
        self,
        home: Path,
        *answers: str,
        columns: int = 70,
        rows: int = 24,
        term: str = "xterm-256color",
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        pieces = [list(answer) for answer in answers]
        dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment.update(env or {})
        super().__init__(
            [
                sys.executable,
                str(SUPPORT / "scripted_chat.py"),
                json.dumps({"answers": pieces, **settings}),
            ],
            cwd=home.parent,
            environment={**environment, "MOECHAT_HOME": str(home), "LC_ALL": "C.UTF-8"},
            columns=columns,
            rows=rows,
            term=term,
            patience_s=PATIENCE_S,
        )
        self.wait(">>>")


@pytest.fixture
def terminal(home: Path) -> Iterator[Callable[..., ScriptedChat]]:
    home.mkdir()
    started: list[ScriptedChat] = []

    def start(*answers: str, **settings: Any) -> ScriptedChat:
        started.append(ScriptedChat(home, *answers, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


def questions(key: int = 1) -> list[str]:
    with closing(Sessions(sessions_path(), existing=True)) as sessions:
        return [turn.question for turn in sessions.get(key).turns]


def test_a_chat_is_rendered_shows_the_context_and_is_saved(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("Hello **you**\n\n- a\n- b", "bye", save=True)
    assert "0 of 1,000 tokens" in chat.shown
    chat.say("hi", " • b")
    assert "Hello you\n\n • a\n • b" in chat.shown
    assert "24 of 1,000 tokens, 2%" in chat.last_line
    chat.say("/regen", "bye")
    chat.say("/undo", "undone: hi")
    assert chat.leave() == 0
    with closing(Sessions(sessions_path())) as sessions:
        assert sessions.get(1).turns == []
        assert len(sessions.get(1, all_turns=True).turns) == 2


def test_several_lines_are_one_message_typed_or_pasted(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("one", "two", "three", "four", save=True)
    chat.type(f"a{ALT_ENTER}b\nc", "... c")
    chat.type("\r", "one")
    chat.wait_prompt()
    chat.type("\x1b[200~d\re\nf\x1b[201~", "... f")
    chat.type("\r", "two")
    chat.wait_prompt()
    chat.type('"""g\r', "... ")
    chat.type('h"""\r', "three")
    chat.wait_prompt()
    chat.leave()
    assert questions() == ["a\nb\nc", "d\ne\nf", "g\nh"]


def test_typed_lines_are_in_the_history_of_the_next_chat(
    terminal: Callable[..., ScriptedChat], home: Path
) -> None:
    chat = terminal("one")
    chat.say("first question", "one")
    chat.leave()
    history = home / "state" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    with history.open("a") as file:
        file.write("\n# 2020\n+\x1b]0;title\x07second\n")
    chat = terminal("two")
    chat.type(UP, "second")
    assert "\x1b]0;" not in chat.written
    chat.type(UP, ">>> first question")
    chat.type("\r", "two")


def test_no_history_is_written_with_saving_off(terminal: Callable[..., ScriptedChat], home: Path) -> None:
    chat = terminal("one", options={"save": False})
    chat.say("secret", "one")
    chat.type(UP, ">>> secret")
    chat.type("\x15")
    assert chat.leave() == 0
    assert list(home.rglob("*")) == []


def test_ctrl_c_stops_an_answer_and_twice_on_an_empty_line_exits(
    terminal: Callable[..., ScriptedChat],
) -> None:
    chat = terminal("word " * 200, "more", pause_s=0.02, save=True)
    chat.type("go on\r", "word word")
    chat.type("\x03", "(stopped; what was written is kept)")
    chat.wait_prompt()
    chat.type("half a li", ">>> half a li")
    chat.type("\x03")
    chat.wait_prompt()
    chat.say("again", "more")
    chat.type("\x03", "Ctrl-C again or Ctrl-D leaves")
    chat.wait_prompt()
    assert chat.leave("\x03") == 0
    with closing(Sessions(sessions_path())) as sessions:
        assert [turn.mark for turn in sessions.get(1).turns] == ["stopped", ""]


def test_keys_typed_during_an_answer_appear_at_the_next_prompt(
    terminal: Callable[..., ScriptedChat],
) -> None:
    chat = terminal("word " * 20, "second", pause_s=0.01)
    chat.type("go on\r", "word word")
    chat.type("meanwhile\r")
    chat.wait("second")
    chat.wait_prompt()
    assert chat.shown.count("meanwhile") == 1
    assert ">>> meanwhile" in chat.shown


def test_an_unknown_command_is_not_sent_and_completion_helps(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("one", save=True)
    chat.type("/hlp\r", "there is no command /hlp; it was not sent")
    chat.wait("did you mean /help?")
    chat.wait_prompt()
    chat.type("/und", "take the last question")
    chat.type("\t", ">>> /undo")
    chat.type("\x15//etc is a directory\r", "one")
    chat.wait_prompt()
    chat.leave()
    assert questions() == ["/etc is a directory"]


def test_tab_completes_the_only_match_at_once(terminal: Callable[..., ScriptedChat], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("milk")
    chat = terminal("one")
    chat.type("/und\t\r", "there is nothing to undo")
    chat.wait_prompt()
    chat.type("/set temp\t0.5\r", "0.5  (set here)")
    chat.wait_prompt()
    chat.type("/read no\t\r", "notes.txt goes with your next message")
    chat.wait_prompt()
    # Of several matches the common part is completed, and a menu opens.
    chat.type("/set top\t", "top_k")
    chat.type("\t", ">>> /set top_p ")
    chat.type("\x15", ">>>")
    chat.leave()


def test_file_names_are_completed_after_commands_that_take_one(
    terminal: Callable[..., ScriptedChat], tmp_path: Path
) -> None:
    (tmp_path / "notes of today.txt").write_text("milk")
    (tmp_path / "no\x1b]0;tes").write_text("")
    chat = terminal("one", save=True)
    chat.type("/read no", " notes of today.txt")
    chat.type("\t", ">>> /read notes of today.txt")
    chat.type("\r", "goes with your next message")
    chat.wait("+1 file")
    chat.say("what?", "one")
    assert "\x1b]0;" not in chat.written
    chat.leave()
    assert questions() == ["notes of today.txt:\n```\nmilk\n```\n\nwhat?"]


def test_a_chat_can_be_saved_loaded_and_continued(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("one", "two", "three", save=True)
    chat.say("first", "one")
    chat.say("/save talk.json", "saved as")
    chat.say("/clear", "kept as number 1")
    chat.say("/load talk.json", "conversation 1 goes on from there")
    chat.say("second", "two")
    chat.leave()
    assert questions(1) == ["first", "second"]
    chat = terminal("four", save=True, options={"resume": True})
    assert "conversation 1 goes on: first (2 turns)" in chat.shown
    chat.say("third", "four")
    chat.leave()
    assert questions(1) == ["first", "second", "third"]


@pytest.mark.parametrize("columns", [20, 40])
def test_wide_characters_fit_a_small_window(terminal: Callable[..., ScriptedChat], columns: int) -> None:
    chat = terminal("漢字 " * 8 + "**fett** 👍\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", columns=columns)
    chat.say("漢字 👍 go", "1  2")
    assert "fett 👍" in chat.shown.replace("\n", "")
    assert all(len(line) <= columns for line in chat.shown.split("\n"))


def test_resizing_the_window_during_an_answer_repeats_no_text(terminal: Callable[..., ScriptedChat]) -> None:
    words = [f"w{n:02}x" for n in range(40)]
    answer = f"a *first* one\n\n{' '.join(words)}\n\nthe *last* one"
    chat = terminal(answer, pause_s=0.01, rows=40)
    chat.type("go\r", "w00x w01x w02x")
    chat.resize(30, 40)
    chat.wait("the last one")
    chat.wait_prompt()
    assert "a first one" in chat.shown
    # Each word once: no row was drawn twice. What the window had cut off may be gone.
    shown = re.findall(r"w\d\dx", chat.shown)
    assert len(shown) == len(set(shown))
    assert shown[-1] == "w39x"
    chat.resize(70, 40)
    chat.type("/bye", "/bye")
    assert chat.leave("\r") == 0


def test_the_history_keeps_the_newest_lines_and_stays_private(
    terminal: Callable[..., ScriptedChat], home: Path
) -> None:
    history = home / "state" / "history"
    history.parent.mkdir(parents=True)
    history.write_text("".join(f"\n# 2020-01-01\n+entry {n} {'x' * 1000}\n" for n in range(1500)))
    history.chmod(0o644)
    chat = terminal("one")
    assert 600_000 < history.stat().st_size < 800_000
    assert history.stat().st_mode & 0o777 == 0o600
    chat.say("the newest", "one")
    chat.type(f"{UP}{UP}", "entry 1499")
    assert history.read_text().startswith("\n# 2020-01-01\n+entry ")
    assert history.read_text().endswith("+the newest\n")
    assert [path.name for path in history.parent.iterdir()] == ["history"]


def test_raw_answers_are_not_rendered(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("**you** \x1b[2J\x9b1m", options={"raw": True})
    chat.say("hi", "**you** ␛[2J")
    assert "\x1b[2J" not in chat.written


def test_a_dumb_terminal_gets_plain_text(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("**you**", term="dumb")
    chat.type("hi\r", "**you**")
    chat.wait_prompt()
    assert "\x1b" not in chat.written
    assert chat.leave() == 0


def test_bytes_that_are_not_utf8_are_not_sent_from_a_dumb_terminal(
    terminal: Callable[..., ScriptedChat],
) -> None:
    chat = terminal("one", term="dumb", save=True)
    modes = termios.tcgetattr(chat.child.child_fd)
    modes[3] &= ~termios.ECHO  # the terminal itself would show the bytes, which this test cannot read
    termios.tcsetattr(chat.child.child_fd, termios.TCSANOW, modes)
    os.write(chat.child.child_fd, b"a\xffb\r")
    chat.wait("that line is not UTF-8; it was not sent")
    chat.wait_prompt()
    chat.type("c\r", "one")
    chat.wait_prompt()
    assert chat.leave() == 0
    assert questions() == ["c"]


def test_no_color_leaves_no_colour(terminal: Callable[..., ScriptedChat]) -> None:
    answer = "# T\n\n- a `b`\n\n```python\nimport os\n```\n"
    colour = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7])(?:;[\d;]*)?m")
    found = {}
    for value in ("", "1"):
        chat = terminal(answer, env={"NO_COLOR": value})
        chat.say("hi", "import os")
        chat.leave()
        found[value] = bool(colour.search(chat.written))
    assert found == {"": True, "1": False}


def test_thinking_is_dimmed(terminal: Callable[..., ScriptedChat]) -> None:
    chat = terminal("<think>let me see</think>\n\nyes")
    chat.say("hi", "yes")
    assert "let me see\n\nyes" in chat.shown
    assert "\x1b[2m" in chat.written


@pytest.mark.parametrize("during", ["the prompt", "an answer"])
def test_a_terminated_chat_saves_its_turns_and_restores_the_terminal(
    terminal: Callable[..., ScriptedChat], during: str
) -> None:
    chat = terminal("word " * 100, pause_s=0.02, save=True)
    before = termios.tcgetattr(chat.child.child_fd)[3] & (termios.ECHO | termios.ICANON)
    assert before == 0
    if during == "an answer":
        chat.type("go\r", "word word")
    chat.child.kill(signal.SIGTERM)
    chat.until(lambda: not chat.child.isalive())
    after = termios.tcgetattr(chat.child.child_fd)[3]
    assert after & termios.ECHO
    assert after & termios.ICANON
    assert chat.child.exitstatus == 143
    if during == "an answer":
        with closing(Sessions(sessions_path())) as sessions:
            assert sessions.get(1).turns[0].answer.startswith("word word")


def test_an_input_history_that_cannot_be_kept_gives_file_and_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", "/proc/nope")
    warnings: list[str] = []
    open_history(keep=True, warn=warnings.append)
    assert warnings == ["(what you type is not remembered: /proc/nope: No such file or directory)"]
