"""Recorded passes of a model, and their comparison with passes that are not recorded.

:class:`moechat.offload.graph_decoder.GraphDecoder` records, compares and replays them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from moechat.configurator.systems import RequestForm
from moechat.offload.crossing import Crossing
from moechat.offload.gpu_layer import Capture, ExpertRequest, GpuExpertLayer
from moechat.offload.graphs import Graph
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.run_ahead import RunAhead

# Replays of a recording that are compared with a pass: the first is of the recorded token itself, so that
# values recorded as constants show in the second.
_CHECKED = 2


@dataclass
class Recording:
    """A recorded pass; while it is recorded, a :class:`moechat.offload.gpu_layer.Capture`.

    Invariant: this object refers to all tensors that experts read or write, and to the logits, so that no
    other graph in the same memory reuses theirs.

    Attributes:
        new: Makes a graph; ``None``: the pass runs, and is not recorded.
        form: Of the requests.
        landing: Makes host memory for so many words of a request.
        fused: See :class:`moechat.offload.gpu_layer.Capture`.
        repeatable: A graph may be replayed again for the same token: it overwrites no states.
    """

    new: Callable[[], Graph] | None
    form: RequestForm
    landing: Callable[[int], torch.Tensor]
    fused: bool
    repeatable: bool = True
    graphs: list[Graph] = field(default_factory=list)
    requests: list[ExpertRequest] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    unchecked: int = _CHECKED
    checked_again_at: int = 0
    crossing: Crossing = field(default_factory=Crossing)
    again: Callable[[Recording], None] | None = None
    ahead: RunAhead | None = None
    complete: CompleteRecording | None = None
    launched: LaunchedLayers | None = None
    _open: Graph | None = None

    def cut(self, ordinal: int, request: ExpertRequest) -> torch.Tensor:
        """End the graph at the experts of a layer, and begin the next."""
        # Finite in the first run, since the next layers keep its results until they are written again.
        total = torch.zeros_like(request.x) if self.new is None else torch.empty_like(request.x)
        # The host waits for the graph anyway: so it need not give the copy to the driver for every token.
        landed = self.landing(request.packed.numel())
        landed.copy_(request.packed, non_blocking=True)
        self.requests.append(replace(request, landed=landed))
        self.sums.append(total)
        self.ordinals.append(ordinal)
        self.crossing.cut()
        self.end()
        self.begin()
        return total

    def result(self) -> torch.Tensor:
        """A copy of the logits, which the next replay overwrites."""
        assert self.logits is not None
        return self.logits.clone()

    def begin(self) -> None:
        """Begin a graph."""
        if self.new is not None:
            # Assigned before it begins, so that Ctrl-C at any time abandons it.
            with self.crossing.unseen():
                self._open = self.new()
                self._open.begin()

    def end(self) -> None:
        """End the graph that has begun."""
        graph = self._open
        if graph is not None:
            with self.crossing.unseen():
                graph.end()
            self._open = None
            self.graphs.append(graph)

    def abandon(self) -> None:
        """Give up the graph that has begun."""
        graph, self._open = self._open, None
        if graph is not None:
            graph.abandon()


@dataclass
class CompleteRecording(Recording):
    """A pass with its experts, for pages that hold all of them: graphs of the layers and of the head."""

    pieces: Recording = field(kw_only=True)

    def cut(self, ordinal: int, request: ExpertRequest) -> torch.Tensor:
        """Record the experts of a layer."""
        assert self.pieces.ahead is not None
        total = torch.empty_like(request.x)
        self.pieces.ahead.launch(ordinal, request, total)
        self.ordinals.append(ordinal)
        if len(self.ordinals) == len(self.pieces.ordinals):
            self.end()
            self.begin()
        return total


@dataclass
class Comparison:
    """Inputs and sums of the experts in a replay, for comparison with a pass of the model.

    The pass takes the replay's sums: so it may choose another one of two experts that nearly tie, and no
    expert is computed, or counted, twice.
    """

    form: RequestForm
    fused: bool = False
    answers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    off: list[torch.Tensor] = field(default_factory=list)

    def cut(self, ordinal: int, request: ExpertRequest) -> torch.Tensor:
        x, answer = self.answers[ordinal]
        self.off.append(distance(x, request.x))
        return answer


@contextmanager
def captured(experts: Sequence[GpuExpertLayer], capture: Capture) -> Iterator[None]:
    """Redirect the requests of expert layers to a capture."""
    try:
        for layer in experts:
            layer.capture = capture
        yield
    finally:
        for layer in experts:
            layer.capture = None


def or_far(distance: float) -> float:
    """The distance; infinity if it is not a number."""
    return distance if math.isfinite(distance) else math.inf


def distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Norm of the difference divided by the norm of the expected values; a scalar tensor."""
    expected = expected.float()
    # Of zeros, as states may be: any other value is far.
    size = expected.norm().clamp_min(torch.finfo(torch.float32).tiny)
    distance: torch.Tensor = (found.float() - expected).norm() / size
    return distance
