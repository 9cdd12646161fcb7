"""/sessions in the chat: what is listed, and how one goes on with another."""

from __future__ import annotations

from chat_support import ScriptedEngine, assistant, talk, user

from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import Sessions, sessions_path


def keep(*questions: str) -> None:
    with Sessions(sessions_path()) as sessions:
        for question in questions:
            made = Conversation()
            made.add(Turn(question, f"of {question}", model="demo"))
            sessions.keep(made)


def test_conversations_are_listed_and_one_can_be_continued() -> None:
    keep("foxes", "dogs")
    engine = ScriptedEngine([["one"], ["two"]])
    output = talk(engine, ["new", "/sessions", "/sessions 1", "more"], sessions=sessions_path())
    assert [name for name, _ in output.rows] == ["* 3", "  2", "  1"]
    assert output.rows[2][1].endswith("1 turn   demo  foxes")
    assert "conversation 1 goes on: foxes (1 turn)" in output.notices
    assert engine.prompts[1] == [user("foxes"), assistant("of foxes"), user("more")]
    with Sessions(sessions_path()) as sessions:
        assert [turn.question for turn in sessions.get(1).turns] == ["foxes", "more"]
        assert [turn.question for turn in sessions.get(3).turns] == ["new"]


def test_an_invalid_number_changes_nothing() -> None:
    keep("foxes")
    engine = ScriptedEngine([["one"], ["two"]])
    lines = [
        "new",
        "/sessions 7",
        "/sessions x",
        f"/sessions {'9' * 30}",
        "/sessions ²",
        "/sessions 2",
        "more",
    ]
    output = talk(engine, lines, sessions=sessions_path())
    assert [error[0] for error in output.errors] == [
        "there is no conversation 7",
        "x is no number",
        f"{'9' * 30} is no number",
        "² is no number",
        "this is conversation 2",
    ]
    assert engine.prompts[1][0] == user("new")


def test_without_saved_conversations_nothing_is_listed() -> None:
    output = talk(ScriptedEngine([]), ["/sessions"], sessions=sessions_path())
    assert output.notices[-1] == "no conversation is kept yet"
    assert not sessions_path().exists()
    output = talk(ScriptedEngine([]), ["/sessions", "/sessions 1"])
    assert [hint for _, hint in output.errors] == ["start it without --no-save"] * 2
