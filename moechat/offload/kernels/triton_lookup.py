"""Triton kernels with which a GPU finds the blocks of a decoded token's experts without the host.

``look_up`` writes the lists of one launch (see :mod:`moechat.offload.kernels.block_list`) for one token whose
experts are all there; if a block is missing, or an earlier layer has found one missing, the lists are empty,
so that the kernels that read them end at once. ``apply_changes`` brings the table of pages up to date. Both
read and write host memory that is pinned: what they write there is seen after an event behind them.

Launched by :mod:`moechat.offload.page_lookup`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

# What a report says of its layer.
COMPUTED = 0
MISSING = 1


@triton.jit(do_not_specialize=["first", "experts", "count", "flag"])
def look_up(
    packed,
    table,
    stop,
    row_item,
    item_weight,
    token_item,
    entry_page,
    report,
    first,
    experts,
    count,
    flag,
    PICKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Lists of a layer for one token, and its request in host memory.

    Program 0 looks up; each of the others copies ``COPIED`` words of the ``count`` in ``packed`` to
    ``report``. The layer's part of ``table`` begins at ``first``; whether a block is missing goes to
    ``report[flag]`` and to ``stop``. Experts out of range, or chosen twice, count as missing: the host
    handles them. One warp: ``stop`` is read by all its threads before one of them writes it.
    """
    program = tl.program_id(0)
    if program > 0:
        word = (program - 1) * COPIED + tl.arange(0, COPIED)
        tl.store(report + word, tl.load(packed + word, mask=word < count, other=0), mask=word < count)
    else:
        missing = tl.load(stop)
        pick = tl.arange(0, PICKS_PADDED)
        chosen = pick < PICKS
        expert = tl.load(packed + pick, mask=chosen, other=0)
        # The same numbers as columns and as rows, to compare each with each.
        across = chosen[:, None] & chosen[None, :]
        smaller = across & (expert[None, :] < expert[:, None])
        place = tl.sum(smaller.to(tl.int32), axis=1)
        alike = across & (expert[None, :] == expert[:, None])
        twice = tl.sum(tl.sum(alike.to(tl.int32), axis=1), axis=0) - PICKS
        known = (expert >= 0) & (expert < experts)
        outside = tl.sum((chosen & (known == 0)).to(tl.int32), axis=0)
        block = tl.arange(0, BLOCKS_PADDED)
        wanted = (chosen & known)[:, None] & (block < BLOCKS)[None, :]
        spot = first + expert[:, None] * BLOCKS + block[None, :]
        page = tl.load(table + spot, mask=wanted, other=0)
        absent = tl.sum(tl.sum((page < 0).to(tl.int32), axis=1), axis=0)
        lacks = (missing + twice + outside + absent) > 0
        entry = place[:, None] * BLOCKS + block[None, :]
        inside = chosen[:, None] & (block < BLOCKS)[None, :]
        tl.store(entry_page + entry, tl.where(lacks, 0, page), mask=inside)
        weight = tl.load((packed + PICKS).to(tl.pointer_type(tl.float32)) + pick, mask=chosen, other=0.0)
        tl.store(item_weight + place, weight, mask=chosen)
        tl.store(token_item + pick, tl.where(lacks, -1, pick), mask=chosen)
        tl.store(row_item + pick, tl.where(lacks, 0, pick), mask=chosen)
        tl.store(row_item + PICKS, tl.where(lacks, 0, PICKS))
        tl.store(stop, lacks.to(tl.int32))
        tl.store(report + flag, lacks.to(tl.int32))


@triton.jit
def apply_changes(changes, table, stop, CAPACITY: tl.constexpr, CHUNK: tl.constexpr):
    """Write pages ``changes[CAPACITY:]`` to ``table`` at ``changes[:CAPACITY]``. One program.

    Their number follows both, and whether ``stop`` is cleared.
    """
    count = tl.load(changes + 2 * CAPACITY, volatile=True)
    for begin in range(0, count, CHUNK):
        change = begin + tl.arange(0, CHUNK)
        there = change < count
        spot = tl.load(changes + change, mask=there, other=0, volatile=True)
        page = tl.load(changes + CAPACITY + change, mask=there, other=0, volatile=True)
        tl.store(table + spot, page, mask=there)
    if tl.load(changes + 2 * CAPACITY + 1, volatile=True) != 0:
        tl.store(stop, 0)
