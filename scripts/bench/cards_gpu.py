"""A GPU that only takes time, for the engine's own code: see ``native/tests/timed_cuda.cc``.

Copies move nothing and kernels compute nothing. The host's thread is charged with constants, so a run takes
the same virtual time on every machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.configurator import gpu_pattern as pattern
from moechat.configurator.estimate import ModelShape, nearest_bits
from moechat.configurator.gpu_rates import DENSE_SHARE, EXPERT_SHARE
from moechat.geometry import ExpertGeometry
from moechat.hardware.profile import HardwareProfile
from moechat.offload.accelerator import Accelerator
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.kernels.call import PreparedLayer
from moechat.offload.kernels.launch import BlockKernels
from moechat.offload.page_lookup import PageLookup

SOURCE = Path(__file__).parents[2] / "native" / "tests" / "timed_cuda.cc"
VARIABLE = "MOECHAT_CUDA_DRIVER"
COUNTS = (
    *("launches", "graphs", "copies", "batches", "small_copies", "to_host", "waits", "wakes", "bytes"),
    *("h2d_busy", "drained", "gpu_busy", "gpu_held", "gpu_starved", "host_waited", "cpu_busy", "model"),
)


def build() -> Path:
    """The library, built once for its source and compiler."""
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-shared", "-fPIC"]
    key = hashlib.sha256(" ".join(command).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"moechat-cards-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"timed_cuda-{key}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(fresh), str(SOURCE)], check=True, timeout=120)
        fresh.rename(library)
    return library


class Clock:
    """The library in this process: the driver that moechat opens.

    There is one in a process, made before anything opens a driver.
    """

    def __init__(self) -> None:
        path = build()
        os.environ[VARIABLE] = str(path)
        library = ctypes.CDLL(str(path))
        for name in ("timed_get", "timed_now"):
            getattr(library, name).restype = ctypes.c_double
        library.timed_get.argtypes = [ctypes.c_char_p]
        library.timed_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        for name in ("timed_spend", "moechat_clock_compute"):
            getattr(library, name).argtypes = [ctypes.c_double]
        for name in ("timed_launch", "timed_graph"):
            getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
        library.timed_copy.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_int]
        for name in ("timed_finish", "timed_wait"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        self._library = library

    def set(self, **figures: float) -> None:
        """Set figures of the model; see the source."""
        for name, value in figures.items():
            self._library.timed_set(name.encode(), value)

    def now(self) -> float:
        """Seconds."""
        return float(self._library.timed_now())

    def spend(self, seconds: float) -> None:
        """Let the host compute."""
        self._library.timed_spend(seconds)

    def compute(self, nbytes: float) -> None:
        """Let the CPU compute experts of so many bytes."""
        self._library.moechat_clock_compute(nbytes)

    def launch(self, stream: int, host: float, device: float) -> None:
        """Launch a kernel."""
        self._library.timed_launch(stream, host, device)

    def graph(self, stream: int, host: float, device: float) -> None:
        """Replay a graph."""
        self._library.timed_graph(stream, host, device)

    def copy(self, stream: int, nbytes: float, *, to_host: bool) -> None:
        """Give a small copy to a stream."""
        self._library.timed_copy(stream, nbytes, int(to_host))

    def finish(self, stream: int) -> None:
        """Wait for a stream, spinning."""
        if self._library.timed_finish(stream):
            raise RuntimeError("the stream waits for something that never happens")

    def event(self) -> int:
        """A new event."""
        handle = ctypes.c_void_p()
        self._library.cuEventCreate(ctypes.byref(handle), 0)
        assert handle.value is not None
        return handle.value

    def record(self, event: int, stream: int) -> None:
        """Let an event come behind the work of a stream so far."""
        self._library.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, event: int) -> None:
        """Wait for an event, spinning."""
        if self._library.timed_wait(event):
            raise RuntimeError("the event never happens")

    def stream(self) -> int:
        """A new stream."""
        handle = ctypes.c_void_p()
        self._library.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0)
        assert handle.value is not None
        return handle.value

    def end_stream(self, stream: int) -> None:
        """Give a stream back."""
        self._library.cuStreamDestroy_v2(ctypes.c_void_p(stream))

    def counts(self) -> dict[str, float]:
        """What has happened since :meth:`reset`."""
        return {name: float(self._library.timed_get(name.encode())) for name in COUNTS}

    def reset(self) -> None:
        """Count from now on."""
        self._library.timed_reset()

    def become(self, profile: HardwareProfile, shape: ModelShape) -> None:
        """Take the figures of a machine."""
        link, gpu = profile.links["gpu"], profile.gpu
        assert gpu is not None
        sizes = sorted(link.bandwidth)
        alone = link.bandwidth[sizes[-1]].value
        rates = profile.expert_rate[nearest_bits(shape.bits, profile.expert_rate)]
        cpu = rates[max(rates)].value
        together = profile.expert_rate_together
        self.set(
            vram=gpu.vram.value,
            h2d=alone,
            h2d_together=alone if link.together is None else link.together.value,
            d2h=alone,
            copy_overhead=copy_overhead(profile),
            cpu=cpu,
            cpu_together=together[nearest_bits(shape.bits, together)].value if together else cpu,
            copy_call=pattern.COPY_CALL,
            copy_latency=pattern.COPY_LATENCY,
            batch_copy=pattern.BATCH_COPY,
            event_call=pattern.EVENT_CALL,
            event_latency=pattern.EVENT_LATENCY,
            launch_latency=pattern.LAUNCH_LATENCY,
            wake_spin=pattern.WAKE_SPINNING,
            wake_link=pattern.WAKE_POLLING,
            turns=1.0,
        )


def copy_overhead(profile: HardwareProfile) -> float:
    """Seconds of a transfer besides its bytes, as the profile says it."""
    found = profile.links["gpu"].bandwidth
    sizes = sorted(found)
    return max(0.0, sizes[0] / found[sizes[0]].value - sizes[0] / found[sizes[-1]].value)


def no_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Addresses without memory behind them, as long as nothing is written there."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; named from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


class TimedKernels(BlockKernels):
    """Kernels of experts that take the time of the bytes that they read."""

    def __init__(self, geometry: ExpertGeometry, gpu: TimedGpu) -> None:
        super().__init__(geometry, torch.device("cpu"))
        self._gpu = gpu
        self._rate = EXPERT_SHARE * gpu.bandwidth
        self._prepared: dict[int, PreparedLayer] = {}
        self._kept: list[TimedKernel] = []

    def partials(self, items: Items, dtype: torch.dtype) -> torch.Tensor:
        return TimedTensor(self._gpu)  # type: ignore[return-value]

    def add(
        self,
        pages: torch.Tensor,
        blocks: BlockList,
        items: Items,
        x: torch.Tensor,
        partial: torch.Tensor,
        *,
        clear: bool = False,
    ) -> None:
        if blocks.slots == 0:
            return
        seconds = blocks.entries * self.geometry.record_bytes / self._rate
        for _ in range(pattern.EXPERT_KERNELS):
            self._gpu.launch(seconds / pattern.EXPERT_KERNELS)

    def combine(
        self, partial: torch.Tensor, items: Items, out: torch.Tensor, others: torch.Tensor | None = None
    ) -> None:
        out.zero_()
        self._gpu.launch(0.0)

    def prepare(
        self,
        pages: torch.Tensor,
        picks: int,
        x: torch.Tensor,
        out: torch.Tensor,
        others: torch.Tensor | None,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> PreparedLayer:
        if picks not in self._prepared:
            entry = self.geometry.record_bytes / self._rate
            host, step = pattern.KERNEL_CALL, pattern.STREAM_KERNEL
            blocks = TimedKernel(host=host, seconds=step, entry_seconds=entry, list=0, rows=picks)
            total = TimedKernel(host=host, seconds=step, list=-1)
            self._kept += [blocks, total]
            launch = total.launch({"token_item": "p"})
            both = blocks.launch({"row_entry": "p", "clear": "i"})
            self._prepared[picks] = PreparedLayer(both, launch, launch)
        return self._prepared[picks]


class TimedKernel(ctypes.Structure):
    """As in ``native/tests/timed_cuda.cc``."""

    _fields_ = (
        ("parameters", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 64),
        ("host", ctypes.c_double),
        ("seconds", ctypes.c_double),
        ("entry_seconds", ctypes.c_double),
        ("list", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    )

    def launch(self, names: dict[str, str]) -> _native.PreparedLaunch:
        """A launch with parameters of these names and kinds."""
        self.parameters = len(names)
        for at, kind in enumerate(names.values()):
            self.sizes[at] = 8 if kind == "p" else 4
        kernel = _native.CudaKernel(ctypes.addressof(self), 32, 0, "".join(names.values()))
        return _native.PreparedLaunch(kernel, (1, 1, 1), list(names))


class TimedTensor:
    """Sums on the GPU, which can only be cleared."""

    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu = gpu

    def zero_(self) -> TimedTensor:
        self._gpu.launch(0.0)
        return self


class TimedLookup(PageLookup):
    """Lookups that find everything: the engine looks up only where every block has its page."""

    def __init__(self, gpu: TimedGpu, runner: Any, geometry: ExpertGeometry, **sizes: int) -> None:
        super().__init__(runner, gpu, geometry, **sizes)
        self._gpu = gpu

    def launch(self, ordinal: int, packed: torch.Tensor, report: torch.Tensor) -> None:
        def answer() -> None:
            report[: packed.numel()] = torch.from_numpy(self._gpu.answers(ordinal, packed.numel()))
            report[-1] = 0

        for _ in range(pattern.LOOKUP_KERNELS):
            self._gpu.launch(0.0, answer)

    def launch_changes(self, slot: int) -> None:
        self._gpu.launch(0.0)


class TimedPoint:
    """See ``moechat.offload.accelerator.Point``."""

    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu, self._event = gpu, gpu.clock.event()

    def record(self) -> None:
        self._gpu.clock.record(self._event, self._gpu.stream())

    def synchronize(self) -> None:
        self._gpu.clock.wait(self._event)


class TimedGraph:
    """See ``moechat.offload.graphs.Graph``: takes the time of the kernels that were launched into it."""

    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu = gpu
        self._seconds = 0.0
        self._answers: list[Callable[[], None]] = []

    def begin(self) -> None:
        self._gpu.recording = self

    def end(self) -> None:
        self._gpu.recording = None

    abandon = end

    def add(self, seconds: float, kernels: int, answer: Callable[[], None] | None = None) -> None:
        """Record kernels."""
        self._seconds += seconds + kernels * pattern.GRAPH_KERNEL
        if answer is not None:
            self._answers.append(answer)

    def replay(self) -> None:
        for answer in self._answers:
            answer()
        self._gpu.clock.graph(self._gpu.stream(), pattern.GRAPH_CALL, self._seconds)


class TimedGraphs:
    """See ``moechat.offload.graphs.Graphs``."""

    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu = gpu

    def aside(self) -> Any:
        return nullcontext()

    def make_room(self) -> None:
        pass

    def new(self) -> TimedGraph:
        return TimedGraph(self._gpu)


class TimedGpu(Accelerator):
    """The stream, the copies and the graphs of one GPU.

    Args:
        clock: The driver.
        profile: The machine.
        shape: The model.
        context: Tokens that attention reads.
        layer_host: Host seconds of Python and native code for a layer.

    Attributes:
        answers: Called with a layer and the size of its request: what the GPU would have chosen, int32.
        answered: Layers of this token whose choice came to the host.
        recording: The graph that is recorded; ``None``: kernels are launched.
    """

    def __init__(
        self, clock: Clock, profile: HardwareProfile, shape: ModelShape, context: int, layer_host: float
    ) -> None:
        gpu = profile.gpu
        assert gpu is not None
        self.clock, self._layer_host = clock, layer_host
        self.device = torch.device("cpu")
        self.ordinal = 0
        self.context_bytes = 0
        self.bandwidth = gpu.bandwidth.value
        self.answers: Callable[[int, int], npt.NDArray[np.int32]] = lambda _, size: np.zeros(size, np.int32)
        self.answered = 0
        self.recording: TimedGraph | None = None
        self._handle = clock.stream()
        rate = DENSE_SHARE * self.bandwidth
        # The copy of the choice to the host is recorded behind the dense part.
        self._layer = (shape.layer_dense_bytes + shape.kv_bytes * context / shape.layers) / rate
        self._copied = copy_overhead(profile)
        self._head = shape.head_bytes / rate

    def mark(self) -> float:
        """The host's time: the marks of timed tokens decide nothing here."""
        return self.clock.now()

    def passed(self, mark: float) -> bool:
        return True

    def seconds_between(self, first: float, second: float) -> float:
        return second - first

    def launch(self, seconds: float, answer: Callable[[], None] | None = None) -> None:
        """Launch a kernel that works for so long, or record it.

        Args:
            seconds: Beside what every kernel takes.
            answer: What it does; done at every replay.
        """
        if self.recording is not None:
            self.recording.add(seconds, 1, answer)
        else:
            self.clock.launch(self._handle, pattern.KERNEL_CALL, seconds + pattern.STREAM_KERNEL)

    def layer(self) -> None:
        """The dense part of a layer, which takes no time where it is not recorded."""
        if self.recording is not None:
            self.recording.add(self._layer + self._copied, pattern.DENSE_KERNELS)

    def head(self) -> None:
        """The head, likewise."""
        if self.recording is not None:
            self.recording.add(self._head, pattern.HEAD_KERNELS)

    def point(self) -> Any:
        return TimedPoint(self)

    @property
    def name(self) -> str:
        return "a GPU that only takes time"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def memory(self) -> tuple[int, int]:
        return 1 << 50, 1 << 50

    def limit(self, nbytes: int) -> None:
        pass

    def stream(self) -> int:
        return self._handle

    def finish_stream(self) -> None:
        self.clock.finish(self._handle)

    def synchronize(self) -> None:
        self.clock.finish(self._handle)

    def list_memory(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)

    def copy_list(self, to: int, source: int, nbytes: int) -> None:
        self.clock.copy(self._handle, nbytes, to_host=False)

    def active(self) -> Any:
        return nullcontext()

    def release(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def warm(self, launches: Sequence[Callable[[], None]]) -> None:
        pass

    def pages(self, count: int, page_bytes: int) -> torch.Tensor:
        memory = no_memory(count * page_bytes)
        return torch.from_numpy(memory.reshape(count, page_bytes))

    def host_memory(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        self.clock.copy(self._handle, host.nbytes, to_host=False)
        return host

    def to_host(self, packed: torch.Tensor) -> npt.NDArray[np.int32]:
        self.clock.copy(self._handle, packed.nbytes, to_host=True)
        return self.arrived(packed)

    def arrived(self, landed: torch.Tensor) -> npt.NDArray[np.int32]:
        self.clock.spend(pattern.EVENT_CALL)
        self.clock.finish(self._handle)
        self.clock.spend(self._layer_host)
        self.answered += 1
        return self.answers(self.answered - 1, landed.numel())

    def graphs(self) -> TimedGraphs:
        return TimedGraphs(self)

    def close(self) -> None:
        self.clock.finish(self._handle)
        self.clock.end_stream(self._handle)
