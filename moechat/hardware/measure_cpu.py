"""Measures how fast the CPU computes experts and reads memory, with the engine's kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.hardware.resident_pages import touched_pages

# An expert of typical size: 16 blocks of 64 neurons, 216 KiB each at 4 bits.
HIDDEN = 2048
BLOCKS = 16
TOP_K = 8
_INTERVALS = 4
_MANY_TOKENS = 128
_MANY_EXPERTS = 4
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Experts:
    """Identical experts in memory.

    Attributes:
        layout: Layout of their records.
        records: uint8 ``[experts, blocks, record_bytes]``.
        gate: Between the projections.
    """

    layout: _native.BlockLayout
    records: npt.NDArray[np.uint8]
    gate: _native.Gate = field(default_factory=_native.Gate)


class ExpertMemory:
    """Memory larger than the caches, filled with experts of one encoding at a time.

    Attributes:
        nbytes: Its size.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate it.

        Args:
            nbytes: At least 32 MiB, enough for two 16-bit experts.

        Raises:
            MemoryError: The system has not enough memory.
        """
        self.nbytes = nbytes
        self._bytes = touched_pages(1, nbytes)[0]

    def fill(self, bits: int) -> Experts:
        """Fill it with experts of ``bits`` bits, replacing the previous ones."""
        layout = _native.BlockLayout(HIDDEN, BLOCKS * 64, bits)
        generator = np.random.default_rng(bits)
        one = _native.BlockLayout(HIDDEN, 64, bits)
        gate, up, down = (
            generator.standard_normal(shape, dtype=np.float32) / np.float32(64)
            for shape in ((64, HIDDEN), (64, HIDDEN), (HIDDEN, 64))
        )
        record = np.empty((1, one.record_bytes), dtype=np.uint8)
        # All blocks are equal, because the kernels' speed does not depend on the weights.
        _native.pack_expert(one, gate, up, down, None, record)
        experts = self.nbytes // (BLOCKS * layout.record_bytes)
        used = experts * BLOCKS * layout.record_bytes
        self._bytes[:used].reshape(-1, layout.record_bytes)[:] = record
        return Experts(layout, self._bytes[:used].reshape(experts, BLOCKS, layout.record_bytes))

    def stream_rate(self, threads: int, seconds: float) -> float:
        """Bytes per second at which ``threads`` threads read it."""
        with used_threads(threads):
            return _native.stream_read_rate(self._bytes, threads, seconds)


class Passes:
    """Computes experts for one token repeatedly, each time with other experts, cycling through all.

    Attributes:
        nbytes: Bytes of records read so far.
    """

    def __init__(self, experts: Experts, top_k: int = TOP_K, seed: int = 0) -> None:
        count = len(experts.records)
        top_k = max(1, min(top_k, count // 2))
        generator = np.random.default_rng(seed)
        order = np.resize(generator.permutation(count), -(-count // top_k) * top_k)
        self._choices = np.sort(order.reshape(-1, 1, top_k).astype(np.int64), axis=2)
        self._weights = np.full((1, top_k), 1.0 / top_k, dtype=np.float32)
        self._x = generator.standard_normal((1, experts.layout.hidden_size), dtype=np.float32)
        self._out = np.empty_like(self._x)
        self._experts = experts
        self._next = 0
        self.nbytes = 0

    def once(self) -> None:
        """Compute the next ``top_k`` experts."""
        experts = self._experts
        choice = self._choices[self._next]
        self._next = (self._next + 1) % len(self._choices)
        self.nbytes += _native.resident_forward(
            experts.layout, experts.gate, experts.records, self._x, choice, self._weights, self._out
        )


def compute_rate(
    experts: Experts, threads: int, *, seconds: float, top_k: int = TOP_K, seed: int = 0
) -> float:
    """Bytes of blocks per second that ``threads`` threads compute for one token.

    The best of several intervals, because other load can only reduce the rate.
    """
    with used_threads(threads):
        passes = Passes(experts, top_k, seed)
        passes.once()
        best = 0.0
        for _ in range(_INTERVALS):
            before, started = passes.nbytes, time.perf_counter()
            while True:
                passes.once()
                elapsed = time.perf_counter() - started
                if elapsed >= seconds / _INTERVALS:
                    break
            best = max(best, (passes.nbytes - before) / elapsed)
    return best


def operation_rate(experts: Experts, threads: int, *, seconds: float) -> float:
    """Operations per second with 128 tokens per expert, as in prompts; the best of several passes."""
    layout = experts.layout
    count = min(_MANY_EXPERTS, len(experts.records))
    generator = np.random.default_rng(1)
    x = generator.standard_normal((_MANY_TOKENS, layout.hidden_size), dtype=np.float32)
    out = np.empty_like(x)
    index = np.tile(np.arange(count, dtype=np.int64), (_MANY_TOKENS, 1))
    weights = np.full(index.shape, 1.0 / count, dtype=np.float32)
    operations = 6.0 * layout.hidden_size * layout.intermediate_size * index.size
    best, started = 0.0, time.perf_counter()
    with used_threads(threads):
        while True:
            before = time.perf_counter()
            _native.resident_forward(layout, experts.gate, experts.records, x, index, weights, out)
            now = time.perf_counter()
            best = max(best, operations / (now - before))
            if now - started >= seconds:
                return best


class Background:
    """Context manager that computes one token's experts in a background thread during the block.

    Attributes:
        rate: Bytes of blocks per second over the whole time, set at the end of the block.
    """

    def __init__(self, experts: Experts, threads: int) -> None:
        self._threads = used_threads(threads)
        self._passes = Passes(experts)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._worker = threading.Thread(target=self._run, name="moechat-measure", daemon=True)
        self._failure: BaseException | None = None
        self.rate = 0.0

    def __enter__(self) -> Background:
        self._threads.__enter__()
        try:
            self._worker.start()
            self._ready.wait()
        except BaseException:  # Ctrl-C
            self._end()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._end()
        if self._failure is not None and raised[1] is None:
            raise self._failure

    def _end(self) -> None:
        self._stop.set()
        if self._worker.ident is not None:
            self._worker.join()
        self._threads.__exit__(None, None, None)

    def _run(self) -> None:
        try:
            self._passes.once()
            before, started = self._passes.nbytes, time.perf_counter()
            self._ready.set()
            while not self._stop.is_set():
                self._passes.once()
            self.rate = (self._passes.nbytes - before) / (time.perf_counter() - started)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()


@contextmanager
def used_threads(threads: int) -> Iterator[None]:
    """Set the number of kernel threads in the block."""
    before = _native.num_threads()
    _native.set_num_threads(threads)
    try:
        yield
    finally:
        _native.set_num_threads(before)


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads to measure: powers of two up to ``cores``, and ``cores``."""
    counts = {1 << power for power in range(cores.bit_length()) if 1 << power <= cores}
    return sorted(counts | {cores})


def last_cache_bytes(directory: Path = _CPU_CACHES) -> int:
    """Bytes of the largest cache of a core; 0 if unknown."""
    largest = 0
    for file in directory.glob("index*/size"):
        try:
            text = file.read_text(encoding="ascii").strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
            largest = max(largest, int(text[:-1]) * unit if unit else int(text))
        except (OSError, ValueError):
            continue
    return largest
