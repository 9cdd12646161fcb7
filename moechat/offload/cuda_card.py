"""The GPU as :mod:`moechat.hardware.card` measures it: the engine's link and kernels on made-up data.

What kernels read is larger than the second-level cache: one call goes through several experts, or matrices,
that lie one behind another. The calls of a token are shorter than their launches, so they are recorded as a
CUDA graph, and the times are those of the kernels alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.geometry import ExpertGeometry, WeightType
from moechat.hardware.card import CardFacts, Task
from moechat.hardware.gpu import GpuDevice
from moechat.offload.accelerator import Accelerator, ordinal_of
from moechat.offload.graphs import Graph, Graphs
from moechat.offload.kernels import layer_steps
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.kernels.call import PreparedLayer
from moechat.offload.kernels.launch import BlockKernels
from moechat.offload.kernels.packed_linear import DevicePackedLinear, Strips

_LEAST_POOL = 128 << 20
_CACHES = 4
_MOST_CALLS = 32
# From so many tokens on arithmetic takes longer than reading, and two sets are enough.
_ARITHMETIC_TOKENS = 64
_STRIP_BYTES = 32 << 20
_RING = 16


@dataclass(frozen=True)
class CardShapes:
    """Shapes of what is computed.

    Attributes:
        hidden: Hidden size of the experts.
        blocks: Blocks of an expert.
        experts: Experts of a call.
        dense: Rows and columns of a dense matrix.
        pool_bytes: Bytes of the experts, or dense matrices, of a call of one token; 0: four times the
            second-level cache.
    """

    hidden: int = 2048
    blocks: int = 16
    experts: int = 8
    dense: int = 4096
    pool_bytes: int = 0


def open_card(device: GpuDevice) -> CudaCard:
    """Open a GPU for measuring, with torch and the engine's kernels.

    Raises:
        DeviceUnavailableError: It has no driver, or Triton is missing.
    """
    accelerator = Accelerator(ordinal_of(device.name))
    accelerator.use()
    return CudaCard(accelerator)


class CudaCard:
    """Implements :class:`moechat.hardware.card.Card`.

    Args:
        accelerator: The GPU, current in this thread.
        shapes: Shapes of what is computed.
    """

    def __init__(self, accelerator: Accelerator, shapes: CardShapes | None = None) -> None:
        self._accelerator = accelerator
        self._device = accelerator.device
        self._shapes = shapes or CardShapes()
        self._graphs = accelerator.graphs()
        self._kept: dict[Any, Any] = {}  # memory that tasks share
        self._targets: list[torch.Tensor] = []
        self._numbers = torch.zeros(8, dtype=torch.int32, device=self._device)

    def facts(self) -> CardFacts:
        """See :meth:`Card.facts`."""
        chip = self._accelerator.chip()
        return CardFacts(
            self._accelerator.name,
            chip.capability,
            chip.sms,
            chip.l2_bytes,
            self._accelerator.memory()[0],
            self._accelerator.context_bytes,
        )

    def clock(self) -> float:
        """See :meth:`Card.clock`."""
        return time.perf_counter()

    def gpu_seconds(self, run: Callable[[], object], calls: int) -> float:
        """See :meth:`Card.gpu_seconds`."""
        return self._accelerator.seconds(run, calls)

    def wait(self) -> None:
        """See :meth:`Card.wait`."""
        self._accelerator.finish_stream()

    def small(self) -> Task:
        """See :meth:`Card.small`."""
        one = torch.zeros(1, device=self._device)
        return Task(lambda: one.add_(1))

    def graph(self, nodes: int) -> Task:
        """See :meth:`Card.graph`."""
        one = torch.zeros(1, device=self._device)

        def work() -> None:
            for _ in range(nodes):
                one.add_(1)

        return Task(_Replayed(self._graphs, work, required=True))

    def fetch(self) -> None:
        """See :meth:`Card.fetch`."""
        self._accelerator.to_host(self._numbers)

    def read(self, nbytes: int) -> Task:
        """See :meth:`Card.read`."""
        memory = torch.ones(nbytes // 4, device=self._device)
        return Task(memory.sum, nbytes=memory.nbytes)

    def copy(self, nbytes: int) -> Task:
        """See :meth:`Card.copy`."""
        source = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return Task(lambda: target.copy_(source), nbytes=2 * nbytes)

    def back(self, nbytes: int, copies: int) -> Task:
        """See :meth:`Card.back`."""
        source = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
        target = self._accelerator.pinned_bytes(nbytes)

        def run() -> None:
            for _ in range(copies):
                target.copy_(source, non_blocking=True)

        return Task(run, nbytes=copies * nbytes)

    # ---- kernels

    def experts(self, bits: int, tokens: int) -> Task:
        """See :meth:`Card.experts`."""
        geometry, pages = self._pages(bits)
        sets = len(pages) // self._set_blocks
        if tokens >= _ARITHMETIC_TOKENS:
            sets = min(2, sets)
        experts = _Experts(self._accelerator, geometry, self._shapes, tokens, sets)

        def run() -> None:
            experts.launch(pages)

        weights = 3 * self._shapes.hidden * self._set_blocks * 64
        return Task(
            _Replayed(self._graphs, run),
            nbytes=sets * self._set_blocks * geometry.record_bytes,
            operations=2.0 * weights * tokens * sets,
        )

    def call(self) -> Task:
        """See :meth:`Card.call`."""
        geometry, pages = self._pages(4)
        experts = _Experts(self._accelerator, geometry, self._shapes, 1, 1)
        prepared: PreparedLayer | None = None

        def run() -> None:
            # As decoded tokens launch them: natively, once they have been built.
            nonlocal prepared
            if prepared is None:
                experts.launch(pages)
                prepared = experts.prepare(pages)
                return
            stream = self._accelerator.stream()
            prepared.blocks(stream)
            prepared.total(stream)

        return Task(run)

    @property
    def _set_blocks(self) -> int:
        """Blocks of the experts of a call."""
        return self._shapes.experts * self._shapes.blocks

    def _pages(self, bits: int) -> tuple[ExpertGeometry, torch.Tensor]:
        """Blocks of several sets of experts, all equal: speed does not depend on the weights."""
        if ("pages", bits) not in self._kept:
            shapes = self._shapes
            half = WeightType.FP16 if self._accelerator.dtype is torch.float16 else WeightType.BF16
            geometry = ExpertGeometry(
                shapes.hidden, shapes.blocks * 64, shapes.experts, bits, weight_type=half
            )
            sets = self._count(self._set_blocks * geometry.record_bytes)
            pages = self._accelerator.pages(sets * self._set_blocks, geometry.record_bytes)
            pages[:] = torch.from_numpy(_block(geometry)).to(self._device)
            self._kept["pages", bits] = geometry, pages
        found: tuple[ExpertGeometry, torch.Tensor] = self._kept["pages", bits]
        return found

    def dense(self, bits: int, tokens: int) -> Task:
        """See :meth:`Card.dense`."""
        size = self._shapes.dense
        layers, nbytes = self._dense_layers(bits)
        if tokens >= _ARITHMETIC_TOKENS:
            layers = layers[:2]
        x = self._inputs(tokens, size)

        def run() -> None:
            for layer in layers:
                layer(x)

        return Task(
            _Replayed(self._graphs, run),
            nbytes=len(layers) * nbytes,
            operations=2.0 * size * size * tokens * len(layers),
        )

    def _dense_layers(self, bits: int) -> tuple[Sequence[Callable[[torch.Tensor], torch.Tensor]], int]:
        """Layers with matrices of their own, and the bytes of one."""
        if ("dense", bits) not in self._kept:
            size, dtype = self._shapes.dense, self._accelerator.dtype
            if bits == 16:
                nbytes = size * size * dtype.itemsize
                matrices = torch.full(
                    (self._count(nbytes), size, size), 0.01, dtype=dtype, device=self._device
                )
                layers: list[Any] = [_product(matrix) for matrix in matrices]
            else:
                layout = _native.LinearLayout(size, size, bits)
                nbytes = layout.nbytes
                generator = np.random.default_rng(bits)
                packed = _native.pack_linear(
                    layout, generator.standard_normal((size, size), dtype=np.float32)
                )
                # Every matrix begins at a multiple of 64 bytes.
                step = -(-nbytes // 64) * 64
                data = torch.empty((self._count(nbytes), step), dtype=torch.uint8, device=self._device)
                data[:, :nbytes] = torch.from_numpy(packed).to(self._device)
                strips = Strips(_STRIP_BYTES, self._device)
                layers = [DevicePackedLinear(layout, part[:nbytes], None, strips, dtype) for part in data]
            self._kept["dense", bits] = layers, nbytes
        found: tuple[list[Any], int] = self._kept["dense", bits]
        return found

    def _inputs(self, tokens: int, size: int) -> torch.Tensor:
        return torch.full((tokens, size), 0.01, dtype=self._accelerator.dtype, device=self._device)

    def _count(self, nbytes: int) -> int:
        """Sets of so many bytes that are larger than the caches together."""
        pool = self._shapes.pool_bytes
        if not pool:
            pool = max(_LEAST_POOL, _CACHES * (self._accelerator.chip().l2_bytes or 0))
            pool = min(pool, self._accelerator.memory()[0] // 4)
        return max(2, min(_MOST_CALLS, -(-pool // nbytes)))

    # ---- the link

    def link(self, memory: npt.NDArray[np.uint8], *, pinned: bool, buffer_bytes: int) -> _native.Link:
        """See :meth:`Card.link`."""
        return _native.cuda_link(
            [(memory, memory.nbytes, pinned, "", 0)],
            device=self._accelerator.ordinal,
            buffer_bytes=buffer_bytes,
            buffers=_RING,
        )

    def target(self, slots: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """See :meth:`Card.target`."""
        memory = self._accelerator.pages(slots, nbytes)
        self._targets.append(memory)
        return np.asarray(_DeviceArray(memory))

    def pin(self, memory: npt.NDArray[np.uint8]) -> str:
        """See :meth:`Card.pin`."""
        try:
            _native.cuda_pin(memory, self._accelerator.ordinal)
        except _native.CudaError as error:
            if error.sticky:
                raise
            return str(error)
        return ""

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`Card.unpin`."""
        _native.cuda_unpin(memory, self._accelerator.ordinal)

    def release(self) -> None:
        """See :meth:`Card.release`."""
        self._kept.clear()
        self._targets.clear()
        self._accelerator.release()


