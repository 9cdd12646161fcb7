"""Which blocks a launch computes, for which tokens: the lists that host and GPU share.

One contiguous int32 buffer a launch, so that it reaches the GPU in one copy. Rows are experts, ascending;
items are (token, expert) pairs, grouped by row; entries are blocks, grouped by row, each row's blocks
neighbours and ascending; a slot is one entry for one item. While a model runs the native runner writes them
(``native/src/offload/device_lists.h``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.geometry import ExpertGeometry

# Every list begins at a multiple of 16 bytes: Triton makes another build of a kernel for what does not.
_ALIGNMENT = 4
# Cut lists that are kept.
_KEPT = 512

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Items:
    """The items of a layer's pass, on the device.

    Attributes:
        tokens: Of the pass.
        count: Of items.
        row_item: int32 ``[rows + 1]`` first item of each row.
        item_token: int32 ``[items]``.
        item_weight: float32 ``[items]`` router weights.
        token_item: int32 ``[tokens, picks]`` the items of each token, experts ascending; -1: none.
        most: Of a row. The kernels are chosen by it, not by what a launch has: another choice rounds
            differently.
    """

    tokens: int
    count: int
    row_item: torch.Tensor
    item_token: torch.Tensor
    item_weight: torch.Tensor
    token_item: torch.Tensor
    most: int

    @property
    def picks(self) -> int:
        """Most items of a token."""
        return self.token_item.shape[1]

    @classmethod
    def build(
        cls,
        row_item: IntArray,
        item_token: IntArray,
        item_weight: npt.NDArray[np.float32],
        tokens: int,
        device: torch.device,
    ) -> Items:
        """Copy the items of a pass to a device, in one piece.

        Args:
            row_item: ``[rows + 1]``, ascending from 0 to the number of items.
            item_token: ``[items]``, each below ``tokens``.
            item_weight: ``[items]``.
            tokens: Of the pass.
            device: Where they go.
        """
        token_item = items_of_tokens(item_token, tokens)
        parts = _upload((row_item, item_token, item_weight.view(np.int32), token_item.reshape(-1)), device)
        return cls(
            tokens=tokens,
            count=len(item_token),
            row_item=parts[0],
            item_token=parts[1],
            item_weight=parts[2].view(torch.float32),
            token_item=parts[3].view(token_item.shape),
            most=int(np.diff(row_item).max(initial=0)),
        )


@dataclass(frozen=True)
class BlockList:
    """The blocks of one launch, on the device.

    Attributes:
        entries: Number of blocks.
        slots: Number of (block, item) pairs.
        entry_page: int32 ``[entries]`` page that holds the block.
        entry_row: int32 ``[entries]``.
        entry_slot: int32 ``[entries]`` first slot.
        row_entry: int32 ``[rows + 1]`` first entry of each row.
        row_block: int32 ``[rows]`` number of the row's first block here.
    """

    entries: int
    slots: int
    entry_page: torch.Tensor
    entry_row: torch.Tensor
    entry_slot: torch.Tensor
    row_entry: torch.Tensor
    row_block: torch.Tensor

    @property
    def rows(self) -> int:
        """Number of experts."""
        return self.row_block.numel()

    @classmethod
    def build(
        cls,
        entry_page: IntArray,
        row_entry: IntArray,
        row_block: IntArray,
        row_item: IntArray,
        device: torch.device,
    ) -> BlockList:
        """Copy the blocks of a launch to a device, in one piece.

        Args:
            entry_page: ``[entries]``.
            row_entry: ``[rows + 1]``, ascending from 0 to the number of entries.
            row_block: ``[rows]``.
            row_item: ``[rows + 1]``, of the pass.
            device: Where they go.
        """
        per_row = np.diff(row_entry)
        rows = np.arange(len(per_row), dtype=np.int32)
        entry_row = np.repeat(rows, per_row)
        of_entry = np.diff(row_item)[entry_row]
        ends = np.cumsum(of_entry, dtype=np.int64)
        slots = int(ends[-1]) if len(ends) else 0
        if slots > np.iinfo(np.int32).max:
            raise ValueError(f"{slots} pairs of a block and a token are too many for one launch")
        entry_slot = (ends - of_entry).astype(np.int32)
        parts = _upload((entry_page, entry_row, entry_slot, row_entry, row_block), device)
        return cls(len(entry_page), slots, *parts)


class Copies(Protocol):
    """The part of :class:`moechat.offload.accelerator.Accelerator` that is used here."""

    def list_memory(self, count: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def copy_list(self, to: int, source: int, nbytes: int) -> None: ...
    def finish_stream(self) -> None: ...


@dataclass(frozen=True)
class ListAddresses:
    """Memory of lists, and its size in elements.

    Attributes:
        host: int32 ``[capacity]``: the host's.
        there: Address of the device's.
        launch_size: That the lists of a launch take at most.
    """

    host: IntArray
    there: int
    launch_size: int


class ListMemory:
    """Where the native runner writes lists, and their copies on a device.

    Invariant: what lies in the host's part from the beginning of a pass over a layer on stays as it is until
    it has been copied, which is at the latest when the next layer's router has spoken: that comes after it in
    the stream.

    Args:
        geometry: Of the experts.
        accelerator: The device.
    """

    def __init__(self, geometry: ExpertGeometry, accelerator: Copies) -> None:
        self._geometry = geometry
        self._accelerator = accelerator
        self._host = torch.empty(0, dtype=torch.int32)
        self._view: IntArray = self._host.numpy()
        self._there = self._host
        self._copied = 0
        self._items_end = 0
        self._launch = 0  # elements that a launch of this pass takes at most
        # Lists of decoded tokens by their sizes and places: cutting the memory anew takes longer than all
        # the rest of a layer.
        self._one_token = False
        self._items: dict[tuple[int, ...], Items] = {}
        self._blocks: dict[tuple[int, ...], BlockList] = {}

    def begin(self, runner: _native.ExpertRunner, tokens: int, picks: int) -> Items:
        """The items of the layer that has begun.

        Args:
            runner: That it has begun in.
            tokens: Of the pass.
            picks: Experts of a token, at most.
        """
        self._reserve(tokens * picks)
        written = runner.item_lists(self._view)
        self._copied, self._items_end = 0, written[0]
        self._one_token = tokens == 1
        if not self._one_token:
            return self._cut_items(tokens, *written)
        if written not in self._items:
            self._items[written] = self._cut_items(tokens, *written)
        return self._items[written]

    def of_one_token(self, picks: int) -> ListAddresses:
        """Where the lists of a token go that chooses ``picks`` experts; valid until a pass has more."""
        launch_size = self._reserve(picks)
        return ListAddresses(self._view, self._there.data_ptr(), launch_size)

    def _reserve(self, chosen: int) -> int:
        """Make room for so many (token, expert) pairs; returns the elements of a launch at most."""
        geometry = self._geometry
        rows = min(geometry.num_experts, chosen)
        self._launch = 3 * (rows * geometry.blocks_per_expert) + 2 * rows + 1 + 5 * _ALIGNMENT
        # As a rule there are two launches.
        self._grow(rows + 3 * chosen + 1 + 4 * _ALIGNMENT + 2 * self._launch)
        return self._launch

    def _cut_items(self, tokens: int, end: int, rows: int, items: int, most_picks: int, most: int) -> Items:
        first, second, third = _rounded(rows + 1), _rounded(items), _rounded(items)
        there = self._there
        return Items(
            tokens=tokens,
            count=items,
            row_item=there[: rows + 1],
            item_token=there[first : first + items],
            item_weight=there[first + second : first + second + items].view(torch.float32),
            token_item=there[first + second + third : first + second + third + tokens * most_picks].view(
                tokens, most_picks
            ),
            most=most,
        )

    @property
    def host(self) -> IntArray:
        """What the runner writes to; the lists of launches go from :attr:`first` on."""
        return self._view

    @property
    def first(self) -> int:
        """Place of the first launch's lists."""
        return self._items_end

    def blocks(self, begin: int, end: int, entries: int, rows: int, slots: int) -> BlockList:
        """The blocks of a launch, whose lists the runner has written from ``begin`` to ``end``."""
        self._copy(end)
        if not self._one_token:
            return self._cut_blocks(begin, entries, rows, slots)
        key = (begin, entries, rows, slots)
        if key not in self._blocks:
            if len(self._blocks) >= _KEPT:
                self._blocks.clear()
            self._blocks[key] = self._cut_blocks(*key)
        return self._blocks[key]

    def _cut_blocks(self, begin: int, entries: int, rows: int, slots: int) -> BlockList:
        second = begin + _rounded(entries)
        third = second + _rounded(entries)
        fourth = third + _rounded(entries)
        fifth = fourth + _rounded(rows + 1)
        there = self._there
        return BlockList(
            entries,
            slots,
            there[begin : begin + entries],
            there[second : second + entries],
            there[third : third + entries],
            there[fourth : fourth + rows + 1],
            there[fifth : fifth + rows],
        )

    def next(self, end: int) -> int:
        """Where the next launch's lists go, after one that has been given and whose lists end there."""
        if end + self._launch <= len(self._view):
            return end
        self._accelerator.finish_stream()
        self._copied = self._items_end
        return self._items_end

    def finish(self) -> None:
        """Copy what no launch has: without any the items are still to come."""
        self._copy(self._items_end)

    def _copy(self, end: int) -> None:
        if end > self._copied:
            begin, nbytes = 4 * self._copied, 4 * (end - self._copied)
            to, source = self._there.data_ptr() + begin, self._host.data_ptr() + begin
            self._accelerator.copy_list(to, source, nbytes)
            self._copied = end

    def _grow(self, size: int) -> None:
        if size <= len(self._view):
            return
        self._host, self._there = self._accelerator.list_memory(size)
        self._view = self._host.numpy()
        self._items.clear()
        self._blocks.clear()


def _rounded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def items_of_tokens(item_token: IntArray, tokens: int) -> IntArray:
    """The items of each token in ascending order, -1 where it has fewer than others.

    Args:
        item_token: ``[items]``.
        tokens: How many there are.

    Returns:
        int32 ``[tokens, most items of a token]``, at least one column.
    """
    counts = np.bincount(item_token, minlength=tokens)
    picks = max(1, int(counts.max(initial=0)))
    table = np.full((tokens, picks), -1, np.int32)
    order = np.argsort(item_token, kind="stable")
    starts = np.cumsum(counts) - counts
    places = np.arange(len(order)) - np.repeat(starts, counts)
    table[item_token[order], places] = order
    return table


def _upload(parts: Sequence[IntArray], device: torch.device) -> list[torch.Tensor]:
    starts, total = [], 0
    for part in parts:
        starts.append(total)
        total += _rounded(len(part))
    host = torch.zeros(max(total, _ALIGNMENT), dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for part, start in zip(parts, starts, strict=True):
        view[start : start + len(part)] = part
    there = host.to(device, non_blocking=True)
    return [there[start : start + len(part)] for part, start in zip(parts, starts, strict=True)]
