"""Signals that end the program while the chat's editor reads a line, wherever its event loop is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from moechat.chat.terminal.prompt_signals import raising_after

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """What the handlers raise, with the number of the signal."""


def raise_ended(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    before = {number: signal.signal(number, raise_ended) for number in NUMBERS}
    try:
        with create_pipe_input() as made:
            yield made
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read(
    keys: PipeInput, in_loop: Callable[[], None] = lambda: None, before: Callable[[], None] = lambda: None
) -> str:
    """Read a line; ``in_loop`` runs in a callback of the event loop, ``before`` earlier."""
    session: PromptSession[str] = PromptSession(input=keys, output=DummyOutput())

    def schedule() -> None:
        loop = get_app().loop
        assert loop is not None
        loop.call_soon(in_loop)

    with raising_after(session.app):
        before()
        return session.prompt(pre_run=schedule)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_in_a_callback_ends_the_prompt_with_what_its_handler_raises(
    keys: PipeInput, number: signal.Signals
) -> None:
    with pytest.raises(Ended) as ended:
        read(keys, lambda: signal.raise_signal(number))
    assert ended.value.args == (number,)
    assert all(signal.getsignal(each) is raise_ended for each in NUMBERS)


@pytest.mark.timeout(20)
def test_a_signal_before_the_loop_runs_ends_the_prompt(keys: PipeInput) -> None:
    with pytest.raises(Ended):
        read(keys, before=lambda: signal.raise_signal(signal.SIGHUP))


@pytest.mark.timeout(20)
def test_the_first_signal_counts_and_a_line_just_entered_does_not(keys: PipeInput) -> None:
    def both() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        keys.send_text("a line\r")

    with pytest.raises(Ended) as ended:
        read(keys, both)
    assert ended.value.args == (signal.SIGTERM,)


@pytest.mark.timeout(20)
def test_ignored_signals_stay_ignored(keys: PipeInput) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ignored() -> None:
        signal.raise_signal(signal.SIGHUP)
        keys.send_text("a line\r")

    assert read(keys, ignored) == "a line"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
