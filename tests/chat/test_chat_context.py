"""The turns that are sent to the model: long conversations, freed room, messages that are too long."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_support import (
    Messages,
    OneModel,
    RecordedOutput,
    ScriptedEngine,
    ScriptedReader,
    Tokens,
    talk,
    user,
)
from hypothesis import given
from hypothesis import strategies as st

from moechat.chat.chat_options import ChatOptions, Generation
from moechat.chat.pending_reply import start_reply
from moechat.chat.repl import Chat
from moechat.chat.session_recorder import resume_conversation
from moechat.errors import UsageError
from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import sessions_path


def sent_questions(engine: ScriptedEngine) -> list[str]:
    """The messages of the user in the last call."""
    return [message["content"] for message in engine.prompts[-1] if message["role"] == "user"]


def test_dropped_turns_return_when_later_turns_are_undone() -> None:
    engine = ScriptedEngine([["a" * 10], ["b" * 30], ["c"], ["d"]], room=80)
    talk(engine, ["1" * 10, "2" * 10, "3" * 10, "/undo", "/undo", "4"])
    assert engine.prompts[2] == [user("2" * 10), {"role": "assistant", "content": "b" * 30}, user("3" * 10)]
    assert sent_questions(engine) == ["1" * 10, "4"]


def test_dropped_turns_return_with_a_larger_context_or_a_shorter_answer() -> None:
    small = ScriptedEngine([["a" * 20], ["b"], ["c"]], room=50)
    large = ScriptedEngine([["d"]], room=1000, name="large")
    output = talk(
        small,
        ["1" * 10, "2" * 10, "/set max_tokens 1", "3", "/model large", "4"],
        models=OneModel(small, large=large),
    )
    assert [[m["content"] for m in messages if m["role"] == "user"] for messages in small.prompts] == [
        ["1" * 10],
        ["2" * 10],
        ["1" * 10, "2" * 10, "3"],
    ]
    assert sent_questions(large) == ["1" * 10, "2" * 10, "3", "4"]
    assert output.errors == []


@pytest.mark.parametrize("turns", [300, 3000])
def test_a_long_conversation_is_tokenized_a_few_times_not_once_a_turn(turns: int) -> None:
    class Counting(ScriptedEngine):
        characters = 0

        def encode(self, messages: Messages | str) -> Tokens:
            tokens = super().encode(messages)
            self.characters += len(tokens)
            return tokens

    engine = Counting([["yes"]], room=500, context_length=500)
    long = Conversation([Turn(f"question {n}", "x" * (n % 40)) for n in range(turns)])
    whole = sum(len(turn.question) + len(turn.answer) for turn in long.turns)
    pending = start_reply(engine, long, "and now?", Generation())  # type: ignore[arg-type]
    assert engine.encoded <= 12
    assert engine.characters <= 2 * whole + 12 * 600
    kept = long.turns[pending.first_sent - 1 :]  # one more would not fit
    assert sum(len(turn.question) + len(turn.answer) for turn in kept) + len("and now?") + 125 > 500


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), max_size=40),
    st.integers(1, 60),
    st.integers(61, 400),
)
def test_no_turn_that_fits_is_dropped(turns: list[tuple[int, int]], question: int, room: int) -> None:
    engine = ScriptedEngine([["yes"]], room=room, context_length=room)
    talked = Conversation(
        [Turn("q" * question_length, "a" * answer_length) for question_length, answer_length in turns]
    )
    pending = start_reply(engine, talked, "?" * question, Generation())  # type: ignore[arg-type]

    def fits(first_sent: int) -> bool:
        size = sum(len(turn.question) + len(turn.answer) for turn in talked.turns[first_sent:])
        return size + question + (room // 4 if first_sent < len(turns) else 1) <= room

    expected = next(place for place in range(len(turns) + 1) if fits(place))
    assert pending.first_sent == expected


def test_tokens_beyond_the_context_are_not_shown_as_a_percentage() -> None:
    engine = ScriptedEngine([["yes"]])
    before = Conversation([Turn("q" * 200, "a")])
    chat = Chat(
        OneModel(engine), ChatOptions(), RecordedOutput(), conversation=before, reader=ScriptedReader([])
    )
    assert chat.session.context_line() == "scripted  more than 100 tokens"


def test_a_template_that_rejects_a_conversation_is_rendered_once() -> None:
    class Refusing(ScriptedEngine):
        def encode(self, messages: Messages | str) -> Tokens:
            self.encoded += 1
            raise UsageError("roles must alternate")

    engine = Refusing([])
    talked = Conversation([Turn("q", "a")])
    chat = Chat(
        OneModel(engine), ChatOptions(), RecordedOutput(), conversation=talked, reader=ScriptedReader([])
    )
    assert [chat.session.context_line() for _ in range(5)] == ["scripted  100 tokens"] * 5
    assert engine.encoded == 1
    chat.session.changed()
    assert chat.session.context_used() is None
    assert engine.encoded == 2


def test_files_that_make_a_message_too_long_are_detached(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("x" * 30)
    engine = ScriptedEngine([["yes"]], room=60)
    lines = [f"/read {tmp_path}/one.txt", f"/read {tmp_path}/two.txt", "/read", "what?", "/read", "hello"]
    output = talk(engine, lines)
    assert sent_questions(engine) == ["hello"]
    assert len(output.errors) == 1
    assert "(not sent, and no longer attached: one.txt, two.txt)" in output.notices
    assert "with your next message: one.txt, two.txt" in output.notices
    assert output.notices.count("no file goes with your next message") == 1
    assert "one.txt goes with your next message: 1 line, 30 B, 30 tokens" in output.notices


def test_a_file_larger_than_the_context_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text("x" * 100)
    (tmp_path / "small.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    engine = ScriptedEngine([["yes"]])
    lines = [f"/read {tmp_path}/{name}.txt" for name in ("large", "small", "empty")]
    output = talk(engine, [*lines, '/read ""', "hello"])
    assert output.errors[0][0] == "large.txt has 100 tokens; the context holds 100"
    assert sent_questions(engine) == ["hello"]


def test_quiet_hides_notices_of_stopped_answers_and_dropped_turns() -> None:
    engine = ScriptedEngine([["a" * 10], ["b", KeyboardInterrupt()], [KeyboardInterrupt()]], room=40)
    output = talk(engine, ["1" * 10, "2" * 10, "3"], quiet=True)
    assert len(engine.prompts[1]) == 1
    assert output.notices == []
    options = ChatOptions(resume=True, quiet=True)
    assert (
        resume_conversation(sessions_path(), options, "demo", lambda text, hint: output.notice(text)) is None
    )
    assert output.notices == []


def test_an_unknown_setting_is_refused_even_without_a_value() -> None:
    output = talk(ScriptedEngine([]), ["/set heat", "/set top-k"])
    assert [error[0] for error in output.errors] == ["there is no setting heat", "/set top_k needs a value"]
