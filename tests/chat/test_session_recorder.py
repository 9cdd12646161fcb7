"""Recording a chat, when the database works and when it fails, and which conversation is continued."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from chat_support import ScriptedEngine, talk
from history_support import conversation

from moechat.chat.chat_options import ChatOptions
from moechat.chat.session_recorder import Recorder, resume_conversation
from moechat.errors import SessionsUnavailableError
from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import Sessions, sessions_path


@pytest.fixture
def path() -> Path:
    return sessions_path()


def test_turns_after_a_deletion_elsewhere_start_a_new_conversation(path: Path) -> None:
    notices: list[str] = []
    recorder = Recorder(path, lambda text, hint: notices.append(text))
    kept = conversation(("confidential", "unmentionable"))
    assert recorder.keep(kept)
    with Sessions(path) as sessions:
        sessions.delete(1)
        assert recorder.keep(kept)
        assert sessions.summaries() == []
        kept.add(Turn("next", "two", model="demo"))
        assert recorder.keep(kept)
        kept.add(Turn("last", "three", model="demo"))
        assert recorder.keep(kept)
        assert [(line.key, line.title) for line in sessions.summaries()] == [(2, "next")]
        assert [turn.answer for turn in sessions.get(2).turns] == ["two", "three"]
    recorder.close()
    assert notices == ["(conversation 1 was deleted; new turns are saved as 2)"]
    assert len(kept.turns) == 3
    assert b"unmentionable" not in path.read_bytes()


def test_a_removed_database_is_recreated_with_the_whole_conversation(path: Path) -> None:
    recorder = Recorder(path, lambda text, hint: None)
    kept = conversation(("first", "one"))
    assert recorder.keep(kept)
    recorder.close()
    for file in path.parent.iterdir():
        file.unlink()
    kept.add(Turn("second", "two"))
    assert recorder.keep(kept)
    recorder.close()
    with Sessions(path) as sessions:
        assert [turn.question for turn in sessions.get(1).turns] == ["first", "second"]


def _damage(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"this is no database " * 400)


def test_a_damaged_database_neither_stops_the_chat_nor_is_changed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _damage(path)
    before = path.read_bytes()
    output = talk(ScriptedEngine([["one"], ["two"]]), ["first", "second"], sessions=path)
    assert capsys.readouterr().out == "one\ntwo\n"
    notices = [notice for notice in output.notices if "not saved" in notice]
    assert len(notices) == 1
    assert "not a database" in notices[0]
    assert path.read_bytes() == before
    options = ChatOptions(resume=True)
    assert resume_conversation(path, options, "demo", lambda text, hint: output.notice(text)) is None
    assert "this is a new one" in output.notices[-1]
    with pytest.raises(SessionsUnavailableError):
        resume_conversation(path, replace(options, resume=3), "demo", lambda text, hint: None)


def test_a_locked_database_is_retried_until_everything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moechat.history.session_database._BUSY_TIMEOUT_S", 0.01)
    notices: list[str] = []
    hints: list[str | None] = []

    def tell(text: str, hint: str | None) -> None:
        notices.append(text)
        hints.append(hint)

    recorder = Recorder(path, tell)
    kept = conversation(("first", "one"))
    assert recorder.keep(kept)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        for number in range(3):
            kept.add(Turn(f"more {number}", "x"))
            assert not recorder.keep(kept)
        assert not Recorder(path, tell, once=True).keep(kept)
        with pytest.raises(SessionsUnavailableError) as caught, Sessions(path, existing=True) as sessions:
            sessions.delete(1)
        other.execute("COMMIT")
    other.close()
    kept.add(Turn("last", "y"))
    assert recorder.keep(kept)
    recorder.close()
    assert len(notices) == 3
    assert "locked" in notices[0]
    again = "another program is using it; run the same command again"
    assert hints == ["another program is using it; the next answer tries again", again, None]
    assert caught.value.hint == again
    with Sessions(path) as sessions:
        assert [turn.question for turn in sessions.get(1).turns] == [
            "first", "more 0", "more 1", "more 2", "last",
        ]  # fmt: skip


def test_an_unwritable_directory_does_not_stop_the_chat(path: Path) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("a file where the directory should be")
    output = talk(ScriptedEngine([["one"]]), ["first"], sessions=path)
    assert sum("not saved" in notice for notice in output.notices) == 1


def test_a_full_disk_does_not_stop_the_chat(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Sessions, kept: Conversation) -> None:
        with self._translated_errors():
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Sessions, "keep", full)
    output = talk(ScriptedEngine([["one"], ["two"]]), ["first", "second"], sessions=path)
    assert sum("disk is full" in notice for notice in output.notices) == 1


def test_a_continued_conversation_is_named(path: Path) -> None:
    notices: list[str] = []
    options = ChatOptions(resume=True)
    assert resume_conversation(path, options, "demo", lambda text, hint: notices.append(text)) is None
    with Sessions(path) as sessions:
        sessions.keep(conversation(("tell me of a fox", "one"), model="other"))
    found = resume_conversation(
        path, replace(options, system="new"), "demo", lambda text, hint: notices.append(text)
    )
    assert found is not None
    assert found.system == "new"
    assert notices == [
        "(no conversation is kept yet; this is a new one)",
        "conversation 1 goes on: tell me of a fox (1 turn, so far with other)",
    ]
