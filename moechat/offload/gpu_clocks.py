"""Clocks of a GPU: how long layers, experts and waits of decoded tokens really take.

Kernels run while the host does something else, so its own clock says nothing about them. A CUDA event is a
mark in the stream; the GPU notes the time when it gets there. The marks of a layer:

    arrived     the router's choice is there: the dense part of the layer is done
    launching   before each launch of expert kernels, behind the wait for the copies that they read
    launched    behind them
    finished    the sum of the experts is complete

The time from ``finished`` of a layer to ``arrived`` of the next is dense; from ``launching`` to ``launched``
is computing; the rest of a layer is waiting: for the host's decision, for copies, for the CPU's part.

Marks cost the host a few microseconds a layer, so only a few tokens are timed (:data:`EVERY`). Their times
are read when the next token begins: until then the GPU has passed all marks, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

# One token in so many is timed. The first ones of an answer fill the cache.
EVERY, FIRST = 32, 4


@dataclass(frozen=True)
class GpuTimes:
    """Sums over the tokens that were timed.

    Attributes:
        tokens: Number of tokens.
        layers: Number of expert layers that ran.
        token_seconds: From the first mark of a token to its last.
        dense_seconds: In the dense part of layers, without that before the first expert layer.
        dense_layers: Number of these.
        head_seconds: Before the first expert layer, and behind the last one.
        expert_seconds: In the kernels of experts.
        expert_bytes: Bytes of block records that these read.
        launches: Launches of blocks, resident and arrived ones apart.
        waiting_seconds: In expert layers, while no kernel of experts ran.
        deciding_seconds: Of these, those that the host needs from the router's choice to the first launch. A
            layer that waits for a copy first takes longer, so the lower quartile of a token's layers counts.
    """

    tokens: int = 0
    layers: int = 0
    token_seconds: float = 0.0
    dense_seconds: float = 0.0
    dense_layers: int = 0
    head_seconds: float = 0.0
    expert_seconds: float = 0.0
    expert_bytes: int = 0
    launches: int = 0
    waiting_seconds: float = 0.0
    deciding_seconds: float = 0.0

    def plus(self, other: GpuTimes) -> GpuTimes:
        """The sums of both."""
        return GpuTimes(
            *(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True))
        )


@dataclass
class _Layer:
    """Marks of one expert layer, in the order in which the stream passes them."""

    arrived: Any
    launching: list[Any] = field(default_factory=list)
    launched: list[Any] = field(default_factory=list)
    finished: Any = None
    nbytes: int = 0


class GpuClocks:
    """Times a few decoded tokens. Not safe for several threads.

    Args:
        mark: Puts a mark into the current stream.
        passed: Whether the GPU has passed a mark.
        seconds: Seconds between two marks that it has passed.

    Attributes:
        timing: The token at work is timed.
    """

    # Invariant: _ended is set if and only if _layers has all marks of a token that came to its end.
    def __init__(
        self,
        mark: Callable[[], Any],
        passed: Callable[[Any], bool],
        seconds: Callable[[Any, Any], float],
    ) -> None:
        self._mark = mark
        self._passed = passed
        self._seconds = seconds
        self._until_next = FIRST
        self._begun: Any = None
        self._ended: Any = None
        self._layers: list[_Layer] = []
        self._sums = GpuTimes()
        self.timing = False

    @contextmanager
    def token(self, tokens: int) -> Iterator[None]:
        """Around a pass of so many tokens; passes of one token are decoding."""
        self._read()
        if tokens == 1:
            self._until_next -= 1
        if tokens != 1 or self._until_next > 0:
            yield
            return
        self._until_next = EVERY
        self._layers, self._begun = [], self._mark()
        self.timing = True
        try:
            yield
            if self.timing:
                self._ended = self._mark()
        finally:
            self.timing = False

    def expect_next(self) -> None:
        """Time the next token that is decoded alone."""
        self._until_next = 1

    def drop(self) -> None:
        """The pass at work does more than decode a token: do not count it."""
        self.timing = False

    def begin_layer(self) -> None:
        """The router's choice of an expert layer is on the host, or comes next in the stream."""
        if self.timing:
            self._layers.append(_Layer(self._mark()))

    def begin_launch(self, nbytes: int) -> None:
        """Kernels over so many bytes of block records are launched next."""
        if self.timing:
            self._layers[-1].launching.append(self._mark())
            self._layers[-1].nbytes += nbytes

    def end_launch(self) -> None:
        """They are in the stream."""
        if self.timing:
            self._layers[-1].launched.append(self._mark())

    def end_layer(self) -> None:
        """The sum of the layer is in the stream."""
        if self.timing:
            self._layers[-1].finished = self._mark()

    def take(self) -> GpuTimes:
        """The sums since the last call; the newest token may be missing."""
        sums, self._sums = self._sums, GpuTimes()
        return sums

    def _read(self) -> None:
        """Add the marks of a complete token to the sums."""
        layers, ended, self._ended = self._layers, self._ended, None
        if ended is None or not layers or not self._passed(ended):
            return
        apart = self._seconds
        computing = waiting = 0.0
        deciding = []
        for layer in layers:
            runs = sum(apart(begin, end) for begin, end in zip(layer.launching, layer.launched, strict=True))
            computing += runs
            waiting += apart(layer.arrived, layer.finished) - runs
            if layer.launching:
                deciding.append(apart(layer.arrived, layer.launching[0]))
        usual = sorted(deciding)[len(deciding) // 4] if deciding else 0.0
        self._sums = self._sums.plus(
            GpuTimes(
                tokens=1,
                layers=len(layers),
                token_seconds=apart(self._begun, ended),
                dense_seconds=sum(apart(one.finished, other.arrived) for one, other in pairwise(layers)),
                dense_layers=len(layers) - 1,
                head_seconds=apart(self._begun, layers[0].arrived) + apart(layers[-1].finished, ended),
                expert_seconds=computing,
                expert_bytes=sum(layer.nbytes for layer in layers),
                launches=sum(len(layer.launching) for layer in layers),
                waiting_seconds=max(0.0, waiting),
                deciding_seconds=min(usual * len(layers), max(0.0, waiting)),
            )
        )
