"""The pages of all blocks on the GPU, and the lists that a lookup writes for the kernels of one token.

Every block that is ready has an entry in the table. Its host side, with the rules by which entries change, is
``native/src/offload/page_table.h``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.geometry import ExpertGeometry
from moechat.offload.accelerator import Accelerator
from moechat.offload.kernels import triton_lookup
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.kernels.launch import Kernel

# Changes of the table that one launch makes, and how many launches may be under way. A miss of Mixtral's
# changes 448 entries.
CAPACITY = 4096
SLOTS = 4
_CHUNK = 256
_COPIED = 1024
_WARPS = 1


class PageLookup:
    """Table and lists for one token at a time, which all its layers use one after the other.

    Args:
        runner: It keeps a page table; see :meth:`moechat._native.ExpertRunner.keep_page_table`.
        accelerator: The GPU.
        geometry: Of the experts.
        address: Of the pages.
        layers: Number of expert layers.
        picks: Experts of a token.

    Attributes:
        runner: As given.
        address: Of the pages.
        picks: As given.
        items: Lists of a layer, for :class:`~moechat.offload.kernels.launch.BlockKernels`; tensors on the GPU
            that every lookup overwrites.
        blocks: Likewise.
        marked: A lookup may have left the mark of a missing block.
    """

    def __init__(
        self,
        runner: _native.ExpertRunner,
        accelerator: Accelerator,
        geometry: ExpertGeometry,
        *,
        address: int,
        layers: int,
        picks: int,
    ) -> None:
        device = accelerator.device
        blocks = geometry.blocks_per_expert
        self.runner = runner
        self.address = address
        self.picks = picks
        self.marked = True
        self._experts = geometry.num_experts
        self._blocks = blocks
        self._table = torch.full(
            (layers * geometry.num_experts * blocks,), -1, dtype=torch.int32, device=device
        )
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._ring = list(accelerator.host_memory(SLOTS, 2 * CAPACITY + 4).view(torch.int32).zero_())
        self._views: list[npt.NDArray[np.int32]] = [row.numpy() for row in self._ring]
        self._points = [accelerator.point() for _ in range(SLOTS)]
        self._used = [False] * SLOTS
        self._next = 0

        def numbers(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

        rows = np.arange(picks + 1)
        self.items = Items(
            tokens=1,
            count=picks,
            row_item=numbers(0 * rows),
            item_token=numbers(np.zeros(picks)),
            item_weight=torch.zeros(picks, device=device),
            token_item=numbers(np.full((1, picks), -1)),
            most=1,
        )
        entries = np.arange(picks * blocks)
        self.blocks = BlockList(
            entries=picks * blocks,
            slots=picks * blocks,
            entry_page=numbers(0 * entries),
            entry_row=numbers(entries // blocks),
            entry_slot=numbers(entries),
            row_entry=numbers(rows * blocks),
            row_block=numbers(np.zeros(picks)),
        )

    def fits(self, runner: _native.ExpertRunner, address: int, picks: int) -> bool:
        """Whether this is the table of these pages; another runner has other blocks in them."""
        return self.runner is runner and self.address == address and self.picks == picks

    def launch(self, ordinal: int, packed: torch.Tensor, report: torch.Tensor) -> None:
        """Launch the lookup of a layer.

        Args:
            ordinal: The layer.
            packed: Of the layer's :class:`~moechat.offload.gpu_layer.ExpertRequest`.
            report: int32 ``[n]``, pinned: the words of ``packed``, and last whether a block is missing.
        """
        items = self.items
        triton_lookup.look_up[(1 + -(-packed.numel() // _COPIED),)](
            packed,
            self._table,
            self._stop,
            items.row_item,
            items.item_weight,
            items.token_item,
            self.blocks.entry_page,
            report,
            ordinal * self._experts * self._blocks,
            self._experts,
            packed.numel(),
            report.numel() - 1,
            num_warps=_WARPS,
            **_look_up_constants(self.picks, self._blocks),
        )

    def launch_changes(self, slot: int) -> None:
        """Launch the changes that stand in a slot of the ring."""
        triton_lookup.apply_changes[(1,)](
            self._ring[slot], self._table, self._stop, num_warps=_WARPS, **_CHANGE_CONSTANTS
        )

    def next_changes(self) -> npt.NDArray[np.int32]:
        """Memory for the next changes of the table ``[2, CAPACITY]``: index and page.

        Waits for the GPU where all slots of the ring are under way.
        """
        slot = self._next
        if self._used[slot]:
            self._points[slot].synchronize()
            self._used[slot] = False
        return self._views[slot][: 2 * CAPACITY].reshape(2, CAPACITY)

    def fill(self, count: int, *, clear: bool) -> int:
        """Close the memory of :meth:`next_changes`; its slot, to be launched and marked.

        Args:
            count: Changes in it.
            clear: The launch also clears the mark of a missing block; REQUIRES: no lookup is under way.
        """
        slot = self._next
        self._views[slot][2 * CAPACITY] = count
        self._views[slot][2 * CAPACITY + 1] = clear
        self._next = (slot + 1) % SLOTS
        return slot

    def refuse_all(self) -> None:
        """Let every lookup find a block missing, until the mark is cleared."""
        self._stop.fill_(1)

    def mark(self, slot: int) -> None:
        """The changes of a slot were launched."""
        self._points[slot].record()
        self._used[slot] = True


def _look_up_constants(picks: int, blocks: int) -> dict[str, Any]:
    return {
        "PICKS": picks,
        "BLOCKS": blocks,
        "PICKS_PADDED": 1 << (picks - 1).bit_length(),
        "BLOCKS_PADDED": 1 << (blocks - 1).bit_length(),
        "COPIED": _COPIED,
    }


_CHANGE_CONSTANTS = {"CAPACITY": CAPACITY, "CHUNK": _CHUNK}


def launches(picks: int, blocks: int) -> list[Kernel]:
    """The kernels, for compiling them ahead.

    Args:
        picks: Experts of a token.
        blocks: Of an expert.
    """
    return [
        Kernel(triton_lookup.look_up, _look_up_constants(picks, blocks), {}, _WARPS),
        Kernel(triton_lookup.apply_changes, _CHANGE_CONSTANTS, {}, _WARPS),
    ]
