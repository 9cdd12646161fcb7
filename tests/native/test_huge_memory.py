import gc
import os
from pathlib import Path

import numpy as np
import pytest

from moechat import _native

HUGE = 1 << 21
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def _mapping(address: int) -> list[str] | None:
    """Lines of /proc/self/smaps about the mapping that holds an address; ``None`` if nothing is mapped."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inside: list[str] | None = None
    for line in lines:
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            if inside is not None:
                return inside
            begin, end = (int(part, 16) for part in head.split("-"))
            if begin <= address < end:
                inside = [line]
        elif inside is not None:
            inside.append(line)
    return inside


@pytest.mark.parametrize("nbytes", [1, 63, 4096, HUGE - 1, HUGE, HUGE + 1, 5 * HUGE + 12345])
def test_it_is_empty_aligned_and_writable_to_its_last_byte(nbytes):
    memory = _native.huge_empty(nbytes)
    assert (memory.dtype, memory.shape, memory.flags.writeable) == (np.uint8, (nbytes,), True)
    assert memory.ctypes.data % (HUGE if nbytes >= HUGE else 4096) == 0
    assert not memory.any()
    memory[:] = 7
    assert (memory == 7).all()


def test_zero_and_excessive_sizes_are_refused():
    assert _native.huge_empty(0).shape == (0,)
    for bad in (-1, (1 << 46) + 1):
        with pytest.raises(ValueError, match=r"nbytes is -1|2\^46"):
            _native.huge_empty(bad)


@pytest.mark.skipif(
    not OVERCOMMIT.exists() or OVERCOMMIT.read_text().strip() == "1", reason="the system refuses nothing"
)
def test_a_refusal_names_the_number():
    with pytest.raises(MemoryError, match=f"refused {1 << 46} bytes"):
        _native.huge_empty(1 << 46)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_it_is_freed_with_the_last_array_that_shows_it():
    memory = _native.huge_empty(64 * HUGE)
    address = memory.ctypes.data
    part = memory[HUGE:].view(np.float32).reshape(-1, 64)
    del memory
    gc.collect()
    assert _mapping(address) is not None
    part[:] = 1.5
    del part
    gc.collect()
    assert _mapping(address) is None


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the system has no huge pages"
)
def test_huge_pages_are_requested():
    memory = _native.huge_empty(8 * HUGE)
    memory[:] = 1
    mapping = _mapping(memory.ctypes.data)
    assert mapping is not None
    flags = next(line for line in mapping if line.startswith("VmFlags:"))
    assert "hg" in flags.split()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_it_too():
    memory = _native.huge_empty(2 * HUGE)
    memory[:] = 3
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if (memory == 3).all() else 2
            memory[:] = 4
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (memory == 3).all()