class _Experts:
    """Experts of a layer on made-up inputs.

    Args:
        accelerator: The GPU.
        geometry: Of the experts.
        shapes: How many there are.
        tokens: Of a launch.
        sets: Launches, each over blocks of its own.
    """

    def __init__(
        self, accelerator: Accelerator, geometry: ExpertGeometry, shapes: CardShapes, tokens: int, sets: int
    ) -> None:
        rows, blocks, device = shapes.experts, shapes.blocks, accelerator.device
        self._accelerator, self._rows = accelerator, rows
        self._kernels = BlockKernels(geometry, device, stream=accelerator.stream)
        ends = np.arange(rows + 1, dtype=np.int32) * tokens
        token = np.tile(np.arange(tokens, dtype=np.int32), rows)
        weight = np.full(rows * tokens, 1.0 / rows, np.float32)
        self._items = Items.build(ends, token, weight, tokens, device)
        row_entry = np.arange(rows + 1, dtype=np.int32) * blocks
        self._lists = [
            BlockList.build(
                np.arange(at * rows * blocks, (at + 1) * rows * blocks, dtype=np.int32),
                row_entry,
                np.zeros(rows, np.int32),
                ends,
                device,
            )
            for at in range(sets)
        ]
        self._x = torch.full((tokens, geometry.hidden_size), 0.01, dtype=accelerator.dtype, device=device)
        self._out = torch.empty_like(self._x)
        self._partial = self._kernels.partials(self._items, self._x.dtype)

    def launch(self, pages: torch.Tensor) -> None:
        """Launch everything."""
        self._accelerator.before_kernels()
        for each in self._lists:
            self._kernels.add(pages, each, self._items, self._x, self._partial)
            self._kernels.combine(self._partial, self._items, self._out)

    def prepare(self, pages: torch.Tensor) -> PreparedLayer | None:
        """The first of the launches, of one token; see :meth:`BlockKernels.prepare`."""
        lists = {**vars(self._items), **vars(self._lists[0])}
        given = {name: value for name, value in lists.items() if isinstance(value, torch.Tensor)}
        return self._kernels.prepare(pages, self._rows, self._x, self._out, None, given)


