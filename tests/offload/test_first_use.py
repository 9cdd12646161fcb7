"""Mapped experts are read from the disk at once where they are used first."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moechat import _native
from moechat.geometry import ExpertGeometry
from moechat.offload.experts import ExpertCounters, ExpertLayer

EXPERT_BYTES = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def mapped(path: Path, experts: int) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
    path.write_bytes(np.random.default_rng(0).bytes(experts * EXPERT_BYTES))
    return np.memmap(path, np.uint8, "r", shape=(experts, 1, EXPERT_BYTES))


def pages_in_memory(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    """Share of the pages of an array that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    seen = np.zeros(array.nbytes // PAGE, np.uint8)
    done = libc.mincore(
        ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), ctypes.c_void_p(seen.ctypes.data)
    )
    assert done == 0
    return float((seen & 1).mean())


def layer_of(records: np.ndarray[Any, np.dtype[np.uint8]]) -> ExpertLayer:
    geometry = ExpertGeometry(64, 64, len(records), bits=4)
    return ExpertLayer(geometry, records, ExpertCounters())


def record_bytes() -> int:
    return ExpertGeometry(64, 64, 1, bits=4).record_bytes


def test_every_expert_is_read_ahead_once(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    path.write_bytes(bytes(5 * record_bytes()))
    resident = layer_of(np.memmap(path, np.uint8, "r", shape=(5, 1, record_bytes()))).resident
    assert resident.read_unused([3, 1]) == [1, 3]
    assert resident.read_unused([1, 4, 3, 3, 9, -1]) == [4]
    assert resident.read_unused(range(5)) == [0, 2]
    assert resident.read_unused(range(5)) == []


def test_computed_experts_count_as_used(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    path.write_bytes(bytes(5 * record_bytes()))
    layer = layer_of(np.memmap(path, np.uint8, "r", shape=(5, 1, record_bytes())))
    layer.forward(torch.zeros(2, 64), torch.tensor([[3, 1], [7, 3]]), torch.ones(2, 2))
    assert layer.resident.read_unused(range(5)) == [0, 2, 4]


def test_plain_memory_is_not_read_ahead() -> None:
    records = np.zeros((4, 1, record_bytes()), np.uint8)
    assert layer_of(records).resident.read_unused(range(4)) == []


def test_read_ahead_brings_the_expert_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    records = mapped(path, 64)  # more than any system reads ahead
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(records) > 0:
        pytest.skip("this file system keeps its files in memory")
    _native.read_ahead(records[2])
    deadline = time.monotonic() + 20
    while pages_in_memory(records[2]) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pages_in_memory(records[2]) == 1
    assert pages_in_memory(records) < 1


def test_any_offset_and_size_can_be_read_ahead(tmp_path: Path) -> None:
    flat = mapped(tmp_path / "experts", 1).reshape(-1)
    for part in (flat[:0], flat[:1], flat[5:9000], flat[-1:]):
        _native.read_ahead(part)
    _native.read_ahead(np.zeros(10000, np.uint8))
    with pytest.raises(ValueError, match="data has dtype float32"):
        _native.read_ahead(np.zeros(4, np.float32))  # type: ignore[arg-type]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="this kernel has no transparent huge pages",
)
def test_mapped_experts_request_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    path.write_bytes(np.random.default_rng(0).bytes(512 * record_bytes()))
    records = np.memmap(path, np.uint8, "r", shape=(512, 1, record_bytes()))
    layer_of(records)
    first, asked = records.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            within = begin <= first < end
        elif words[0] == "VmFlags:" and within:
            asked = "hg" in words
    assert asked
    assert bytes(records[3, 0, :64]) == path.read_bytes()[3 * record_bytes() :][:64]
