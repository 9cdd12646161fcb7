"""Divides sequences into held-out and trained ones, steps, and batches for each process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moechat.errors import UsageError
from moechat.tune.data import Example

MOST_HELD_OUT = 256  # sequences; more would only take longer


@dataclass(frozen=True)
class Batch:
    """Sequences that go through the model together.

    Attributes:
        ids: int64 ``[B, T]``, padded at the end with 0.
        trained: bool ``[B, T]``, see :class:`Example`.
        tokens: Of each sequence, int64 ``[B]``.
    """

    ids: torch.Tensor
    trained: torch.Tensor
    tokens: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(self.ids.to(device), self.trained.to(device), self.tokens.to(device))


def make_batch(examples: Sequence[Example]) -> Batch:
    """Pad sequences to the longest of them."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    trained = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        trained[row, : len(example.ids)] = torch.tensor(example.trained)
    return Batch(ids, trained, torch.tensor([len(example.ids) for example in examples]))


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Divide sequences, those of a line together, at random.

    Args:
        examples: All.
        share: Of the lines that is held out; at least one line, unless it is 0.
        seed: Of the choice.

    Returns:
        Trained and held-out sequences, in their order.

    Raises:
        UsageError: There are too few lines for both.
    """
    lines = sorted({example.line for example in examples})
    count = 0 if share == 0 else max(1, round(share * len(lines)))
    if count >= len(lines):
        raise UsageError(
            f"{len(lines)} line{'' if len(lines) == 1 else 's'} of data cannot be divided into trained and "
            "held-out lines",
            hint="add data, or measure nothing with --held-out 0",
        )
    order = np.random.default_rng([seed, 1]).permutation(len(lines))
    held = {lines[at] for at in order[:count]}
    held_out = [example for example in examples if example.line in held]
    return [example for example in examples if example.line not in held], held_out[:MOST_HELD_OUT]


def steps_of_epoch(sequences: int, batch: int) -> int:
    """Steps of an epoch; the last one may be smaller."""
    return -(-sequences // batch)


def step_examples(examples: Sequence[Example], batch: int, step: int, seed: int) -> list[Example]:
    """The sequences of a step, longest first. Each epoch has an order of its own.

    Args:
        examples: The trained sequences.
        batch: Sequences of a step.
        step: Number of the step over all epochs, from 0.
        seed: Of the order.
    """
    epoch, at = divmod(step, steps_of_epoch(len(examples), batch))
    order = np.random.default_rng([seed, 2, epoch]).permutation(len(examples))
    chosen = [examples[i] for i in order[at * batch : (at + 1) * batch]]
    return sorted(chosen, key=lambda example: -len(example.ids))


def share_of(parts: Sequence[list[Example]], rank: int, world: int) -> list[tuple[list[Example], bool]]:
    """The batches of one process.

    All processes get the same number, because they exchange gradients together: the last ones may repeat a
    batch that does not count.

    Args:
        parts: The batches of a step, at least one.
        rank: Number of the process.
        world: Processes.

    Returns:
        Batches, and whether each counts.
    """
    rounds = -(-len(parts) // world)
    numbers = range(rank, rounds * world, world)
    return [(parts[at], True) if at < len(parts) else (parts[0], False) for at in numbers]


def micro_batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Consecutive groups of at most ``size`` sequences."""
    return [list(examples[at : at + size]) for at in range(0, len(examples), size)]
