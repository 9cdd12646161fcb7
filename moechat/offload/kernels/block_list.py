"""Which blocks a launch computes, for which tokens: the lists that host and GPU share.

One contiguous int32 buffer a launch, so that it reaches the GPU in one copy. Rows are experts, ascending;
items are (token, expert) pairs, grouped by row; entries are blocks, grouped by row, each row's blocks
neighbours and ascending; a slot is one entry for one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# Every list begins at a multiple of 16 bytes: Triton makes another build of a kernel for what does not.
_ALIGNMENT = 4

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
        row_items: ``row_item`` on the host.
        most: Of a row. The kernels are chosen by it, not by what a launch has: another choice rounds
            differently.
    """

    tokens: int
    count: int
    row_item: torch.Tensor
    item_token: torch.Tensor
    item_weight: torch.Tensor
    token_item: torch.Tensor
    row_items: IntArray
    most: int

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
            row_items=row_item,
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

    @classmethod
    def build(cls, entry_page: IntArray, row_entry: IntArray, row_block: IntArray, items: Items) -> BlockList:
        """Copy the blocks of a launch to the device of its items, in one piece.

        Args:
            entry_page: ``[entries]``.
            row_entry: ``[rows + 1]``, ascending from 0 to the number of entries.
            row_block: ``[rows]``.
            items: Of the pass.
        """
        per_row = np.diff(row_entry)
        rows = np.arange(len(per_row), dtype=np.int32)
        entry_row = np.repeat(rows, per_row)
        of_entry = np.diff(items.row_items)[entry_row]
        ends = np.cumsum(of_entry, dtype=np.int64)
        slots = int(ends[-1]) if len(ends) else 0
        if slots > np.iinfo(np.int32).max:
            raise ValueError(f"{slots} pairs of a block and a token are too many for one launch")
        entry_slot = (ends - of_entry).astype(np.int32)
        parts = _upload((entry_page, entry_row, entry_slot, row_entry, row_block), items.row_item.device)
        return cls(len(entry_page), slots, *parts)


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
        total += -(-len(part) // _ALIGNMENT) * _ALIGNMENT
    host = torch.zeros(max(total, _ALIGNMENT), dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for part, start in zip(parts, starts, strict=True):
        view[start : start + len(part)] = part
    there = host.to(device, non_blocking=True)
    return [there[start : start + len(part)] for part, start in zip(parts, starts, strict=True)]
