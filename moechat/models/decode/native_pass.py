"""Computes all layers of a model for decoded tokens in one native call: one of each of several conversations,
or successive ones of one.

Between two layers Python and torch would run with caches full of weights, so that each of their steps waits
for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moechat import _native
from moechat.models.decode.native_step import NativeStep, native_part
from moechat.models.decode.probe import hooks_of
from moechat.models.skeleton import EXPERTS_RUNNER

_Rest = _native.ResidentExperts | _native.Mlp | _native.FeedStep


@dataclass(frozen=True)
class _Segment:
    """Neighbouring layers that are computed in one call, or one layer that is not: ``run`` is ``None``."""

    layers: range
    run: _native.TokenPass | None
    chosen: int  # experts of a token, in all layers
    counters: Any  # of what runs the experts, or None


class NativePass:
    """The layers of a model. Those whose experts are in memory or mapped are computed in native calls, with
    their neighbours as far as possible.

    What runs the experts may change between tokens, and need not be native.

    Args:
        steps: Of all layers.
    """

    def __init__(self, steps: Sequence[NativeStep]) -> None:
        self._steps = list(steps)
        self._experts: list[Any] = [step.feed.experts for step in steps]
        mlps = [step.feed.mlp for step in steps if step.feed.experts is None and not step.feed.ends]
        self._hooks = hooks_of(module for mlp in mlps for module in mlp.modules())
        self._runners: list[Any] | None = None
        self._segments: list[_Segment] = []

    def __call__(
        self,
        hidden: torch.Tensor,
        slots: Sequence[Sequence[Any]],
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor | None:
        """Hidden states behind the last layer, ``[1, tokens, hidden]``.

        REQUIRES: as :attr:`NativeStep.decode`.

        Args:
            hidden: ``[1, tokens, hidden]``.
            slots: Of each layer, the layer of each token's cache.
            angles: Of each layer, cosines and sines of the tokens.

        Returns:
            ``None``, without any change, if no layers can be computed natively, or a layer of a cache does
            not take its token.

        Raises:
            Exception: Any error of an expert layer. Layers of the caches may have the tokens then, with
                undefined values.
        """
        if not self.runs() or any(self._hooks):
            return None
        ready = [step.places.find_all(row) for step, row in zip(self._steps, slots, strict=True)]
        if any(row is None for row in ready):
            return None
        found: dict[int, tuple[int, int]] = {}  # layers share them
        for pair in angles:
            if id(pair) not in found:
                found[id(pair)] = pair[0].data_ptr(), pair[1].data_ptr()
        for segment in self._segments:
            if segment.run is None:
                (number,) = segment.layers
                made = self._steps[number].decode(hidden, slots[number], *angles[number])
                assert made is not None  # its places are there
                hidden = made
                continue
            places = [list(map(self._steps[at].places.take, ready[at] or ())) for at in segment.layers]
            turns = [found[id(angles[at])] for at in segment.layers]
            tokens, out = hidden.shape[1], torch.empty_like(hidden)
            read = segment.run.run(hidden.data_ptr(), turns, places, tokens, out.data_ptr())
            if segment.counters is not None:
                segment.counters.add(segment.chosen * tokens, read)
            hidden = out
        return hidden

    def runs(self) -> list[_native.TokenPass]:
        """The native calls of a token now; made anew if other objects run the experts than before."""
        runners = [None if module is None else vars(module)[EXPERTS_RUNNER] for module in self._experts]
        before = self._runners
        if before is None or any(new is not old for new, old in zip(runners, before, strict=True)):
            self._runners, self._segments = runners, list(self._divided(runners))
        return [segment.run for segment in self._segments if segment.run is not None]

    def _divided(self, runners: Sequence[Any]) -> Iterator[_Segment]:
        parts = list(map(_native_rest, self._steps, runners))
        first = 0
        while first < len(parts):
            end = first + 1
            while parts[first] is not None and end < len(parts) and parts[end] is not None:
                end += 1
            layers = range(first, end)
            pairs = [(self._steps[at].run, part) for at in layers if (part := parts[at]) is not None]
            counters = [runners[at].counters for at in layers if pairs and runners[at] is not None]
            chosen = sum(self._steps[at].feed.chosen for at in layers)
            run = _native.TokenPass(pairs) if pairs else None
            yield _Segment(layers, run, chosen, counters[0] if counters else None)
            first = end


def _native_rest(step: NativeStep, runner: Any) -> _Rest | None:
    """What is native of a layer behind its step, whose experts ``runner`` runs, if it has any. If the layer
    ends with its mixer, its feed step stands for it.
    """
    if step.feed.ends:
        return step.feed.run
    part = native_part(step.feed.mlp) if step.feed.experts is None else getattr(runner, "resident", None)
    return part if isinstance(part, _native.ResidentExperts | _native.Mlp) else None
