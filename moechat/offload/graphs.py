"""CUDA graphs: kernels recorded once and launched again by one call.

``torch.cuda.CUDAGraph`` records the launches on a stream without running them. A replay runs the same kernels
on the same addresses; decisions of Python are those made while recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """One recording."""

    def begin(self) -> None:
        """Record launches on the current stream from now on."""
        ...

    def end(self) -> None:
        """Stop recording.

        Raises:
            RuntimeError: Something cannot be recorded: an operation that waits for the GPU.
        """
        ...

    def abandon(self) -> None:
        """Stop, if it has begun and not ended, and drop the recording; raises nothing."""
        ...

    def replay(self) -> None:
        """Launch the recording on the current stream."""
        ...


class Graphs(Protocol):
    """Makes graphs that share memory: they are replayed in the order of recording, one at a time."""

    def aside(self) -> AbstractContextManager[None]:
        """Run the block on a stream of its own, where recording is possible.

        It starts after all work of the current stream, and the current stream continues after it.
        """
        ...

    def make_room(self) -> None:
        """Free torch's unused memory: while a graph is recorded, that is not possible."""
        ...

    def new(self) -> Graph:
        """An empty graph."""
        ...


class CudaGraph:
    """A graph of torch.

    Args:
        device: The GPU.
        pool: Memory pool of the recorded tensors.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        """See :meth:`Graph.begin`."""
        # Other threads copy and allocate at the same time: only this one is recorded.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """See :meth:`Graph.end`."""
        self._graph.capture_end()

    def abandon(self) -> None:
        """See :meth:`Graph.abandon`."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            # After a failed end the allocator still treats the recording as active, and its memory as in use;
            # if it never began, the first call raises.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
                torch._C._cuda_releasePool(self._device.index or 0, self._pool)

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        self._graph.replay()


class CudaGraphs:
    """Graphs of one GPU.

    Args:
        device: The GPU.
        stream: Stream to record on; always the same, since libraries keep memory for each stream.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See :meth:`Graphs.aside`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def make_room(self) -> None:
        """See :meth:`Graphs.make_room`."""
        torch.cuda.empty_cache()

    def new(self) -> Graph:
        """See :meth:`Graphs.new`."""
        return CudaGraph(self._device, self._pool)
