"""Runs the experts of a layer on a GPU, from pages of block records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from moechat.geometry import BLOCK_NEURONS, Activation, ExpertGeometry
from moechat.offload.kernels import triton_blocks
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.limits import FEW_TOKENS, SPLITS

_ACTIVATIONS = {
    Activation.SILU: triton_blocks.SILU,
    Activation.GELU: triton_blocks.GELU,
    Activation.GELU_TANH: triton_blocks.GELU_TANH,
    Activation.CLAMPED_SWIGLU: triton_blocks.CLAMPED_SWIGLU,
}
INTERPRETED = isinstance(triton_blocks.neurons, InterpretedFunction)
# Rows of a program for few tokens: a tile.
FEW_ROWS = 16
_COMBINED_COLUMNS = 256
_COMBINED_WARPS = 4


@dataclass(frozen=True)
class Shape:
    """How a launch is divided into programs.

    Attributes:
        tokens: Items of a program; a power of two.
        rows: Neurons, or outputs, of a program.
        dot: How products are made, as in :mod:`moechat.offload.kernels.triton_blocks`.
        warps: Of a program.
        splits: Chains that the blocks of an expert are added in, at most.
    """

    tokens: int
    rows: int
    dot: int
    warps: int
    splits: int

    @classmethod
    def of(cls, most_items: int, dtypes: set[torch.dtype]) -> Shape:
        """For rows of up to so many items, and inputs and weights of these types."""
        if most_items <= FEW_TOKENS:
            tokens = 1 << max(0, most_items - 1).bit_length()
            return cls(tokens, FEW_ROWS, dot=0, warps=1 if tokens <= 2 else 4, splits=SPLITS)
        # The interpreter does not know the arithmetic of bfloat16.
        # Neither 16-bit type holds the other's values.
        if torch.float32 in dtypes or len(dtypes) > 1 or (INTERPRETED and torch.bfloat16 in dtypes):
            return cls(16, 64, dot=2, warps=4, splits=1)
        tokens = 16 if most_items <= 16 else 32 if most_items <= 32 else 64
        return cls(tokens, 64, dot=1, warps=4, splits=1)


@dataclass(frozen=True)
class Kernel:
    """One kernel as it is built for a kind of expert, or of dense layer: what the compiler has to know.

    Attributes:
        kernel: Its name in :mod:`moechat.offload.kernels.triton_blocks`, or ``triton_linear``.
        constants: Values of its compile-time parameters.
        types: Triton's types of those of its pointers that differ between builds.
        warps: Of a program.
    """

    kernel: str
    constants: dict[str, Any]
    types: dict[str, str]
    warps: int


def launches(geometry: ExpertGeometry, most_items: int, dtype: str) -> list[Kernel]:
    """The kernels of a pass whose rows have up to ``most_items`` items, for compiling them ahead.

    Args:
        geometry: Of the experts.
        most_items: Of a row.
        dtype: Of the inputs and the output, torch's name.
    """
    kind = getattr(torch, dtype)
    kernels = BlockKernels(geometry, torch.device("cpu"))
    shape = Shape.of(most_items, {kind, *kernels.weights})
    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    activations = names[kept_type(shape, kind)]
    return [
        Kernel(
            "neurons", kernels.neurons(shape), {"x": names[kind], "activations": activations}, shape.warps
        ),
        Kernel("outputs", kernels.outputs(shape), {"activations": activations}, shape.warps),
        Kernel("combine", kernels.combined(shape, 2, others=True), {"out": names[kind]}, _COMBINED_WARPS),
    ]


def kept_type(shape: Shape, dtype: torch.dtype) -> torch.dtype:
    """Type that activations are kept in between the two products, for inputs of a type."""
    return dtype if shape.dot == 1 else torch.float32


class BlockKernels:
    """The kernels for one kind of expert.

    Args:
        geometry: Shape and encoding of the experts.
        device: Where the pages lie.

    Attributes:
        weights: Types of unquantised weights; empty for quantised ones.
    """

    def __init__(self, geometry: ExpertGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        layout = geometry.layout
        self._padded = layout.hidden_padded
        halves = {torch.float16 if layout.fp16 else torch.bfloat16}
        self.weights: set[torch.dtype] = halves if geometry.bits == 16 else set()
        self._encoding = {
            "RECORD": layout.record_bytes,
            "GROUP_BYTES": 128 * geometry.bits,
            "BITS": geometry.bits,
            "FP16": bool(layout.fp16),
            "HAS_BIAS": geometry.has_bias,
        }

    def neurons(self, shape: Shape) -> dict[str, Any]:
        """Compile-time parameters of ``neurons``."""
        layout = self.geometry.layout
        return {
            "GROUPS": self._padded // 64,
            "GATE": layout.gate_q,
            "UP": layout.up_q,
            "GATE_SZ": max(layout.gate_sz, 0),
            "UP_SZ": max(layout.up_sz, 0),
            "GATE_BIAS": max(layout.gate_bias, 0),
            "UP_BIAS": max(layout.up_bias, 0),
            "ACTIVATION": _ACTIVATIONS[self.geometry.activation],
            **self._division(shape),
        }

    def outputs(self, shape: Shape) -> dict[str, Any]:
        """Compile-time parameters of ``outputs``."""
        layout = self.geometry.layout
        return {
            "BLOCKS": self.geometry.blocks_per_expert,
            "SPLITS": self._splits(shape),
            "HIDDEN_PADDED": self._padded,
            "DOWN": layout.down_q,
            "DOWN_SZ": max(layout.down_sz, 0),
            "DOWN_BIAS": max(layout.down_bias, 0),
            "BIAS_ROWS": max(layout.down_bias_rows, 1),
            **self._division(shape),
        }

    def combined(self, shape: Shape, picks: int, *, others: bool) -> dict[str, Any]:
        """Compile-time parameters of ``combine``."""
        return {
            "PICKS": picks,
            "SPLITS": self._splits(shape),
            "HIDDEN_PADDED": self._padded,
            "HAS_OTHERS": others,
            "COLUMNS": _COMBINED_COLUMNS,
        }

    def _division(self, shape: Shape) -> dict[str, Any]:
        return {"TOKENS": shape.tokens, "ROWS": shape.rows, "DOT": shape.dot, **self._encoding}

    def _splits(self, shape: Shape) -> int:
        return min(shape.splits, self.geometry.blocks_per_expert)

    def _shape(self, items: Items, dtype: torch.dtype) -> Shape:
        return Shape.of(items.most, {dtype, *self.weights})

    def partials(self, items: Items, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the outputs of every item, float32 ``[splits, items, hidden padded to 64]``.

        Args:
            items: Of the pass.
            dtype: Of the inputs.
        """
        splits = self._splits(self._shape(items, dtype))
        return torch.empty(splits, items.count, self._padded, dtype=torch.float32, device=self.device)

    def add(
        self, pages: torch.Tensor, blocks: BlockList, items: Items, x: torch.Tensor, partial: torch.Tensor
    ) -> None:
        """Add blocks to the outputs of their items.

        Every block of an expert is added once, in ascending order over all calls of a pass; how they are
        divided among the calls changes no bit of the result.

        Args:
            pages: uint8 ``[pages, record_bytes]``.
            blocks: Which, and where they lie.
            items: Of the pass.
            x: ``[tokens, hidden]``: float32, bfloat16 or float16.
            partial: From :meth:`partials`; what it holds before the first block of an expert means nothing.
        """
        if blocks.slots == 0:
            return
        geometry = self.geometry
        shape = self._shape(items, x.dtype)
        kept = kept_type(shape, x.dtype)
        activations = torch.empty(blocks.slots, BLOCK_NEURONS, dtype=kept, device=self.device)
        chunks = -(-items.most // shape.tokens)
        triton_blocks.neurons[(blocks.entries, BLOCK_NEURONS // shape.rows, chunks)](
            pages,
            blocks.entry_page,
            blocks.entry_row,
            blocks.entry_slot,
            items.row_item,
            items.item_token,
            x,
            activations,
            geometry.alpha,
            geometry.limit,
            geometry.hidden_size,
            num_warps=shape.warps,
            **self.neurons(shape),
        )
        rows = len(blocks.row_block)
        triton_blocks.outputs[(self._padded // shape.rows, rows * self._splits(shape), chunks)](
            pages,
            blocks.entry_page,
            blocks.entry_slot,
            blocks.row_entry,
            blocks.row_block,
            items.row_item,
            activations,
            partial,
            partial.shape[1],
            num_warps=shape.warps,
            **self.outputs(shape),
        )

    def combine(
        self, partial: torch.Tensor, items: Items, out: torch.Tensor, others: torch.Tensor | None = None
    ) -> None:
        """The weighted sum over the experts of each token.

        Args:
            partial: Of all items, every block of every expert added.
            items: Of the pass.
            out: ``[tokens, hidden]`` in the type of the inputs, overwritten.
            others: float32 ``[tokens, hidden]``, added last: what was computed elsewhere.
        """
        if items.tokens == 0:
            return
        hidden = self.geometry.hidden_size
        triton_blocks.combine[(items.tokens, -(-hidden // _COMBINED_COLUMNS))](
            partial,
            items.token_item,
            items.item_weight,
            partial if others is None else others,
            out,
            partial.shape[1],
            hidden,
            num_warps=_COMBINED_WARPS,
            **self.combined(
                self._shape(items, out.dtype), items.token_item.shape[1], others=others is not None
            ),
        )
