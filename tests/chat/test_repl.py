"""The chat's rules, with a scripted engine."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from chat_support import OneModel, ScriptedEngine, assistant, talk, user

from moechat.chat.commands import COMMANDS
from moechat.errors import MoechatError, StoreDamagedError, UsageError
from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import Sessions, sessions_path


def test_every_prompt_contains_the_whole_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine([["one ", "two"], ["three"]])
    talk(engine, ["first", "", "   ", "second"], system="be brief")
    system = {"role": "system", "content": "be brief"}
    assert engine.prompts == [
        [system, user("first")],
        [system, user("first"), assistant("one two"), user("second")],
    ]
    assert capsys.readouterr().out == "one two\nthree\n"


def test_an_interrupted_answer_stays_in_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine([["half ", KeyboardInterrupt()], ["more"]])
    output = talk(engine, ["first", "second"])
    assert engine.prompts[1] == [user("first"), assistant("half "), user("second")]
    assert capsys.readouterr().out == "half \nmore\n"
    assert "(stopped; what was written is kept)" in output.notices


def test_a_question_without_an_answer_is_dropped() -> None:
    engine = ScriptedEngine([[KeyboardInterrupt()], [UsageError("no such role")], ["answer"]])
    output = talk(engine, ["first", "second", "third"])
    assert engine.prompts[2] == [user("third")]
    assert "(stopped; the question is not kept)" in output.notices
    assert output.errors == [("no such role", None)]


def test_the_oldest_turns_are_dropped_from_the_prompt_but_kept_in_the_conversation(home: Path) -> None:
    engine = ScriptedEngine([["a" * 10], ["b" * 10], ["c" * 10], ["d"]], room=75)
    output = talk(engine, ["1" * 10, "2" * 10, "3" * 10, "4" * 10], sessions=sessions_path())
    assert engine.prompts[2][0] == user("1" * 10)
    assert engine.prompts[3] == [
        user("2" * 10),
        assistant("b" * 10),
        user("3" * 10),
        assistant("c" * 10),
        user("4" * 10),
    ]
    left_out = "(the 2 oldest messages were left out: 100 tokens no longer hold them and an answer)"
    assert left_out in output.notices
    assert engine.reserves == [1, 25, 25, 25, 25]
    with Sessions(sessions_path()) as sessions:
        assert len(sessions.get(1).turns) == 4


@pytest.mark.parametrize(
    ("context", "max_tokens", "reserve"),
    [(8192, None, 256), (8192, 40, 40), (400, None, 100), (400, 8000, 100), (400, 7, 7), (2, None, 1)],
)
def test_room_for_the_answer_comes_before_old_turns(
    context: int, max_tokens: int | None, reserve: int
) -> None:
    engine = ScriptedEngine([["a"], ["b"]], context_length=context)
    talk(engine, ["first", "second"], given={} if max_tokens is None else {"max_tokens": max_tokens})
    assert engine.reserves == [1, reserve]


def test_the_last_message_alone_may_fill_the_context() -> None:
    engine = ScriptedEngine([["a"], ["b"]], room=50)
    talk(engine, ["first", "x" * 49])
    assert engine.prompts[1] == [user("x" * 49)]
    assert engine.reserves == [1, 25, 1]


def test_the_system_prompt_is_never_dropped() -> None:
    engine = ScriptedEngine([["a" * 10], ["b"]], room=25)
    talk(engine, ["1" * 10, "2" * 10], system="s" * 10)
    assert engine.prompts[1] == [{"role": "system", "content": "s" * 10}, user("2" * 10)]


def test_a_message_too_long_by_itself_drops_no_history() -> None:
    engine = ScriptedEngine([["answer"], ["again"]], room=50)
    output = talk(engine, ["first", "x" * 51, "second"])
    assert engine.prompts[1] == [user("first"), assistant("answer"), user("second")]
    assert "51" in output.errors[0][0]


def test_commands_are_not_sent_and_two_slashes_send_one() -> None:
    engine = ScriptedEngine([["a"], ["b"], ["c"]])
    output = talk(engine, ["first", "/help", " /sytem first", "/", "/clear now", "/clear", "second", "//etc"])
    assert engine.prompts == [
        [user("first")],
        [user("second")],
        [user("second"), assistant("b"), user("/etc")],
    ]
    assert output.errors[0][0] == "there is no command /sytem; it was not sent"
    assert "did you mean /system?" in (output.errors[0][1] or "")
    assert "the conversation is forgotten" in output.notices


def test_help_lists_every_command_and_how_to_open_an_editor() -> None:
    (said,) = talk(ScriptedEngine([]), ["/help"], quiet=True).notices
    assert all(f"/{command.name}" in said for command in COMMANDS)
    assert "Ctrl-X Ctrl-E" in said


def test_bye_exits() -> None:
    with pytest.raises(pytest.fail.Exception, match="left before"):
        talk(ScriptedEngine([]), ["/bye", "never read"])


def test_two_interrupts_in_a_row_exit_and_one_does_not() -> None:
    engine = ScriptedEngine([["a"]])
    stop = KeyboardInterrupt()
    with pytest.raises(pytest.fail.Exception, match="left before"):
        talk(engine, [stop, "first", stop, "/help", stop, stop, "never read"])
    assert engine.prompts == [[user("first")]]


def test_an_interrupt_while_one_is_reported_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal may come before further ones are ignored."""
    engine, late, stop = ScriptedEngine([["a"]]), [KeyboardInterrupt()], KeyboardInterrupt()

    def uninterrupted() -> AbstractContextManager[None]:
        if late:
            raise late.pop()
        return nullcontext()

    monkeypatch.setattr("moechat.chat.repl.uninterrupted", uninterrupted)
    output = talk(engine, [stop, "first", stop, "/help"])
    assert not late
    assert engine.prompts == [[user("first")]]
    assert output.notices.count("Ctrl-C again or Ctrl-D leaves") == 1


