"""Expert layers computed from block records, behind transformers' experts interface.

``ALL_EXPERTS_FUNCTIONS["moechat"]`` receives what every decorated family hands to its experts — hidden
states, the router's top-k indices and weights — and forwards it to the :class:`ExpertLayer` attached to the
module. One layer costs one native call, whatever the number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moechat import _native
from moechat.geometry import ExpertGeometry

IMPLEMENTATION = "moechat"


@dataclass
class ExpertCounters:
    """What the expert layers have done since the last reset; the engine reads it between steps.

    Attributes:
        activations: (token, expert) pairs computed.
        experts_read: Distinct experts walked, summed over layers and passes.
        bytes_read: Bytes of block records walked.
    """

    activations: int = 0
    experts_read: int = 0
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

    def __post_init__(self) -> None:
        experts, blocks, record_bytes = self.records.shape
        if (blocks, record_bytes) != (self.geometry.blocks_per_expert, self.geometry.record_bytes):
            raise ValueError(f"records of shape {self.records.shape} do not fit {self.geometry}")
        start = np.uint64(self.records.ctypes.data)
        offsets = np.arange(experts * blocks, dtype=np.uint64) * np.uint64(record_bytes)
        self._addresses = (start + offsets).reshape(experts, blocks)

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
        k = top_k_index.shape[-1]

        order = np.argsort(index, kind="stable")
        sorted_index = index[order]
        inside = (sorted_index >= 0) & (sorted_index < geometry.num_experts)
        if not inside.all():
            order, sorted_index = order[inside], sorted_index[inside]
        experts, row_start = np.unique(sorted_index, return_index=True)
        rows, blocks = len(experts), geometry.blocks_per_expert

        out = torch.zeros_like(x)
        _native.moe_forward(
            geometry.layout,
            geometry.activation.value,
            geometry.alpha,
            geometry.limit,
            x.numpy(),
            self._addresses[experts].reshape(-1),
            np.tile(np.arange(blocks, dtype=np.int32), rows),
            np.repeat(np.arange(rows, dtype=np.int32), blocks),
            np.append(row_start, len(order)).astype(np.int32),
            (order // k).astype(np.int32),
            weight[order],
            out.numpy(),
        )
        self.counters.activations += len(order)
        self.counters.experts_read += rows
        self.counters.bytes_read += rows * geometry.expert_bytes
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
