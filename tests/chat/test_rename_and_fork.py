"""Conversations get other titles, go on in copies, and questions are put in other words."""

from __future__ import annotations

from pathlib import Path

from chat_support import ScriptedEngine, assistant, talk, user

from moechat.history.session_database import Sessions, sessions_path


def test_a_title_stays_whatever_is_said_and_undone_later(home: Path) -> None:
    engine = ScriptedEngine([["one"], ["two"]])
    output = talk(
        engine,
        ["/rename before all  turns", "first", "/undo", "/rename 'my\ttitle'", "second", "/rename ''"],
        sessions=sessions_path(),
    )
    assert "the conversation is called before all turns" in output.notices
    assert output.errors == [("/rename needs TITLE", None)]
    with Sessions(sessions_path()) as sessions:
        (summary,) = sessions.summaries()
    assert (summary.title, summary.turns) == ("my title", 1)


def test_a_renamed_conversation_is_renamed_in_the_database_at_once(home: Path) -> None:
    talk(ScriptedEngine([["one"]]), ["first", "/rename another"], sessions=sessions_path())
    with Sessions(sessions_path()) as sessions:
        assert [summary.title for summary in sessions.summaries()] == ["another"]


def test_a_fork_goes_on_alone_and_leaves_the_original_as_it_is(home: Path) -> None:
    engine = ScriptedEngine([["one"], ["two"], ["three"]])
    output = talk(
        engine,
        ["/fork", "first", "/fork", "second", "/undo", "third"],
        system="be brief",
        sessions=sessions_path(),
    )
    assert output.errors == [("there is nothing to copy yet", None)]
    assert "the conversation goes on as number 2, a copy (1 turn); number 1 stays as it is" in output.notices
    assert engine.prompts[2][1:] == [user("first"), assistant("one"), user("third")]
    with Sessions(sessions_path()) as sessions:
        assert [turn.question for turn in sessions.get(1).turns] == ["first"]
        copy = sessions.get(2)
    assert [turn.question for turn in copy.turns] == ["first", "third"]
    assert (copy.title, copy.system) == ("first", "be brief")


def test_an_edited_question_replaces_the_last_one_and_keeps_its_files(home: Path) -> None:
    engine = ScriptedEngine([["one"], ["two"], [KeyboardInterrupt()], ["three"]])
    output = talk(
        engine,
        ["/edit early", "first", "/edit the first\nin other words", "/edit never answered", "second"],
        sessions=sessions_path(),
        chat={"files": [("a.txt", "milk")]},
    )
    file = "a.txt:\n```\nmilk\n```\n\n"
    edited = user(f"{file}the first\nin other words")
    assert output.errors == [("there is no question to edit", None)]
    assert engine.prompts[1] == [edited]
    assert "(the previous question and its answer stay)" in output.notices
    assert engine.prompts[3] == [edited, assistant("two"), user("second")]
    with Sessions(sessions_path()) as sessions:
        assert [turn.answer for turn in sessions.get(1).turns] == ["two", "three"]
        assert sessions.get(1).title == "the first in other words"


def test_files_from_the_start_go_with_the_first_message_only() -> None:
    engine = ScriptedEngine([["one"], ["two"]])
    output = talk(engine, ["/read", "first", "second"], chat={"files": [("a.txt", "milk")]})
    assert "with your next message: a.txt" in output.notices
    assert engine.prompts[0] == [user("a.txt:\n```\nmilk\n```\n\nfirst")]
    assert engine.prompts[1][-1] == user("second")


def test_without_saving_a_fork_is_only_a_copy() -> None:
    output = talk(ScriptedEngine([["one"]]), ["first", "/fork"])
    assert "the conversation goes on as a copy (1 turn)" in output.notices
