"""The fifth stage: a large GPU made as small as one of a PC, so that its figures mean something there.

Blocks of threads that do nothing occupy a part of the multiprocessors, as many as leave the memory bandwidth
of the GPU that is played; every block is copied several times, so that the link is about as slow as the PCIe
lanes of that one. A decoded token is bound by these two. Not played: the L2 cache, which is larger here, and
tensor cores, of which more are left.

The occupying kernel ends by itself after :data:`MOST_SECONDS`: work that waits for the whole GPU meanwhile
waits that long, and does not hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu.record import Cell, Say
from gpu.rounds import copied_rate, read_rate
from gpu.speed import Speeds, measured
from moechat.hardware.profile_file import reference_profile
from moechat.offload.accelerator import Accelerator
from moechat.offload.settings import LinkSettings

PLAYED = ("rtx3060-12g", "laptop-rtx4060-8g")
MOST_SECONDS = 240
_CASES = {
    "rtx3060-12g": ("qwen3-30b-a3b@12G", "mixtral-8x7b@12G"),
    "laptop-rtx4060-8g": ("qwen3-30b-a3b@8G", "gpt-oss-20b@8G"),
}
# Holds a multiprocessor's threads until the flag is set or the time is over. 1024 threads of two blocks leave
# no room for others; the flag lies in memory that the host sets through a copy of another stream.
_SOURCE = r"""
extern "C" __global__ void occupy(const volatile int* stop, unsigned long long nanoseconds) {
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  do {
    __nanosleep(2000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*stop == 0 && now - begun < nanoseconds);
}
"""
# Of the rate that is played: nearer is not worth more tries.
_NEAR = 0.05
_TRIES = 8


@dataclass(frozen=True)
class Played:
    """A GPU that is played.

    Attributes:
        name: Of its profile.
        memory: Bytes a second that it reads of its memory.
        link: Bytes a second that reach it.
    """

    name: str
    memory: float
    link: float

    @classmethod
    def of(cls, name: str) -> Played:
        """The figures of a reference profile."""
        profile = reference_profile(name)
        assert profile.gpu is not None
        return cls(name, profile.gpu.bandwidth.value, profile.links["gpu"].rate(1 << 20))


class Occupied:
    """A part of a GPU's multiprocessors, occupied.

    Args:
        gpu: The GPU.

    Raises:
        RuntimeError: This torch cannot compile a kernel.
    """

    def __init__(self, gpu: Accelerator) -> None:
        compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
        if compile_kernel is None:
            raise RuntimeError("this torch compiles no kernels of CUDA C++; 2.9 and newer do")
        self._kernel = compile_kernel(_SOURCE, "occupy")
        self._gpu = gpu
        self._stream = torch.cuda.Stream(gpu.device)
        self._side = torch.cuda.Stream(gpu.device)
        self._stop = torch.zeros(1, dtype=torch.int32, device=gpu.device)
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)

    def begin(self, blocks: int) -> None:
        """Occupy so many halves of multiprocessors."""
        self._stop.zero_()
        self._gpu.finish_stream()
        if blocks:
            nanoseconds = MOST_SECONDS * 1_000_000_000
            self._kernel(
                grid=(blocks, 1, 1), block=(1024, 1, 1), args=(self._stop, nanoseconds), stream=self._stream
            )

    def end(self) -> None:
        """Give them back."""
        with torch.cuda.stream(self._side):
            self._stop.copy_(self._one, non_blocking=True)
        self._stream.synchronize()

    def fit(self, rate: float) -> tuple[int, float]:
        """Find how many blocks leave this memory bandwidth; returns them and the bandwidth that is left."""
        halves = 2 * torch.cuda.get_device_properties(self._gpu.device).multi_processor_count
        low, high = 0, halves - 2
        best = (0, self._left(0))
        for _ in range(_TRIES):
            middle = (low + high) // 2
            left = self._left(middle)
            if abs(left - rate) < abs(best[1] - rate):
                best = (middle, left)
            if abs(left - rate) < _NEAR * rate or low >= high:
                break
            low, high = (middle + 1, high) if left > rate else (low, middle - 1)
        return best

    def _left(self, blocks: int) -> float:
        self.begin(blocks)
        try:
            return read_rate(self._gpu, 256 << 20)
        finally:
            self.end()


@contextmanager
def occupied(gpu: Accelerator, rate: float) -> Iterator[tuple[int, float]]:
    """Leave this memory bandwidth; gives the blocks that occupy the rest, and the bandwidth that is left."""
    occupying = Occupied(gpu)
    blocks, left = occupying.fit(rate)
    occupying.begin(blocks)
    try:
        yield blocks, left
    finally:
        occupying.end()


def cells(gpu: Accelerator, speeds: Speeds, say: Say) -> list[Cell]:
    """A cell for each played GPU and case."""
    found = []
    for name in PLAYED:
        for case in _CASES[name]:
            found.append(
                Cell(f"{name}: {case}", lambda name=name, case=case: play(gpu, speeds, name, case, say), 150)
            )
    return found


def play(gpu: Accelerator, speeds: Speeds, name: str, case: str, say: Say) -> dict[str, Any]:
    """One case on one played GPU."""
    played = Played.of(name)
    state: dict[str, Any] = {}

    @contextmanager
    def around() -> Iterator[None]:
        with occupied(gpu, played.memory) as (blocks, left):
            state.update(blocks=blocks, memory_bytes_a_second=left)
            yield

    # Every block is copied so often that as many bytes arrive in a second as on the played link.
    copies = max(1, round(copied_rate(gpu) / played.link))
    small = replace(speeds.rounds, prompts=(128, 1024), contexts=(128,), rounds=1)
    found = measured(
        gpu,
        replace(speeds, rounds=small),
        case,
        say,
        link=LinkSettings(copies=copies),
        around=around,
        machine=name,
    )
    return {**found, "played": {**vars(played), **state, "copies": copies}}
