"""A GPU: its torch device, its stream, and copies between it and the host.

A test runs the same code without a GPU by replacing methods of this class.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.budget.gpu_sizes import CONTEXT_BYTES
from moechat.errors import DeviceUnavailableError
from moechat.hardware.gpu import LEAST_CAPABILITY, find_gpus
from moechat.offload.graphs import CudaGraphs, Graphs
from moechat.offload.kernels.quick_launch import current_stream
from moechat.sizes.dense_types import gpu_type

_LEAST_CONTEXT_BYTES = 64 << 20
_MOST_CONTEXT_BYTES = 2 << 30
# Bytes by GPU; a process makes one context for each.
_CONTEXTS: dict[int, int] = {}


class Point:
    """A point in the work of a GPU's current stream, which the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Set the point behind all work so far; an earlier point is forgotten."""
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait for the work before the point; what kernels wrote to pinned memory is there then."""
        self._event.synchronize()


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU's chip.

    Attributes:
        capability: CUDA compute capability.
        sms: Streaming multiprocessors.
        l2_bytes: Second-level cache.
    """

    capability: tuple[int, int]
    sms: int
    l2_bytes: int


def ordinal_of(name: str) -> int:
    """Index in torch of the first GPU with a driver's name; 0 if there is none.

    The management library numbers GPUs by slot, CUDA the fastest first.
    """
    if not torch.cuda.is_available():
        return 0
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return names.index(name) if name in names else 0


def require_gpu(ordinal: int) -> torch.device:
    """Check that a GPU can be used; it is not touched.

    Args:
        ordinal: Its index among the GPUs in ``CUDA_VISIBLE_DEVICES``.

    Returns:
        The device for torch.

    Raises:
        DeviceUnavailableError: There is no such GPU, driver or Triton; the message names it.
    """
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise DeviceUnavailableError(
            f"no CUDA GPU can be used: {why}",
            hint="`moechat doctor` shows the GPUs of the driver; without --vram, --device cpu works",
        )
    if ordinal >= torch.cuda.device_count():
        raise DeviceUnavailableError(
            f"there is no GPU {ordinal}: torch finds {torch.cuda.device_count()}",
            hint="CUDA_VISIBLE_DEVICES chooses among several",
        )
    device = torch.device("cuda", ordinal)
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise DeviceUnavailableError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need 7.5 (Turing) or newer",
            hint="without --vram, --device cpu works",
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise DeviceUnavailableError(
            f"Triton, which builds the kernels, cannot be imported: {error}",
            hint="pip install triton",
        ) from error
    try:
        _native.cuda_driver_version()
    except _native.CudaUnavailableError as error:
        raise DeviceUnavailableError(str(error), hint="without --vram, --device cpu works") from error
    return device


