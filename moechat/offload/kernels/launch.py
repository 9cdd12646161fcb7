"""Runs the experts of a layer on a GPU, from pages of block records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from moechat import _native
from moechat.budget.gpu_sizes import few_splits, takes_few
from moechat.geometry import BLOCK_NEURONS, ExpertGeometry
from moechat.offload.kernels import triton_blocks, triton_few, triton_kept_blocks, triton_kept_few
from moechat.offload.kernels.block_constants import BlockConstants
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.kernels.call import Call, PreparedLayer
from moechat.offload.kernels.kept_form import kept_constants, value_table
from moechat.offload.kernels.quick_launch import QuickKernel, aligned, current_stream
from moechat.offload.kernels.triton_kept_codes import IQ4

INTERPRETED = isinstance(triton_blocks.neurons, InterpretedFunction)
# Of a program for few tokens: eight warps read 16 groups of 64 neurons' inputs, then 1024 or 2048 outputs, at
# once, and so a thread 16 bytes at a time, of rows and groups of its own. The number of groups decides the
# order of sums, the number of outputs does not.
FEW_LANES = 16
FEW_ROWS = 1024
FEW_WARPS = 8


def _few_tokens(geometry: ExpertGeometry, ordinal: int) -> int:
    """Most tokens of a program: with more, a thread has too few registers."""
    if geometry.kept:
        forms = [kept_constants(encoding) for encoding in geometry.kept[ordinal]]
        many = any(form["SECOND"] or form["SUBS"] == 4 or form["TABLE"] == IQ4.value for form in forms)
        return 1 if many else 2
    return 2 if geometry.bits in (3, 6) else 4


# Divisions that are kept: a decoded token's, and those of the last prompts.
_MOST_SHAPES = 512
_COMBINED_COLUMNS = 256
_COMBINED_COLUMNS_OF_CHAINS = 32
_COMBINED_WARPS = 4


@dataclass(frozen=True)
class Shape:
    """How a launch is divided into programs.

    Attributes:
        tokens: Items of a program; a power of two.
        rows: Neurons, or outputs, of a program at once.
        dot: How products are made: 0, by :mod:`moechat.offload.kernels.triton_few`; else as in
            :mod:`moechat.offload.kernels.triton_blocks`.
        warps: Of a program.
        splits: Chains that the blocks of an expert are added in.
    """

    tokens: int
    rows: int
    dot: int
    warps: int
    splits: int

    @classmethod
    def of(
        cls,
        geometry: ExpertGeometry,
        most_items: int,
        items: int,
        dtypes: set[torch.dtype],
        ordinal: int = 0,
    ) -> Shape:
        """The division of a pass; it does not depend on which blocks a launch has.

        Args:
            geometry: Of the experts.
            most_items: Of a row.
            items: Of the pass.
            dtypes: Of inputs and weights.
            ordinal: Number among the expert layers.
        """
        blocks = geometry.blocks_per_expert
        if takes_few(most_items, items, blocks):
            tokens = min(_few_tokens(geometry, ordinal), 1 << max(0, most_items - 1).bit_length())
            # One token leaves registers for more rows, which share their inputs.
            wide = tokens == 1 and not geometry.kept and geometry.layout.hidden_padded % (2 * FEW_ROWS) == 0
            rows = 2 * FEW_ROWS if wide else FEW_ROWS
            return cls(tokens, rows, dot=0, warps=FEW_WARPS, splits=few_splits(blocks))
        # The interpreter does not know the arithmetic of bfloat16.
        # Neither 16-bit type holds the other's values.
        if torch.float32 in dtypes or len(dtypes) > 1 or (INTERPRETED and torch.bfloat16 in dtypes):
            return cls(16, 64, dot=2, warps=4, splits=1)
        tokens = 16 if most_items <= 16 else 32 if most_items <= 32 else 64
        return cls(tokens, 64, dot=1, warps=4, splits=1)


# Triton's types of pointers.
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True)
class Kernel:
    """One kernel as it is built for a kind of expert, or of dense layer: what the compiler has to know.

    Attributes:
        kernel: The function of Triton.
        constants: Values of its compile-time parameters.
        types: Triton's types of those of its pointers that differ between builds.
        warps: Of a program.
    """

    kernel: Any
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
    shape = Shape.of(geometry, most_items, most_items, {kind, *kernels.weights})
    activations = POINTERS[kept_type(shape, kind)]
    combine = Kernel(
        triton_blocks.combine,
        kernels.combined(shape, 2, others=True),
        {"out": POINTERS[kind]},
        _COMBINED_WARPS,
    )
    types = {"x": POINTERS[kind], "activations": activations}
    if shape.dot == 0:
        return [Kernel(kernels.few.blocks, kernels.blocks(shape), types, shape.warps), combine]
    return [
        Kernel(kernels.many.neurons, kernels.neurons(shape), types, shape.warps),
        Kernel(kernels.many.outputs, kernels.outputs(shape), {"activations": activations}, shape.warps),
        combine,
    ]


def kept_type(shape: Shape, dtype: torch.dtype) -> torch.dtype:
    """Type that activations are kept in between the two products, for inputs of a type."""
    return dtype if shape.dot == 1 else torch.float32


class BlockKernels:
    """The kernels for the experts of a layer.

    Args:
        geometry: Shape and encoding of the experts.
        device: Where the pages lie.
        ordinal: Number among the expert layers, which may differ in their encodings and gates.
        stream: Returns the stream to launch in, a handle (CUstream); ``None``: torch's current one.

    Attributes:
        weights: Types of unquantised weights; empty for quantised ones.
        few: The module whose ``blocks`` computes few tokens.
        many: The module whose ``neurons`` and ``outputs`` compute more.
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        device: torch.device,
        ordinal: int = 0,
        stream: Callable[[], int] | None = None,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self._stream = stream or (lambda: current_stream(device))
        self._ordinal = ordinal
        layout = geometry.layout_of(ordinal)
        gate = geometry.gate_of(ordinal)
        self._padded = layout.hidden_padded
        halves = {torch.float16 if layout.fp16 else torch.bfloat16}
        self.weights: set[torch.dtype] = halves if geometry.bits == 16 else set()
        self._constants = BlockConstants(geometry, ordinal)
        self._gate = gate.alpha, gate.limit
        kept = bool(geometry.kept)
        self.few: Any = triton_kept_few if kept else triton_few
        self.many: Any = triton_kept_blocks if kept else triton_blocks
        self._table = [value_table(device)] if kept else []
        self._shapes: dict[tuple[int, int, torch.dtype], Shape] = {}
        self._quick: dict[object, QuickKernel | None] = {}
        self._kept_memory: dict[object, torch.Tensor] = {}

    def blocks(self, shape: Shape) -> dict[str, Any]:
        """Compile-time parameters of ``triton_few.blocks``."""
        groups = 1 << (self._padded // 64 - 1).bit_length()
        outputs = 1 << (self._padded - 1).bit_length()
        return {
            "HIDDEN": self.geometry.hidden_size,
            "TOKENS": shape.tokens,
            "LANES": min(FEW_LANES, groups),
            "ROWS": min(shape.rows, outputs),
            **self._constants.inner,
            **self._constants.outer,
            "SPLITS": shape.splits,
            **self._constants.both,
        }

    def neurons(self, shape: Shape) -> dict[str, Any]:
        """Compile-time parameters of ``neurons``."""
        return {"GROUPS": self._padded // 64, **self._constants.inner, **self._division(shape)}

    def outputs(self, shape: Shape) -> dict[str, Any]:
        """Compile-time parameters of ``outputs``."""
        return {"HIDDEN_PADDED": self._padded, **self._constants.outer, **self._division(shape)}

    def combined(self, shape: Shape, picks: int, *, others: bool) -> dict[str, Any]:
        """Compile-time parameters of ``combine``."""
        return {
            "PICKS": picks,
            "SPLITS": shape.splits,
            "TABLE": 1 << (shape.splits - 1).bit_length(),
            "HIDDEN_PADDED": self._padded,
            "HAS_OTHERS": others,
            "COLUMNS": self._columns(shape),
        }

    def _columns(self, shape: Shape) -> int:
        return _COMBINED_COLUMNS if shape.splits == 1 else _COMBINED_COLUMNS_OF_CHAINS

    def _division(self, shape: Shape) -> dict[str, Any]:
        return {"TOKENS": shape.tokens, "ROWS": shape.rows, "DOT": shape.dot, **self._constants.both}

    def _shape(self, items: Items, dtype: torch.dtype) -> Shape:
        key = (items.most, items.count, dtype)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            shape = Shape.of(self.geometry, items.most, items.count, {dtype, *self.weights}, self._ordinal)
            self._shapes[key] = shape
        return shape

    def _memory(self, tokens: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that means nothing yet. One token's is the same for all layers, one after the other."""
        if tokens != 1:
            return torch.empty(sizes, dtype=dtype, device=self.device)
        key = (sizes, dtype)
        if key not in self._kept_memory:
            with torch.inference_mode(False):
                self._kept_memory[key] = torch.empty(sizes, dtype=dtype, device=self.device)
        return self._kept_memory[key]

    def _launch(self, call: Call) -> None:
        """Launch a kernel of decoded tokens, by the driver from the second time on."""
        addresses = call.addresses()
        quick = self._quick.get(call.build)
        if quick is not None and aligned(addresses):
            quick.launch(self._stream(), call.grid, call.arguments(addresses))
            return
        compiled = call.kernel[call.grid](*call.pointers, *call.numbers, *call.table, **call.options())
        if call.build not in self._quick and aligned(addresses):
            self._quick[call.build] = QuickKernel.of(compiled)

    def _prepared(self, call: Call) -> _native.PreparedLaunch | None:
        """The launch of a call whose lists are named; ``None``: its build is not there, or does not serve."""
        addresses = call.addresses()
        quick = self._quick.get(call.build)
        if quick is None or not aligned([each for each in addresses if not isinstance(each, str)]):
            return None
        return quick.prepared(call.grid, call.arguments(addresses))

    def partials(self, items: Items, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the outputs of every item, float32 ``[splits, items, hidden padded to 64]``.

        Args:
            items: Of the pass.
            dtype: Of the inputs.
        """
        sizes = (self._shape(items, dtype).splits, items.count, self._padded)
        return self._memory(items.tokens, sizes, torch.float32)

    def add(
        self,
        pages: torch.Tensor,
        blocks: BlockList,
        items: Items,
        x: torch.Tensor,
        partial: torch.Tensor,
        *,
        clear: bool = False,
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
            clear: Set to 0 what none of ``blocks`` adds to. The first call of a pass does so where some
                blocks may be in no call at all.
        """
        if blocks.slots == 0:
            if clear:
                partial.zero_()
            return
        geometry = self.geometry
        shape = self._shape(items, x.dtype)
        kept = kept_type(shape, x.dtype)
        # Of one token always the same size: enough for all its blocks.
        slots = items.count * geometry.blocks_per_expert if items.tokens == 1 else blocks.slots
        activations = self._memory(items.tokens, (slots, BLOCK_NEURONS), kept)
        chunks = -(-items.most // shape.tokens)
        rows = blocks.rows
        if shape.dot == 0:
            lists = (blocks.entry_page, blocks.entry_slot, blocks.row_entry, blocks.row_block)
            of_pass = (items.row_item, items.item_token)
            sizes = (blocks.rows, items.count, chunks)
            self._launch(
                self._few_call(shape, sizes, pages, (*lists, *of_pass), x, activations, partial, int(clear))
            )
            return
        self.many.neurons[(blocks.entries, BLOCK_NEURONS // shape.rows, chunks)](
            pages,
            blocks.entry_page,
            blocks.entry_row,
            blocks.entry_slot,
            items.row_item,
            items.item_token,
            x,
            activations,
            *self._gate,
            geometry.hidden_size,
            *self._table,
            num_warps=shape.warps,
            **self.neurons(shape),
        )
        self.many.outputs[(self._padded // shape.rows, rows, chunks)](
            pages,
            blocks.entry_page,
            blocks.entry_slot,
            blocks.row_entry,
            blocks.row_block,
            items.row_item,
            activations,
            partial,
            int(clear),
            *self._table,
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
        shape = self._shape(items, out.dtype)
        sizes = (items.tokens, items.count, items.picks)
        self._launch(self._sum_call(shape, sizes, partial, items.token_item, items.item_weight, others, out))

    def _few_call(
        self,
        shape: Shape,
        sizes: tuple[int, int, int],
        pages: torch.Tensor,
        lists: Sequence[torch.Tensor | str],
        x: torch.Tensor,
        activations: torch.Tensor,
        partial: torch.Tensor,
        clear: int | str,
    ) -> Call:
        """The kernel over blocks for few tokens.

        Args:
            shape: Of the launch.
            sizes: Rows, items, and chunks of the items of a row.
            pages: As :meth:`add`.
            lists: Pages, slots, first entries and first blocks of the launch; items and tokens of the pass.
            x: As :meth:`add`.
            activations: Memory for activations.
            partial: As :meth:`add`.
            clear: As :meth:`add`.
        """
        rows, count, chunks = sizes
        return Call(
            self.few.blocks,
            ("blocks", shape.tokens, shape.rows, shape.splits, x.dtype),
            (rows * shape.splits, chunks, 1),
            (pages, *lists, x, activations, partial),
            (count, clear, *self._gate),
            lambda: {"num_warps": shape.warps, **self.blocks(shape)},
            self._table,
        )

    def _sum_call(
        self,
        shape: Shape,
        sizes: tuple[int, int, int],
        partial: torch.Tensor,
        token_item: torch.Tensor | str,
        item_weight: torch.Tensor | str,
        others: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Call:
        """The kernel of :meth:`combine`; sizes: tokens, items, and most items of a token."""
        tokens, count, picks = sizes
        hidden = self.geometry.hidden_size
        return Call(
            triton_blocks.combine,
            ("combine", shape.splits, picks, out.dtype, others is None),
            (tokens, -(-hidden // self._columns(shape)), 1),
            (partial, token_item, item_weight, partial if others is None else others, out),
            (count, hidden),
            lambda: {"num_warps": _COMBINED_WARPS, **self.combined(shape, picks, others=others is not None)},
        )

    def prepare(
        self,
        pages: torch.Tensor,
        picks: int,
        x: torch.Tensor,
        out: torch.Tensor,
        others: torch.Tensor | None,
        given: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> PreparedLayer | None:
        """The launches of a layer of a decoded token that chooses ``picks`` experts, each once.

        Args:
            pages: As :meth:`add`.
            picks: Experts of the token.
            x: ``[1, hidden]``, always in the same memory.
            out: As :meth:`combine`, always in the same memory.
            others: As :meth:`combine`, for launches that add it; ``None``: there are none.
            given: Lists that are known now, by name.

        Returns:
            ``None`` until :meth:`add` and :meth:`combine` have launched their kernels through Triton, where
            the driver cannot launch these, and where those for few tokens do not serve.
        """
        geometry = self.geometry
        shape = Shape.of(geometry, 1, picks, {x.dtype, *self.weights}, self._ordinal)
        if shape.dot != 0:
            return None

        def lists(*names: str) -> list[torch.Tensor | str]:
            return [given.get(name, name) for name in names]

        partial = self._memory(1, (shape.splits, picks, self._padded), torch.float32)
        slots = picks * geometry.blocks_per_expert
        activations = self._memory(1, (slots, BLOCK_NEURONS), kept_type(shape, x.dtype))
        of_launch = lists("entry_page", "entry_slot", "row_entry", "row_block", "row_item", "item_token")
        clear: int | str = "clear" if not given else 0
        call = self._few_call(shape, (picks, picks, 1), pages, of_launch, x, activations, partial, clear)
        blocks = self._prepared(call)
        token_item, weight = lists("token_item", "item_weight")
        totals = [
            self._prepared(self._sum_call(shape, (1, picks, picks), partial, token_item, weight, added, out))
            for added in ([None] if others is None else [None, others])
        ]
        if blocks is None or totals[0] is None or totals[-1] is None:
            return None
        return PreparedLayer(blocks, totals[0], None if others is None else totals[-1])