def test_a_disk_error_during_an_answer_leaves_the_chat_usable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ScriptedEngine([["half ", MoechatError("experts cannot be read", hint="try again")], ["more"]])
    output = talk(engine, ["first", "second"], sessions=sessions_path())
    assert engine.prompts[1] == [user("first"), assistant("half "), user("second")]
    assert capsys.readouterr().out == "half \nmore\n"
    assert output.errors == [("experts cannot be read", "try again")]
    with Sessions(sessions_path()) as sessions:
        assert [turn.mark for turn in sessions.get(1).turns] == ["failed", "cut"]


def test_a_damaged_store_ends_the_chat_and_the_partial_answer_is_kept() -> None:
    engine = ScriptedEngine([["half", StoreDamagedError("gone")]])
    with pytest.raises(StoreDamagedError):
        talk(engine, ["first"], sessions=sessions_path())
    with Sessions(sessions_path()) as sessions:
        assert sessions.get(1).turns[0].answer == "half"


def test_quiet_shows_only_answers_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    output = talk(ScriptedEngine([["answer"]]), ["first"], quiet=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err, output.notices) == ("answer\n", "\n", [])


def test_thinking_is_shown_separately_and_not_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine([["<thi", "nk>hm", "</think>\n\nyes"], ["no"]])
    talk(engine, ["first", "second"])
    assert engine.prompts[1] == [user("first"), assistant("yes"), user("second")]
    captured = capsys.readouterr()
    assert captured.out == "yes\nno\n"
    assert "hm" in captured.err


