"""The part of a GPU that measuring needs: :class:`Card`.

:mod:`moechat.offload.cuda_card` implements it with the engine's link and kernels, which this room may not
import; tests play one whose speeds are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moechat import _native


@dataclass(frozen=True)
class CardFacts:
    """Properties of a GPU that its driver reports; ``None``: unknown.

    Attributes:
        name: Its name.
        capability: CUDA compute capability.
        sms: Streaming multiprocessors.
        l2_bytes: Second-level cache.
        free_bytes: Free memory.
        context_bytes: Bytes of its memory that this process's context takes.
    """

    name: str
    capability: tuple[int, int] | None
    sms: int | None
    l2_bytes: int | None
    free_bytes: int
    context_bytes: int | None


@dataclass(frozen=True)
class Task:
    """Work of a GPU that can be started again and again.

    Attributes:
        run: Starts it once, without waiting. What it reads is larger than the caches, or is changed from call
            to call, unless it reads nothing.
        nbytes: Bytes of memory that one call reads, or reads and writes.
        operations: Multiplications and additions of one call.
    """

    run: Callable[[], object]
    nbytes: float = 0.0
    operations: float = 0.0


class Card(Protocol):
    """A GPU to measure. Every call may raise; a failure ends the measurement of one figure."""

    def facts(self) -> CardFacts:
        """What its driver reports."""
        ...

    def clock(self) -> float:
        """Seconds on the host's clock, from any start."""
        ...

    def gpu_seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of the GPU for so many calls of ``run``, from event to event."""
        ...

    def wait(self) -> None:
        """Record an event behind all work and wait for it, as the engine does."""
        ...

    def small(self) -> Task:
        """The smallest kernel."""
        ...

    def graph(self, nodes: int) -> Task:
        """The replay of a CUDA graph of so many small kernels."""
        ...

    def fetch(self) -> None:
        """Copy a few numbers to the host and wait for them, as the engine does with a router's choice."""
        ...

    def read(self, nbytes: int) -> Task:
        """Read memory of the GPU."""
        ...

    def copy(self, nbytes: int) -> Task:
        """Copy memory of the GPU within it: ``nbytes`` read and as many written."""
        ...

    def back(self, nbytes: int, copies: int) -> Task:
        """Copy ``nbytes`` to pinned host memory, so many times."""
        ...

    def experts(self, bits: int, tokens: int) -> Task:
        """Compute experts whose blocks lie in pages, for so many tokens each."""
        ...

    def call(self) -> Task:
        """Start the kernels of a layer's experts for one token, one by one as the engine does."""
        ...

    def dense(self, bits: int, tokens: int) -> Task:
        """Products with dense weights: 16 bits, or packed in 8, 6 or 4."""
        ...

    def link(self, memory: npt.NDArray[np.uint8], *, pinned: bool, buffer_bytes: int) -> _native.Link:
        """The engine's link from host memory, not open yet.

        Args:
            memory: uint8 ``[n]``.
            pinned: Whether :meth:`pin` has pinned it; else it is copied through a ring of pinned buffers.
            buffer_bytes: Size of a buffer of that ring.
        """
        ...

    def target(self, slots: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the GPU for a link, uint8 ``[slots, nbytes]``; the host must not touch it."""
        ...

    def pin(self, memory: npt.NDArray[np.uint8]) -> str:
        """Pin host memory; returns the reason of a refusal, or an empty text."""
        ...

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Undo :meth:`pin`."""
        ...

    def release(self) -> None:
        """Free the memory of all tasks and targets."""
        ...
