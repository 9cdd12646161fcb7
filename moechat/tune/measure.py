"""Measures a model on held-out data: perplexity, misses of a hard cache, and the entropy of its experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moechat.tune.adapted import routed_pass
from moechat.tune.batches import make_batch, micro_batches
from moechat.tune.data import Example
from moechat.tune.router_taps import RouterTaps


@dataclass(frozen=True)
class Measurement:
    """How a model does on held-out sequences.

    Attributes:
        perplexity: Of the trained tokens.
        misses: Experts that a γ-cache lacks, for each token and layer, by its capacity (equation 10).
        sequence_entropy: Mean entropy of a sequence's choices in a layer, in bits.
        global_entropy: Entropy of the choices of all sequences in a layer, mean over layers, in bits.
    """

    perplexity: float
    misses: dict[int, float]
    sequence_entropy: float
    global_entropy: float

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "perplexity": self.perplexity,
            "misses": {str(capacity): value for capacity, value in self.misses.items()},
            "sequence_entropy_bits": self.sequence_entropy,
            "global_entropy_bits": self.global_entropy,
        }

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> Measurement:
        """The inverse of :meth:`facts`."""
        return cls(
            facts["perplexity"],
            {int(capacity): value for capacity, value in facts["misses"].items()},
            facts["sequence_entropy_bits"],
            facts["global_entropy_bits"],
        )


def capacities_of(experts: int) -> tuple[int, ...]:
    """Capacities that misses are counted for: a quarter and half of the experts."""
    return tuple(sorted({max(1, experts // 4), max(1, experts // 2)}))


def hard_misses(
    chosen: NDArray[np.int64], experts: int, capacities: Sequence[int], gamma: float
) -> NDArray[np.int64]:
    """Misses of caches that hold the experts with the highest decayed counts (equations 8 to 10).

    Caches start empty; equal counts are ordered by the number of the expert. With γ = 1 it is an LFU cache.

    Args:
        chosen: Chosen experts of a sequence, ``[layers, tokens, K]``.
        experts: E.
        capacities: Each C.
        gamma: γ.

    Returns:
        Misses over all layers and tokens, int64 ``[capacities]``.
    """
    layers, tokens, _ = chosen.shape
    counts = np.zeros((layers, experts))
    place = np.empty((layers, experts), np.int64)  # of each expert in the order of counts
    positions = np.broadcast_to(np.arange(experts), place.shape)
    limits = np.asarray(capacities)[:, None, None]
    misses = np.zeros(len(capacities), np.int64)
    for token in range(tokens):
        request = chosen[:, token]
        np.put_along_axis(place, np.argsort(-counts, axis=1, kind="stable"), positions, 1)
        unused = np.take_along_axis(counts, request, 1) == 0
        misses += ((np.take_along_axis(place, request, 1) >= limits) | unused).sum((1, 2))
        # An expert that was used long ago stays ahead of one that was never used.
        counts = np.where(counts > 0, np.maximum(counts * gamma, 1e-300), 0.0)
        np.put_along_axis(counts, request, np.take_along_axis(counts, request, 1) + 1, 1)
    return misses


def entropy_bits(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropy of counts ``[..., E]`` over the last axis, in bits; 0 where all are 0."""
    share = counts / np.maximum(counts.sum(-1, keepdims=True), 1e-30)
    logs = np.log2(np.where(share > 0, share, 1.0))
    result: NDArray[np.float64] = -(share * logs).sum(-1)
    return result


class _Sums:
    """Sums over sequences, which processes add up."""

    def __init__(self, layers: int, experts: int, capacities: Sequence[int]) -> None:
        self.scalars = np.zeros(4 + len(capacities))  # nll, trained tokens, tokens, entropies, misses
        self.usage = np.zeros((layers, experts))
        self.capacities = tuple(capacities)

    def add(self, nll: float, example: Example, chosen: NDArray[np.int64], gamma: float) -> None:
        """Add a sequence with its choices ``[layers, tokens, K]``."""
        layers, experts = self.usage.shape
        own = np.stack([np.bincount(of_layer.ravel(), minlength=experts) for of_layer in chosen])
        missed = hard_misses(chosen, experts, self.capacities, gamma) / layers
        sequence = float(entropy_bits(own.astype(np.float64)).mean())
        self.scalars += [nll, sum(example.trained), len(example.ids), sequence, *missed]
        self.usage += own

    def vector(self) -> NDArray[np.float64]:
        """All sums in one array."""
        return np.concatenate([self.scalars, self.usage.ravel()])

    def result(self, total: NDArray[np.float64], sequences: int) -> Measurement:
        """The measurement of the added vectors of all processes."""
        scalars = total[: len(self.scalars)]
        usage = total[len(self.scalars) :].reshape(self.usage.shape)
        nll, trained, tokens, entropy = scalars[:4]
        misses = {
            capacity: float(found / tokens)
            for capacity, found in zip(self.capacities, scalars[4:], strict=True)
        }
        return Measurement(
            math.exp(min(nll / max(trained, 1), 700)),
            misses,
            float(entropy / sequences),
            float(entropy_bits(usage).mean()),
        )


def measure(
    model: Any,
    taps: RouterTaps,
    examples: Sequence[Example],
    *,
    gamma: float,
    size: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    advance: Callable[[int], None] = lambda done: None,
) -> Measurement:
    """Measure a model; with several processes each takes a part of the sequences.

    Args:
        model: A transformers model, with or without adapters.
        taps: Its routers.
        examples: The held-out sequences, at least one.
        gamma: γ of the cache.
        size: Sequences of a batch.
        device: Where the model is.
        rank: Number of this process.
        world: Processes.
        add_up: Adds a float64 tensor over all processes.
        advance: Called with the number of sequences that this process has done.
    """
    sums = _Sums(len(taps.routers), taps.experts, capacities_of(taps.experts))
    model.eval()
    own = sorted(examples[rank::world], key=lambda example: -len(example.ids))
    done = 0
    for group in micro_batches(own, size):
        found = routed_pass(model, taps, make_batch(group), device)
        chosen = found.chosen.cpu().numpy()
        for row, example in enumerate(group):
            sums.add(float(found.nll[row]), example, chosen[:, row, : len(example.ids)], gamma)
        done += len(group)
        advance(done)
    total = add_up(torch.from_numpy(sums.vector()))
    return sums.result(total.numpy(), len(examples))
