"""Records the choices of a model's routers while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moechat.errors import UnsupportedModelError, UsageError
from moechat.models.router_search import Router
from moechat.offload.experts import RunsExperts, attach
from moechat.routing.trace import Trace
from moechat.routing.trace_gates import MAX_GATES, TraceGates

Gates = Callable[[torch.Tensor], npt.NDArray[np.float16]]


@dataclass
class _Layer:
    """Rows of the current sequence: one entry a pass."""

    experts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    weights: list[npt.NDArray[np.float16]] = field(default_factory=list)
    gates: list[npt.NDArray[np.float16]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.experts))


@dataclass
class _Sequence:
    experts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    prompt: int
    gates: npt.NDArray[np.float16] | None


class _Recording:
    """Records the inputs of one layer, and lets the layer compute."""

    def __init__(self, layer: _Layer, runner: RunsExperts, gates: Gates | None) -> None:
        self._layer = layer
        self._runner = runner
        self._gates = gates

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = self._runner.forward(hidden, top_k_index, top_k_weights)
        rows = len(hidden)
        # Copies, since a model may reuse its tensors. All before the first is kept: Ctrl-C may come between.
        experts = top_k_index.detach().reshape(rows, -1).numpy().astype(np.int32)
        weights = top_k_weights.detach().reshape(rows, -1).to(torch.float16).numpy().copy()
        if self._gates is not None:
            self._layer.gates.append(self._gates(hidden.detach()))
        self._layer.weights.append(weights)
        self._layer.experts.append(experts)
        return out


class RoutingRecorder:
    """Attaches to the expert modules of a model, mapped or in pages.

    Args:
        modules: Experts modules in the order of their layers, each with a layer attached.
        num_experts: Number of experts in a layer.
        routers: Router of each layer, or ``None`` where it is unknown, to record distributions too.
        embed: Embeddings, ``[u, hidden]``, of token ids ``[u]``; needed with ``routers``.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        num_experts: int,
        *,
        routers: Sequence[Router | None] | None = None,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._modules = list(modules)
        self._num_experts = num_experts
        self._embed = embed
        self._gates: list[Gates | None] = [None] * len(self._modules)
        if routers is not None:
            self._gates = [partial(_distribution, router, num_experts) for router in routers]
        self._layers = [_Layer() for _ in self._modules]
        self._done: list[_Sequence] = []

    @property
    def sequences(self) -> int:
        """Sequences that have been ended."""
        return len(self._done)

    @property
    def tokens(self) -> int:
        """Tokens of the ended sequences."""
        return sum(len(sequence.tokens) for sequence in self._done)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the ended sequences."""
        return sum(sequence.prompt for sequence in self._done)

    @property
    def rows(self) -> int:
        """Tokens of the current sequence that all layers have computed."""
        return min((layer.rows for layer in self._layers), default=0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record the passes in the block; afterwards the modules are as before."""
        before: list[RunsExperts] = [module._moechat_layer for module in self._modules]  # type: ignore[misc]
        try:
            rows = zip(self._modules, self._layers, before, self._gates, strict=True)
            for module, layer, runner, gates in rows:
                attach(module, _Recording(layer, runner, gates))
            yield
        finally:
            for module, runner in zip(self._modules, before, strict=True):
                attach(module, runner)

    def forget(self, first: int, last: int) -> None:
        """Drop rows ``first`` to ``last`` - 1 of the current sequence, which were computed again."""
        if first >= last:
            return
        for layer in self._layers:
            kept: tuple[list[Any], ...] = (layer.experts, layer.weights, layer.gates)
            for rows in filter(None, kept):
                whole = np.concatenate(rows)
                rows[:] = [whole[:first], whole[last:]]

    def end_sequence(self, tokens: Sequence[int], prompt: int) -> int:
        """End the current sequence; the next pass begins another one.

        Args:
            tokens: Ids of its tokens; those that were not computed, such as the last one drawn, are ignored.
            prompt: Length of its prompt.

        Returns:
            Number of its rows; an empty sequence is dropped.

        Raises:
            UnsupportedModelError: The number of experts differs from token to token.
            UsageError: The distributions of all sequences are more than a trace can hold.
        """
        rows = min(self.rows, len(tokens))
        layers = [(layer.experts, layer.weights) for layer in self._layers]
        distributions = [layer.gates for layer in self._layers]
        for layer in self._layers:
            layer.experts, layer.weights, layer.gates = [], [], []
        if rows == 0:
            return 0
        widths = {part.shape[1] for experts, _ in layers for part in experts}
        if len(widths) > 1:
            raise UnsupportedModelError(f"a token is given {min(widths)} to {max(widths)} experts by turns")
        chosen = np.stack([np.concatenate(experts)[:rows] for experts, _ in layers], axis=1)
        if chosen.min() < 0 or chosen.max() >= self._num_experts:
            raise UnsupportedModelError(
                f"a token was given expert {chosen.max() if chosen.min() >= 0 else chosen.min()} of "
                f"{self._num_experts}: this model's routing cannot be recorded"
            )
        weights = np.stack([np.concatenate(weights)[:rows] for _, weights in layers], axis=1)
        gates = None
        if self._embed is not None:
            self._require_room(rows)
            gates = np.stack([np.concatenate(parts)[:rows] for parts in distributions], axis=1)
        self._done.append(
            _Sequence(chosen, weights, np.array(tokens[:rows], dtype=np.int32), min(prompt, rows), gates)
        )
        return rows

    def _require_room(self, rows: int) -> None:
        most = MAX_GATES // (len(self._layers) * self._num_experts)
        if self.tokens + rows > most:
            raise UsageError(
                f"a trace can hold the routers' distributions of {most:,} tokens of this model, and "
                f"{self.tokens + rows:,} were computed",
                hint="use fewer prompts (--limit), or shorter answers (--max-tokens)",
            )

    def trace(self) -> Trace:
        """All sequences that have been ended.

        Raises:
            ValueError: There is none.
        """
        done = self._done
        if not done:
            raise ValueError("nothing was recorded")
        return Trace(
            np.concatenate([sequence.experts for sequence in done]),
            np.cumsum([0, *(len(sequence.tokens) for sequence in done)], dtype=np.int64),
            self._num_experts,
            np.concatenate([sequence.weights for sequence in done]),
            np.concatenate([sequence.tokens for sequence in done]),
            np.array([sequence.prompt for sequence in done], dtype=np.int64),
            self._trace_gates(),
        )

    def _trace_gates(self) -> TraceGates | None:
        found = [sequence.gates for sequence in self._done if sequence.gates is not None]
        if self._embed is None or not found:
            return None
        ids = np.unique(np.concatenate([sequence.tokens for sequence in self._done]))
        with torch.inference_mode():
            embeddings = self._embed(torch.from_numpy(ids.astype(np.int64)))
        return TraceGates(np.concatenate(found), ids, embeddings.to(torch.float16).cpu().numpy())


def _distribution(router: Router | None, experts: int, hidden: torch.Tensor) -> npt.NDArray[np.float16]:
    """Distribution of a router for hidden states ``[tokens, hidden]``; zeros where it is unknown."""
    if router is None:
        return np.zeros((len(hidden), experts), dtype=np.float16)
    with torch.inference_mode():
        rows: npt.NDArray[np.float16] = router.distribution(hidden).to(torch.float16).cpu().numpy()
    return rows
