"""The replay's cursor: which token each layer of a pass gets, and what comes next."""

from __future__ import annotations

import numpy as np
import pytest

from moechat.routing import Replay, Trace


def counting(tokens: int = 10, layers: int = 3) -> Trace:
    """Token t, layer l chooses experts 2 * (t * layers + l) and the one after it."""
    base = 2 * np.arange(tokens * layers, dtype=np.int32).reshape(tokens, layers, 1)
    return Trace(base + np.array([0, 1], dtype=np.int32), np.array([0, tokens]), 2 * tokens * layers)


def test_layers_of_a_pass_get_the_same_tokens_and_passes_follow_each_other() -> None:
    trace = counting()
    replay = Replay(trace)
    for start, tokens in ((0, 4), (4, 1), (5, 1), (6, 3)):
        assert replay.position == start
        for layer in range(3):
            chosen = replay.route(layer, tokens)
            assert chosen.dtype == np.int64
            assert chosen.flags.c_contiguous
            assert np.array_equal(chosen, trace.experts[start : start + tokens, layer])


def test_a_replay_starts_again_after_the_end() -> None:
    trace = counting()
    replay = Replay(trace, position=8)
    assert np.array_equal(replay.route(0, 4), trace.experts[[8, 9, 0, 1], 0])
    assert replay.position == 2
    assert np.array_equal(replay.route(0, 1), trace.experts[[2], 0])
    assert np.array_equal(replay.route(0, 20), trace.experts[np.arange(3, 23) % 10, 0])


def test_upcoming_experts_are_those_chosen_later() -> None:
    trace = counting()
    for tokens in (1, 4):
        replay = Replay(trace)
        announced = {}
        for at, step in enumerate((tokens, 1, 1)):
            for layer in range(3):
                chosen = replay.route(layer, step)
                if (at, layer) in announced:
                    assert np.array_equal(announced[at, layer], chosen[-1])
                for ahead in (1, 2, 4):
                    turns, target = divmod(layer + ahead, 3)
                    announced[at + turns, target] = replay.upcoming(layer, ahead)


def test_rewinding_starts_over_wherever_the_pass_was() -> None:
    replay = Replay(counting())
    replay.route(0, 5)
    replay.rewind(2)
    assert replay.position == 2
    assert replay.route(0, 1)[0, 0] == 2 * 2 * 3


def test_the_future_begins_with_the_next_pass() -> None:
    trace = counting()
    replay = Replay(trace)
    assert np.array_equal(replay.future(), trace.experts)
    replay.route(0, 3)
    replay.route(1, 3)
    assert np.array_equal(replay.future(), trace.experts[3:])


def test_misuse_is_refused() -> None:
    replay = Replay(counting())
    replay.route(0, 2)
    with pytest.raises(ValueError, match="layer 1 has 3 tokens, layer 0 of this pass 2"):
        replay.route(1, 3)
    with pytest.raises(ValueError, match="there are 3 layers"):
        replay.route(3, 2)
    with pytest.raises(ValueError, match="position is 10"):
        replay.rewind(10)
    with pytest.raises(ValueError, match="assignment destination is read-only"):
        replay.route(0, 1)[0] = 0
