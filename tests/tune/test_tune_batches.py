"""Held-out lines, the order of steps, and batches of several processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.errors import UsageError
from moechat.tune.batches import make_batch, micro_batches, share_of, split, step_examples, steps_of_epoch
from moechat.tune.data import Example


def examples(count: int, parts: int = 1) -> list[Example]:
    return [
        Example(line, tuple(range(2 + line % 5)), (False, *[True] * (1 + line % 5)), 0)
        for line in range(1, count + 1)
        for _ in range(parts)
    ]


def test_parts_of_a_line_are_held_out_together() -> None:
    trained, held_out = split(examples(20, parts=3), 0.25, seed=1)
    assert len(held_out) == 15
    assert {e.line for e in trained} & {e.line for e in held_out} == set()
    assert split(examples(20, parts=3), 0.25, seed=1) == (trained, held_out)
    assert split(examples(20, parts=3), 0.25, seed=2)[1] != held_out


def test_nothing_is_held_out_on_request_and_one_line_at_least_otherwise() -> None:
    assert split(examples(3), 0, seed=0) == (examples(3), [])
    assert len(split(examples(3), 0.01, seed=0)[1]) == 1
    with pytest.raises(UsageError, match="1 line of data cannot be divided"):
        split(examples(1), 0.1, seed=0)


@given(count=st.integers(1, 30), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_epoch_takes_each_sequence_once_in_its_own_order(count: int, batch: int, seed: int) -> None:
    data = examples(count)
    steps = steps_of_epoch(count, batch)
    for epoch in range(2):
        taken = [e for at in range(steps) for e in step_examples(data, batch, epoch * steps + at, seed)]
        assert sorted(e.line for e in taken) == list(range(1, count + 1))
    first = [step_examples(data, batch, at, seed) for at in range(steps)]
    assert all(len(a.ids) >= len(b.ids) for step in first for a, b in pairwise(step))


@given(count=st.integers(1, 20), size=st.integers(1, 5), world=st.integers(1, 6))
def test_processes_do_equally_many_batches_and_count_each_once(count: int, size: int, world: int) -> None:
    parts = micro_batches(examples(count), size)
    shares = [share_of(parts, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    counted = [e.line for share in shares for part, counts in share if counts for e in part]
    assert sorted(counted) == list(range(1, count + 1))


def test_a_batch_is_padded_at_the_end() -> None:
    batch = make_batch(examples(3))
    assert batch.ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]
    assert batch.tokens.tolist() == [3, 4, 5]
    assert batch.trained.sum(1).tolist() == [2, 3, 4]