class Accelerator:
    """One CUDA GPU, for one engine at a time.

    Args:
        ordinal: Its index among the GPUs in ``CUDA_VISIBLE_DEVICES``.

    Attributes:
        device: Device for torch.
        ordinal: As given.
        context_bytes: Bytes of the GPU's memory that this process's CUDA context takes.

    Raises:
        DeviceUnavailableError: There is no usable GPU, driver or Triton; the message names it.
    """

    device: torch.device
    ordinal: int
    context_bytes: int
    _aside: torch.cuda.Stream | None = None
    # Pinned buffer of the last copy to the host, and its event.
    _landing: torch.Tensor | None = None
    _landed: torch.cuda.Event

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self.device = require_gpu(ordinal)
        if ordinal not in _CONTEXTS:
            _CONTEXTS[ordinal] = self._measure_context()
        self.context_bytes = _CONTEXTS[ordinal]

    def _measure_context(self) -> int:
        report = find_gpus()
        initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if initialised or self.ordinal >= len(report.devices):
            return CONTEXT_BYTES
        before = report.devices[self.ordinal].vram_free
        with self.active():
            torch.zeros(1, device=self.device)
        taken = before - self.memory()[0]
        # Other programs allocate and free at the same time.
        return taken if _LEAST_CONTEXT_BYTES <= taken <= _MOST_CONTEXT_BYTES else CONTEXT_BYTES

    @property
    def name(self) -> str:
        """Name of the GPU, from the driver."""
        return torch.cuda.get_device_name(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit type that the GPU computes fastest in."""
        found: torch.dtype = getattr(torch, gpu_type(torch.cuda.get_device_capability(self.device)))
        return found

    def chip(self) -> Chip:
        """Properties of its chip."""
        found = torch.cuda.get_device_properties(self.device)
        return Chip((found.major, found.minor), found.multi_processor_count, found.L2_cache_size)

    def memory(self) -> tuple[int, int]:
        """Free bytes and total bytes of the GPU's memory."""
        return _native.cuda_memory(self.ordinal)

    def peak_bytes(self) -> int:
        """Peak of the bytes that torch has allocated on the GPU."""
        return torch.cuda.max_memory_reserved(self.device)

    def limit(self, nbytes: int) -> None:
        """Limit the memory that torch allocates on the GPU; beyond it torch raises OutOfMemoryError."""
        _, total = self.memory()
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)

    def stream(self) -> int:
        """Handle (CUstream) of torch's current stream."""
        return current_stream(self.device)

    def synchronize(self) -> None:
        """Wait for all work of the GPU."""
        torch.cuda.synchronize(self.device)

    def finish_stream(self) -> None:
        """Wait for the work of the current stream only."""
        _native.cuda_finish(self.stream(), self.ordinal)

    def mark(self) -> Any:
        """An event in the current stream, whose time the GPU notes when it gets there."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, mark: Any) -> bool:
        """Whether the GPU has got to a mark; does not wait."""
        return bool(mark.query())

    def seconds_between(self, first: Any, second: Any) -> float:
        """Seconds between two marks that the GPU has passed."""
        return float(first.elapsed_time(second)) / 1000

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of the GPU for so many calls of ``run``, from event to event on the current stream."""
        begin = self.mark()
        for _ in range(calls):
            run()
        end = self.mark()
        self.finish_stream()
        return self.seconds_between(begin, end)

    def use(self) -> None:
        """Make the GPU the current device of this thread from now on."""
        torch.cuda.set_device(self.device)

    def active(self) -> AbstractContextManager[Any]:
        """Make the GPU the current device of this thread, for launches of torch and Triton."""
        return torch.cuda.device(self.device)

    def alive(self) -> bool:
        """Whether the GPU still computes for this process."""
        try:
            self.finish_stream()
        except RuntimeError:
            return False
        return True

    def release(self) -> None:
        """Return the memory that torch caches without using it to the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Reset :meth:`peak_bytes`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def warm(self, launches: Sequence[Callable[[], None]]) -> None:
        """Build kernels by launching them, before the first answer needs them.

        Raises:
            DeviceUnavailableError: They cannot be built.
        """
        try:
            if not self._launched_together(launches):
                # One after the other: where threads were the reason, this helps, else it says why.
                for launch in launches:
                    launch()
            self.finish_stream()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a missing or failing compiler raises many kinds of errors
            raise DeviceUnavailableError(
                f"Triton cannot build the kernels: {type(error).__name__}: {error}",
                hint="it needs a C compiler and Python's headers: gcc and python3-dev, say, or CC",
            ) from error

    def _launched_together(self, launches: Sequence[Callable[[], None]]) -> bool:
        """Whether all were launched, each by a thread: Triton's compiler works most of its time without
        Python's lock, so that as many kernels are built at once as there are cores.
        """
        inference = torch.is_inference_mode_enabled()

        def run(launch: Callable[[], None]) -> None:
            with self.active(), torch.inference_mode(inference):
                launch()

        pool = ThreadPoolExecutor(max(1, min(len(launches), os.cpu_count() or 1)), "moechat-build")
        try:
            futures = [pool.submit(run, launch) for launch in launches]
            return all(future.exception() is None for future in futures)
        finally:
            pool.shutdown(cancel_futures=True)

    def before_kernels(self) -> None:
        """Hook before the launch of kernels that read pages."""

    def pages(self, count: int, page_bytes: int) -> torch.Tensor:
        """Memory for pages, uint8 ``[count, page_bytes]``, not initialised.

        Raises:
            torch.OutOfMemoryError: The GPU has not so much memory.
        """
        return torch.empty((count, page_bytes), dtype=torch.uint8, device=self.device)

    def host_memory(self, rows: int, columns: int) -> torch.Tensor:
        """Pinned host memory, float32 ``[rows, columns]``, which :meth:`to_device` copies without staging."""
        with torch.inference_mode(False):
            return torch.empty((rows, columns), dtype=torch.float32, pin_memory=True)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8 ``[nbytes]``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def list_memory(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pinned host memory of zeros, and memory of the GPU, int32 ``[count]`` each."""
        with torch.inference_mode(False):
            host = torch.zeros(count, dtype=torch.int32, pin_memory=True)
            return host, torch.empty(count, dtype=torch.int32, device=self.device)

    def copy_list(self, to: int, source: int, nbytes: int) -> None:
        """Copy from pinned host memory to the GPU, in stream order, in a third of torch's time.

        Args:
            to: Address on the GPU.
            source: In the host's memory, which does not change until the copy is done.
            nbytes: Bytes.
        """
        _native.cuda_copy_in(self.stream(), to, source, nbytes, self.ordinal)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, in stream order; REQUIRES: ``host`` does not change until the copy is done."""
        return host.to(self.device, non_blocking=True)

    def to_host(self, packed: torch.Tensor) -> npt.NDArray[np.int32]:
        """Values of an int32 tensor ``[n]``, valid until the next call; waits for this one copy only."""
        count = packed.numel()
        if self._landing is None or len(self._landing) < count:
            with torch.inference_mode(False):
                self._landing = torch.empty(count, dtype=torch.int32, pin_memory=True)
            self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host = self._landing[:count]
        host.copy_(packed, non_blocking=True)
        self._landed.record(torch.cuda.current_stream(self.device))
        self._landed.synchronize()
        values: npt.NDArray[np.int32] = host.numpy()
        return values

    def arrived(self, landed: torch.Tensor) -> npt.NDArray[np.int32]:
        """Values of pinned host memory, int32 ``[n]``, once the stream's work so far has been done."""
        self.finish_stream()
        values: npt.NDArray[np.int32] = landed.numpy()
        return values

    def point(self) -> Point:
        """A point of the current stream, not set yet."""
        return Point(self.device)

    def graphs(self) -> Graphs:
        """A maker of CUDA graphs, with memory of their own."""
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return CudaGraphs(self.device, self._aside)
