"""Files that users name: /save, /load and /read, whatever stands in their way."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from chat_support import ScriptedEngine, talk, user

from moechat.chat import text_files as files
from moechat.chat.text_files import write_text
from moechat.errors import MoechatError, UsageError
from moechat.history.conversation import Conversation, Turn
from moechat.history.transcript import read_from, write_as


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def conversation(*turns: tuple[str, str]) -> Conversation:
    made = Conversation()
    for question, answer in turns:
        made.add(Turn(question, answer, model="demo"))
    return made


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/save /etc/passwd/foo.md", "cannot be written: Not a directory"),
        ("/save nowhere/foo.md", "cannot be written: No such file or directory"),
        (f"/save {'a' * 260}.md", "cannot be written: File name too long"),
        ("/save loop/foo.md", "cannot be written: Too many levels of symbolic links"),
        ("/save a\0b.md", "cannot be written: embedded null byte"),
        ("/save sub/", "sub/ is a directory"),
        ("/save sub.json", "exists already"),
        ("/save notes.txt", "ends neither in .json nor in .md"),
        ("/save plain", "ends neither in .json nor in .md"),
        ("/read a\0b", "cannot be read: embedded null byte"),
        ("/load loop", "cannot be read: Too many levels of symbolic links"),
        ("/load digits.json", "is not JSON"),
        ("/load surrogate.json", "message 2 is not valid Unicode"),
    ],
)
def test_an_unusable_file_is_reported_and_the_chat_continues(here: Path, command: str, said: str) -> None:
    (here / "loop").symlink_to("loop")
    (here / "sub.json").mkdir()
    (here / "digits.json").write_text(f"[{'1' * 5000}]")
    (here / "surrogate.json").write_text(
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ud800"}]'
    )
    before = sorted(here.iterdir())
    engine = ScriptedEngine([["one"], ["two"]])
    output = talk(engine, ["first", command, "second"])
    assert len(engine.prompts) == 2
    ((message, _),) = output.errors
    assert said in message
    assert sorted(here.iterdir()) == before


def test_the_longest_file_names_can_be_saved(here: Path) -> None:
    name = "a" * 250 + ".json"
    talk(ScriptedEngine([["one"]]), ["first", f"/save {name}"])
    assert [path.name for path in here.iterdir()] == [name]


def test_an_unexpected_error_loses_neither_the_chat_nor_the_answer(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: object) -> str:
        raise RuntimeError("the parser is broken")

    monkeypatch.setattr("moechat.chat.command_actions.write_as", broken)
    monkeypatch.setenv("MOECHAT_DEBUG", "1")
    engine = ScriptedEngine([["one"], ["half", ZeroDivisionError("by zero")], ["three"]])
    output = talk(engine, ["first", "/save a.json", "second", "third"])
    assert [error[0] for error in output.errors] == [
        "RuntimeError: the parser is broken",
        "ZeroDivisionError: by zero",
    ]
    assert "Traceback" in capsys.readouterr().err
    assert engine.prompts[2][2:] == [user("second"), {"role": "assistant", "content": "half"}, user("third")]


def test_load_restores_the_title_times_and_marks_that_save_wrote() -> None:
    kept = Conversation(title="a title of its own", model="demo", created=1_000_000.0)
    kept.add(Turn("first", "one", mark="stopped", model="demo", created=2_000_000.0))
    again = read_from(write_as(kept, "json"), "file")
    assert (again.title, again.created, again.turns) == (kept.title, kept.created, kept.turns)


@pytest.mark.parametrize(
    "more",
    [
        {"mark": []},
        {"mark": {"a": 1}},
        {"mark": "unheard of"},
        {"created": "yesterday"},
        {"created": 1e300},
        {"created": "9999-12-31T23:59:59-12:00"},
        {"thinking": 3, "model": None},
    ],
)
def test_invalid_marks_and_times_in_a_file_are_ignored(more: dict[str, object]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}]
    document = {"messages": messages, "created": more.get("created"), "title": more.get("mark")}
    for text in (json.dumps(messages), json.dumps(document)):
        (turn,) = read_from(text, "file").turns
        assert (turn.question, turn.answer, turn.mark, turn.thinking) == ("a", "b", "", "")


def test_a_full_disk_is_reported_with_a_hint(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(MoechatError, match="No space left on device") as caught:
        write_text(here / "a.json", "x")
    assert "free some space" in (caught.value.hint or "")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_file_created_during_a_save_is_not_replaced(
    here: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    path = here / "a.json"
    sync = os.fsync

    def appears(descriptor: int) -> None:
        sync(descriptor)
        path.write_text("precious")

    def no_links(*names: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(files.os, "link", no_links)
        write_text(here / "other.json", "x")
        assert (here / "other.json").read_text() == "x"
        (here / "other.json").unlink()
    monkeypatch.setattr(files.os, "fsync", appears)
    with pytest.raises(UsageError, match="exists already"):
        write_text(path, "x")
    assert path.read_text() == "precious"
    assert list(here.iterdir()) == [path]


def test_a_saved_file_is_updated_only_by_its_own_conversation(here: Path) -> None:
    path = here / "a.json"
    engine = ScriptedEngine([["one"], ["two"], ["three"]])
    output = talk(
        engine, ["first", f"/save {path}", "second", f"/save {path}", "/clear", "x", f"/save {path}"]
    )
    assert ["exists already" in error[0] for error in output.errors] == [True]
    assert [message["content"] for message in json.loads(path.read_text())["messages"]][::2] == [
        "first",
        "second",
    ]


def test_edits_to_a_saved_file_are_not_overwritten(here: Path) -> None:
    path = here / "a.md"

    class Editing(ScriptedEngine):
        def idle(self) -> None:
            if path.exists() and "## Notes" not in path.read_text():
                with path.open("a") as file:
                    file.write("## Notes of mine\n")

    output = talk(Editing([["one"]]), ["first", f"/save {path}", f"/save {path}"])
    assert "exists already" in output.errors[0][0]
    assert "Notes of mine" in path.read_text()
