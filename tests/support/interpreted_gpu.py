"""An accelerator over the fake driver: pages in host memory that the driver treats as its own,
kernels in Triton's interpreter, everything else torch on the CPU.

Copies run on the driver's streams, with its delays. Kernels wait for their stream and for nothing else: a
page whose copy the stream was not put behind still holds what it held before.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from fake_cuda import FakeCuda
from interpreted_graph import LAUNCH, InterpretedGraphs
from triton.runtime.interpreter import GridExecutor

from moechat import _native
from moechat.offload.accelerator import Accelerator, Chip


class InterpretedPoint:
    """Replays are over when they return, and kernels when they were launched."""

    def __init__(self, gpu: InterpretedGpu) -> None:
        self.gpu = gpu
        self.recorded = 0

    def record(self) -> None:
        assert all(graphs.recording is None for graphs in self.gpu.graphs_made)
        self.recorded += 1

    def synchronize(self) -> None:
        assert self.recorded
        self.gpu.waits += 1


class InterpretedGpu(Accelerator):
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.closed = False
        self.device = torch.device("cpu")
        self.ordinal = 0
        self.context_bytes = 64 << 20
        self.limited_to: int | None = None
        self.copies_to_host = 0
        self.waits = 0
        self._stream = cuda.stream()
        self.graphs_made: list[InterpretedGraphs] = []
        self._pages: list[torch.Tensor] = []
        self._lists: list[torch.Tensor] = []
        self._pinned: list[torch.Tensor] = []

    @property
    def name(self) -> str:
        return "a GPU that is not there"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def chip(self) -> Chip:
        return Chip((8, 6), 2, 1 << 20)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory(self) -> tuple[int, int]:
        return _native.cuda_memory(0)

    def peak_bytes(self) -> int:
        return sum(pages.nbytes for pages in self._pages)

    def limit(self, nbytes: int) -> None:
        self.limited_to = nbytes

    def stream(self) -> int:
        return self._stream.handle

    def synchronize(self) -> None:
        assert self._stream.synchronize() == 0

    def finish_stream(self) -> None:
        self._stream.synchronize()

    # Kernels run when they are launched, so the host's clock is theirs.
    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds_between(self, first: float, second: float) -> float:
        return second - first

    def active(self):
        return nullcontext()

    def alive(self) -> bool:
        return self._stream.synchronize() == 0

    def release(self) -> None:
        assert not self.closed, "an engine over it was still open"
        if not self.alive():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def reset_peak(self) -> None:
        """Pages are all it has."""

    def warm(self, launches) -> None:
        """The interpreter builds nothing."""

    def before_kernels(self) -> None:
        # A GPU that has failed runs no kernels: their lists may be missing. The next call of the link raises
        # its error.
        if self._stream.synchronize() != 0:
            GridExecutor.__call__ = lambda *_, **__: None

    def pages(self, count: int, page_bytes: int) -> torch.Tensor:
        # Not zeros: what is read too early must not be harmless.
        pages = torch.full((count, page_bytes), 0x7F, dtype=torch.uint8)
        self.cuda.adopt(pages.data_ptr(), pages.nbytes)
        self._pages.append(pages)
        return pages

    def host_memory(self, rows: int, columns: int) -> torch.Tensor:
        return self._pin(torch.full((rows, columns), float("nan")))

    def list_memory(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        there = torch.full((count,), -1, dtype=torch.int32)
        self.cuda.adopt(there.data_ptr(), there.nbytes)
        self._lists.append(there)
        return self._pin(torch.zeros(count, dtype=torch.int32)), there

    def _pin(self, host: torch.Tensor) -> torch.Tensor:
        """It stays registered, and so it is kept."""
        self.cuda.pin(host.data_ptr(), host.nbytes)
        self._pinned.append(host)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def to_host(self, packed):
        assert all(graphs.recording is None for graphs in self.graphs_made)
        self.copies_to_host += 1
        return packed.numpy().copy()

    def arrived(self, landed):
        assert all(graphs.recording is None for graphs in self.graphs_made)
        self.copies_to_host += 1
        return landed.numpy().copy()

    def point(self):
        return InterpretedPoint(self)

    def graphs(self):
        self.graphs_made.append(InterpretedGraphs())
        return self.graphs_made[-1]

    def close(self) -> None:
        self.closed = True
        GridExecutor.__call__ = LAUNCH
        self._stream.synchronize()
        self._stream.close()
        for host in self._pinned:
            self.cuda.unpin(host.data_ptr())
        for there in (*self._pages, *self._lists):
            self.cuda.disown(there.data_ptr())
