"""Expert layers computed from block records, behind transformers' experts interface.

``ALL_EXPERTS_FUNCTIONS["moechat"]`` receives what every decorated family hands to its experts — hidden
states, the router's top-k indices and weights — and forwards it to the :class:`ExpertLayer` attached to the
module. One layer costs one native call, whatever the number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moechat import _native
from moechat.geometry import ExpertGeometry

IMPLEMENTATION = "moechat"


@lru_cache(maxsize=1024)
def _block_lists(rows: int, blocks: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For ``rows`` experts with all their blocks in order: index of each block in its expert, and its row."""
    index = np.tile(np.arange(blocks, dtype=np.int32), rows)
    row = np.repeat(np.arange(rows, dtype=np.int32), blocks)
    index.flags.writeable = row.flags.writeable = False
    return index, row


@dataclass
class ExpertCounters:
    """What the expert layers have done since they were made; the engine reads the differences.

    Attributes:
        activations: (token, expert) pairs computed.
        bytes_read: Bytes of block records walked.
    """

    activations: int = 0
    bytes_read: int = 0


@dataclass
class ExpertLayer:
    """The routed experts of one decoder layer, as records mapped from the store.

    Attributes:
        geometry: Shape and encoding of the experts.
        records: uint8 ``[experts, blocks, record_bytes]``; kept alive as long as kernels read it.
        counters: Shared by all layers of an engine.
    """

    geometry: ExpertGeometry
    records: npt.NDArray[np.uint8]
    counters: ExpertCounters
    _addresses: npt.NDArray[np.uint64] = field(init=False, repr=False)
    _layout: _native.BlockLayout = field(init=False, repr=False)
    _gate: tuple[str, float, float] = field(init=False, repr=False)
    _expert_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        experts, blocks, record_bytes = self.records.shape
        if (blocks, record_bytes) != (self.geometry.blocks_per_expert, self.geometry.record_bytes):
            raise ValueError(f"records of shape {self.records.shape} do not fit {self.geometry}")
        start = np.uint64(self.records.ctypes.data)
        offsets = np.arange(experts * blocks, dtype=np.uint64) * np.uint64(record_bytes)
        self._addresses = (start + offsets).reshape(experts, blocks)
        self._layout = self.geometry.layout
        self._gate = (self.geometry.activation.value, self.geometry.alpha, self.geometry.limit)
        self._expert_bytes = self.geometry.expert_bytes

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden: ``[tokens, hidden_size]``, any floating type.
            top_k_index: ``[tokens, k]`` expert indices; an index outside the layer selects no expert.
            top_k_weights: ``[tokens, k]`` router weights.

        Returns:
            ``[tokens, hidden_size]`` in the type of ``hidden``. Block partial sums are accumulated in
            float32, experts ascending and blocks ascending (DESIGN, invariant 6), so that the result does not
            depend on who computes.
        """
        geometry = self.geometry
        x = hidden.detach().to(torch.float32).contiguous()
        index = top_k_index.reshape(-1).numpy()
        weight = top_k_weights.detach().reshape(-1).to(torch.float32).numpy()
        order = index.argsort(kind="stable")
        picked = index[order]
        if len(picked) and (picked[0] < 0 or picked[-1] >= geometry.num_experts):
            inside = (picked >= 0) & (picked < geometry.num_experts)
            order, picked = order[inside], picked[inside]
        if len(x) == 1:
            # Decode: a router picks an expert once, so every pick is a row of its own.
            experts, starts = picked, np.arange(len(picked) + 1, dtype=np.int32)
        else:
            experts, first = np.unique(picked, return_index=True)
            starts = np.append(first, len(order)).astype(np.int32)
        block_index, block_row = _block_lists(len(experts), geometry.blocks_per_expert)

        out = torch.zeros_like(x)
        _native.moe_forward(
            self._layout,
            *self._gate,
            x.numpy(),
            self._addresses[experts].reshape(-1),
            block_index,
            block_row,
            starts,
            (order // top_k_index.shape[-1]).astype(np.int32),
            weight[order],
            out.numpy(),
        )
        self.counters.activations += len(order)
        self.counters.bytes_read += len(experts) * self._expert_bytes
        return out.to(hidden.dtype)


def attach(module: nn.Module, layer: ExpertLayer) -> None:
    """Let ``module`` (an experts module whose parameters were taken out) compute through ``layer``."""
    module._moechat_layer = layer  # type: ignore[assignment]


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that transformers calls in place of a family's own loop over experts."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    layer: ExpertLayer = module._moechat_layer
    return layer.forward(flat, top_k_index, top_k_weights).reshape(hidden_states.shape)


def register() -> None:
    """Make ``moechat`` known to transformers' experts registry; harmless when repeated."""
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
