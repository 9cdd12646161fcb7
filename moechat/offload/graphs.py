"""CUDA graphs: what a card was given once, given again by one call.

``torch.cuda.CUDAGraph`` records what a stream is given and does not run it. A replay runs the same kernels on
the same addresses; what Python decided while recording stays decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """One recording."""

    def begin(self) -> None:
        """Record what the current stream is given from now on."""
        ...

    def end(self) -> None:
        """Stop.

        Raises:
            RuntimeError: Something cannot be recorded: an operation that waits for the card.
        """
        ...

    def abandon(self) -> None:
        """Stop, if it has begun and not ended, and forget what was recorded; raises nothing."""
        ...

    def replay(self) -> None:
        """Give the current stream what was recorded."""
        ...


class Graphs(Protocol):
    """Makes graphs that share memory: they are replayed in the order of recording, one at a time."""

    def aside(self) -> AbstractContextManager[None]:
        """Puts what follows into a stream of its own, where recording is possible.

        It begins after what the current stream was given, and the current stream goes on after it.
        """
        ...

    def make_room(self) -> None:
        """Give memory back that is kept for later: while a graph is recorded nothing else can be."""
        ...

    def new(self) -> Graph:
        """An empty graph."""
        ...


class CudaGraph:
    """A graph of torch's.

    Args:
        device: The card.
        pool: Of the memory that the recorded tensors take.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        """See :meth:`Graph.begin`."""
        # Other threads go on copying and allocating meanwhile: only what this one does counts.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """See :meth:`Graph.end`."""
        self._graph.capture_end()

    def abandon(self) -> None:
        """See :meth:`Graph.abandon`."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            # An end that fails leaves the allocator believing that the recording goes on, and that this graph
            # needs the memory; had it never begun, the first call says so.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
                torch._C._cuda_releasePool(self._device.index or 0, self._pool)

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        self._graph.replay()


class CudaGraphs:
    """Graphs of one card.

    Args:
        device: The card.
        stream: To record in; the same every time, since libraries keep memory for each stream.
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
