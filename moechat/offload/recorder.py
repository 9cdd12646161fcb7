"""Records the choices of a model's routers while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moechat.errors import UnsupportedModelError
from moechat.offload.experts import RunsExperts, attach
from moechat.routing.trace import Trace


@dataclass
class _Layer:
    """Rows of the current sequence: one entry a pass."""

    experts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    weights: list[npt.NDArray[np.float16]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.experts))


@dataclass
class _Sequence:
    experts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float16]
    tokens: npt.NDArray[np.int32]
    prompt: int


class _Recording:
    """Records the inputs of one layer, and lets the layer compute."""

    def __init__(self, layer: _Layer, runner: RunsExperts) -> None:
        self._layer = layer
        self._runner = runner

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = self._runner.forward(hidden, top_k_index, top_k_weights)
        rows = len(hidden)
        # Copies, since a model may reuse its tensors.
        self._layer.experts.append(top_k_index.detach().reshape(rows, -1).numpy().astype(np.int32))
        weights = top_k_weights.detach().reshape(rows, -1).to(torch.float16)
        self._layer.weights.append(weights.numpy().copy())
        return out


class RoutingRecorder:
    """Attaches to the expert modules of a model, mapped or in pages.

    Args:
        modules: Experts modules in the order of their layers, each with a layer attached.
        num_experts: Number of experts in a layer.
    """

    def __init__(self, modules: Sequence[nn.Module], num_experts: int) -> None:
        self._modules = list(modules)
        self._num_experts = num_experts
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
            for module, layer, runner in zip(self._modules, self._layers, before, strict=True):
                attach(module, _Recording(layer, runner))
            yield
        finally:
            for module, runner in zip(self._modules, before, strict=True):
                attach(module, runner)

    def forget(self, first: int, last: int) -> None:
        """Drop rows ``first`` to ``last`` - 1 of the current sequence, which were computed again."""
        if first >= last:
            return
        for layer in self._layers:
            for rows in (layer.experts, layer.weights):
                whole = np.concatenate(rows)
                rows[:] = [whole[:first], whole[last:]]  # type: ignore[list-item]

    def end_sequence(self, tokens: Sequence[int], prompt: int) -> int:
        """End the current sequence; the next pass begins another one.

        Args:
            tokens: Ids of its tokens; those that were not computed, such as the last one drawn, are ignored.
            prompt: Length of its prompt.

        Returns:
            Number of its rows; an empty sequence is dropped.

        Raises:
            UnsupportedModelError: The number of experts differs from token to token.
        """
        rows = min(self.rows, len(tokens))
        layers = [(layer.experts, layer.weights) for layer in self._layers]
        for layer in self._layers:
            layer.experts, layer.weights = [], []
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
        self._done.append(
            _Sequence(chosen, weights, np.array(tokens[:rows], dtype=np.int32), min(prompt, rows))
        )
        return rows

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
        )
