"""Expert layers computed from block records, behind transformers' experts interface.

``ALL_EXPERTS_FUNCTIONS["moechat"]`` receives the hidden states and the router's top-k indices and weights
from every decorated family, and forwards them to the :class:`ExpertLayer` attached to the module. One layer
costs one native call, for any number of experts.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moechat import _native
from moechat.geometry import DEFAULT_ACTIVATION_BITS, ExpertGeometry
from moechat.models.skeleton import EXPERTS_RUNNER

IMPLEMENTATION = "moechat"


@dataclass
class ExpertCounters:
    """Totals of the expert layers since they were made; the engine reads the differences.

    Attributes:
        activations: (token, expert) pairs computed.
        bytes_read: Bytes of block records walked.
    """

    activations: int = 0
    bytes_read: int = 0

    def add(self, activations: int, bytes_read: int) -> None:
        """Count a pass, or a layer of one."""
        self.activations += activations
        self.bytes_read += bytes_read


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in C order and in a type; the tensor itself where possible, since every call of torch costs
    microseconds while the caches are full of weights.
    """
    if tensor.dtype is dtype and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.to(dtype).contiguous().resolve_neg()


@dataclass
class ExpertLayer:
    """The routed experts of one decoder layer, as records mapped from the store.

    Attributes:
        geometry: Shape and encoding of the experts.
        records: uint8 ``[experts, blocks, record_bytes]``; kept alive as long as kernels read it.
        counters: Shared by all layers of an engine.
        activation_bits: How inputs meet quantised weights: 8 or 16, integers; 32, float32.
        ordinal: Of the layer among those with experts, from 0; layers may differ in their encodings.
        resident: They, for native code.
    """

    geometry: ExpertGeometry
    records: npt.NDArray[np.uint8]
    counters: ExpertCounters
    activation_bits: int = DEFAULT_ACTIVATION_BITS
    ordinal: int = 0
    resident: _native.ResidentExperts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        blocks, record_bytes = self.records.shape[1:]
        if (blocks, record_bytes) != (self.geometry.blocks_per_expert, self.geometry.record_bytes):
            raise ValueError(f"records of shape {self.records.shape} do not fit {self.geometry}")
        geometry = self.geometry
        # Only an array mapped from a file is read ahead.
        mapped = isinstance(self.records, np.memmap) or isinstance(self.records.base, mmap.mmap)
        if mapped:
            _native.prefer_huge_pages(self.records)
        self.resident = _native.ResidentExperts(
            geometry.layout_of(self.ordinal),
            geometry.gate_of(self.ordinal).native,
            self.records,
            self.activation_bits,
            mapped,
        )

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden: ``[tokens, hidden_size]``, any floating type.
            top_k_index: ``[tokens, k]`` expert indices; an index outside the layer selects no expert.
            top_k_weights: ``[tokens, k]`` router weights.

        Returns:
            ``[tokens, hidden_size]`` in the type of ``hidden``. Every expert's blocks are summed in float32
            in ascending order, then the experts in ascending order, so that the result does not depend on
            threads, budget or the order of arrival.

        Raises:
            ValueError: The shapes do not belong together, or a tensor is not in the CPU's memory.
        """
        x = _plain(hidden, torch.float32)
        index = _plain(top_k_index, torch.int64)
        weight = _plain(top_k_weights, torch.float32)
        tokens, width = x.shape
        chosen = index.numel()
        # The native call takes addresses, so shapes are checked here.
        if (
            width != self.geometry.hidden_size
            or chosen != weight.numel()
            or (chosen % tokens if tokens else chosen)
            or not (x.is_cpu and index.is_cpu and weight.is_cpu)
        ):
            raise ValueError(
                f"hidden states {tuple(x.shape)}, top-k indices {tuple(index.shape)} and weights "
                f"{tuple(weight.shape)} on {x.device}, {index.device} and {weight.device} do not belong "
                f"together in {self.geometry}"
            )
        out = torch.empty_like(x)  # independent of torch's default type and device
        if chosen == 0:
            out.zero_()
        else:
            read = self.resident.forward(
                x.data_ptr(),
                index.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                tokens,
                chosen // tokens,
            )
            self.counters.add(chosen, read)
        return out if hidden.dtype is torch.float32 else out.to(hidden.dtype)


class RunsExperts(Protocol):
    """Computes the experts of one layer, from the mapped store or from pages."""

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts; see :meth:`ExpertLayer.forward`."""
        ...


def attach(module: nn.Module, layer: RunsExperts) -> None:
    """Attach a layer to an experts module, whose parameters were taken out."""
    vars(module)[EXPERTS_RUNNER] = layer


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that transformers calls in place of a family's own loop over experts."""
    _native.prewake()
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    layer: RunsExperts = vars(module)[EXPERTS_RUNNER]
    return layer.forward(flat, top_k_index, top_k_weights).reshape(hidden_states.shape)


def register() -> None:
    """Register ``moechat`` in transformers' experts registry; harmless when repeated."""
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