class _DeviceArray:
    """Addresses of a GPU's memory in the form that numpy takes, for calls that pass them on."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.__array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


class _Replayed:
    """Work that is run and recorded by the first call, and replayed by the others.

    Args:
        graphs: Makes the graph.
        work: Launches kernels.
        required: Raise if it cannot be recorded; else it is run instead.
    """

    def __init__(self, graphs: Graphs, work: Callable[[], None], *, required: bool = False) -> None:
        self._graphs = graphs
        self._work = work
        self._required = required
        self._graph: Graph | None = None
        self._ran = False

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._ran:
            self._work()
        else:
            self._work()
            self._ran = True
            self._record()

    def _record(self) -> None:
        self._graphs.make_room()
        graph = self._graphs.new()
        try:
            with self._graphs.aside():
                graph.begin()
                self._work()
                graph.end()
        except RuntimeError:
            graph.abandon()
            if self._required:
                raise
        else:
            self._graph = graph


def _product(matrix: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """As the layers of a decoded token are multiplied, and those of a prompt."""

    def product(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return layer_steps.products(x, [matrix], [None], x.dtype)[0]
        return torch.nn.functional.linear(x, matrix)

    return product


def _block(geometry: ExpertGeometry) -> npt.NDArray[np.uint8]:
    """A block of random weights: uint8 ``[1, record_bytes]``."""
    generator = np.random.default_rng(geometry.bits)
    fp16 = geometry.weight_type is WeightType.FP16
    layout = _native.BlockLayout(geometry.hidden_size, 64, geometry.bits, fp16=fp16)
    shapes = ((64, geometry.hidden_size), (64, geometry.hidden_size), (geometry.hidden_size, 64))
    gate, up, down = (generator.standard_normal(shape, dtype=np.float32) / np.float32(64) for shape in shapes)
    record = np.empty((1, layout.record_bytes), dtype=np.uint8)
    _native.pack_expert(layout, gate, up, down, None, record)
    return record