def test_a_template_can_open_the_thought(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine([["hm</think>yes"]], template_end="<think>\n")
    talk(engine, ["first"], hide_thinking=True)
    captured = capsys.readouterr()
    assert (captured.out, "hm" in captured.err) == ("yes\n", False)


def test_regen_replaces_the_last_answer_or_keeps_it_on_failure() -> None:
    engine = ScriptedEngine([["one"], ["two"], [KeyboardInterrupt()], ["end"]])
    talk(engine, ["first", "/regen", "/regen", "second"], sessions=sessions_path())
    assert engine.prompts[1] == engine.prompts[2] == [user("first")]
    assert engine.prompts[3] == [user("first"), assistant("two"), user("second")]
    with Sessions(sessions_path()) as sessions:
        assert [turn.answer for turn in sessions.get(1).turns] == ["two", "end"]
        assert [turn.answer for turn in sessions.get(1, all_turns=True).turns] == ["one", "two", "end"]


def test_undo_removes_the_last_turn() -> None:
    engine = ScriptedEngine([["a"], ["b"], ["c"]])
    output = talk(engine, ["/undo", "first", "second", "/undo", "third"])
    assert engine.prompts[2] == [user("first"), assistant("a"), user("third")]
    assert output.errors == [("there is nothing to undo", None)]


def test_set_changes_sampling_and_shows_the_source_of_values() -> None:
    engine = ScriptedEngine([["a"], ["b"], ["c"]])
    lines = [
        "one",
        "/set temperature 0.9",
        "/set seed=7",
        "two",
        "/set seed default",
        "/set top-k x",
        "three",
    ]
    output = talk(engine, [*lines, "/set", "/set heat 3"], given={"top_p": 0.5, "seed": 3})
    assert engine.given == [
        {"top_p": 0.5, "seed": 3},
        {"temperature": 0.9, "top_p": 0.5, "seed": 7},
        {"temperature": 0.9, "top_p": 0.5},
    ]
    rows = dict(output.rows)
    assert rows["temperature"] == "0.9  (set here)"
    assert rows["top_p"] == "0.5  (from the command line)"
    assert rows["top_k"] == "0  (the model's own)"
    assert [error[0].split(";")[0] for error in output.errors] == ["top_k is x", "there is no setting heat"]


def test_show_and_stats_print_model_context_and_statistics() -> None:
    loading = (("vram", "8G", "from MOECHAT_VRAM"),)
    output = talk(ScriptedEngine([["answer"]]), ["/stats", "hello", "/show", "/stats"], loading=loading)
    rows = dict(output.rows)
    assert rows["vram"] == "8G  (from MOECHAT_VRAM)"
    assert rows["context"] == "6 of 100 tokens used"
    assert rows["output_tokens"] == "1"
    assert output.errors == [("there was no answer yet", None)]


def test_map_shows_the_experts_of_models_that_have_a_map() -> None:
    engine = ScriptedEngine([])
    output = talk(engine, ["/map"])
    assert [error[0] for error in output.errors] == [
        "scripted is on another server, which does not tell where its experts are"
    ]
    engine.map = object()
    output = talk(engine, ["/map"])
    assert (output.errors, output.maps) == ([], [engine.map])


def test_system_is_changed_shown_and_removed() -> None:
    engine = ScriptedEngine([["a"], ["b"]])
    output = talk(engine, ["/system be brief", "one", "/system", '/system ""', "two"])
    assert engine.prompts[0][0] == {"role": "system", "content": "be brief"}
    assert engine.prompts[1][0] == user("one")
    assert "the system prompt: be brief" in output.notices


def test_save_and_load_restore_the_same_conversation(tmp_path: Path) -> None:
    file, page = tmp_path / "a talk.json", tmp_path / "talk.md"
    engine = ScriptedEngine([["one"], ["two"], ["three"]])
    lines = [
        "first",
        f"/save {file}",
        f"/save {page}",
        "second",
        f"/save '{file}'",
        "/clear",
        f"/load {file}",
    ]
    output = talk(engine, [*lines, "third", f"/load {page}", "/load nowhere.json"], system="be brief")
    assert engine.prompts[2][1:] == [
        user("first"),
        assistant("one"),
        user("second"),
        assistant("two"),
        user("third"),
    ]
    assert "## Assistant\n\none" in page.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert ["is not JSON" in output.errors[0][0], "No such file" in output.errors[1][0]] == [True, True]


def test_save_does_not_replace_foreign_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("precious")
    output = talk(ScriptedEngine([["one"]]), ["first", f"/save {file}"])
    assert "exists already" in output.errors[0][0]
    assert file.read_text() == "precious"


def test_a_file_is_attached_until_a_message_gets_an_answer(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("a ```` b")
    engine = ScriptedEngine([[KeyboardInterrupt()], ["a"], ["b"]])
    output = talk(engine, [f"/read {file}", "what?", "what?", "next", "/read /dev/zero"])
    expected = "notes.md:\n`````\na ```` b\n`````\n\nwhat?"
    assert [messages[-1] for messages in engine.prompts] == [user(expected), user(expected), user("next")]
    assert output.errors[0][0] == "/dev/zero is not a file"


def test_another_model_continues_the_conversation() -> None:
    other = ScriptedEngine([["b"]], name="other")
    engine = ScriptedEngine([["a"]])
    output = talk(engine, ["first", "/model other", "second"], models=OneModel(engine, other=other))
    assert other.prompts == [[user("first"), assistant("a"), user("second")]]
    assert "other goes on with this conversation" in output.notices


def test_a_conversation_can_be_continued() -> None:
    engine = ScriptedEngine([["two"]])
    before = Conversation([Turn("first", "one")])
    talk(engine, ["second"], chat={"conversation": before})
    assert engine.prompts == [[user("first"), assistant("one"), user("second")]]


def test_bytes_that_are_not_utf8_are_not_sent() -> None:
    engine = ScriptedEngine([["a"]])
    output = talk(engine, [UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates"), "first"])
    assert output.errors == [("that line is not UTF-8; it was not sent", None)]
    assert engine.prompts == [[user("first")]]


QUOTED = '"""/bye\n//a comment"""'


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        (QUOTED, "/bye\n//a comment"),
        ('"""/clear"""', "/clear"),
        ('"""//x"""', "//x"),
        ("/* header */\nint main(){}", "/* header */\nint main(){}"),
        ("// a comment\nint main(){}", "// a comment\nint main(){}"),
        ("//clear\nis a command", "/clear\nis a command"),
        ("/usr/bin/foo: error: no input", "/usr/bin/foo: error: no input"),
        ("/usr\n/bin", "/usr\n/bin"),
        ("//etc", "/etc"),
    ],
)
def test_pasted_or_quoted_text_is_a_message(typed: str, sent: str) -> None:
    engine = ScriptedEngine([["one"]])
    output = talk(engine, [typed])
    assert output.errors == []
    assert engine.prompts == [[user(sent)]]


@pytest.mark.parametrize("typed", ["/", "/ x", "/cler", "/usr", "/clear/x", "/bye.", "/help\nme", '""""""'])
def test_probable_typing_errors_of_commands_are_not_sent(typed: str) -> None:
    engine = ScriptedEngine([])
    output = talk(engine, [typed])
    assert [error[0].endswith("it was not sent") for error in output.errors] == [True] * ("/" in typed)


def test_a_command_can_take_several_lines() -> None:
    engine = ScriptedEngine([["one"]])
    talk(engine, ["/system be brief\nand kind", "first"])
    assert engine.prompts[0][0]["content"] == "be brief\nand kind"


def test_a_dumb_terminal_sends_no_bytes_that_are_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.chat.terminal.reader import PlainReader

    lines = io.TextIOWrapper(io.BytesIO(b"a\xffb\nc\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", lines)
    reader = PlainReader()
    with pytest.raises(UnicodeError):
        reader.read()
    assert reader.read() == "c"


def test_plain_lines_are_read_with_their_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.chat.terminal.reader import PlainReader

    monkeypatch.setattr("sys.stdin", io.StringIO('one\n"""two\nthree"""\nfour'))
    reader = PlainReader()
    assert [reader.read(), reader.read(), reader.read()] == ["one", '"""two\nthree"""', "four"]
    with pytest.raises(EOFError):
        reader.read()
