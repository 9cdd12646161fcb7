"""The engine's own expert layers, graphs, schedule and link over a GPU that only takes time.

Real are: ``GraphDecoder``, ``GpuExpertLayer``, ``ExpertTier``, the native runner with its schedule and cache,
and the link. Routing is replayed, and the model is a stand-in whose dense layers take the time of their
bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cards_gpu import Clock, TimedGpu, TimedKernels, TimedLookup, no_memory
from torch import nn

from moechat import _native
from moechat.budget.knowledge import Knowledge
from moechat.budget.tier_targets import TierTargets
from moechat.configurator import gpu_pattern as pattern
from moechat.configurator.estimate import ModelShape
from moechat.configurator.systems import CacheSettings
from moechat.geometry import ExpertGeometry
from moechat.hardware.profile import HardwareProfile
from moechat.models.cache_argument import CACHE
from moechat.models.cache_layers import ReservedLayer
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.offload.gpu import GpuPlacement
from moechat.offload.graph_decoder import GraphDecoder
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.routing import Trace

Ints = npt.NDArray[np.int32]
# Tokens before the first: no replay is compared with a pass for having a much longer context than the last.
_POSITION = 512


@dataclass(frozen=True)
class Subject:
    """A model on a machine, with a plan.

    Attributes:
        profile: The machine.
        shape: Sizes of the model.
        geometry: Of its experts.
        pages: Of the GPU.
        made: Targets and strategy of the plan; ``None``: every expert has its page.
        settings: How experts are loaded.
        knowledge: That the plan was made from.
        context: Tokens that attention reads.
    """

    profile: HardwareProfile
    shape: ModelShape
    geometry: ExpertGeometry
    pages: int
    made: TierTargets | None
    settings: CacheSettings
    knowledge: Knowledge
    context: int


class NoMemory:
    """Experts in pinned memory of the host, which is never read: stands for ``FarMemory``."""

    def __init__(self, geometry: ExpertGeometry, layers: int) -> None:
        self._layer = no_memory(geometry.layer_bytes)
        self._layers, self._record = layers, geometry.record_bytes

    def records(self) -> list[npt.NDArray[np.uint8]]:
        return [self._layer] * self._layers

    def link(self, copies: int = 1) -> _native.Link:
        regions = [(self._layer, self._layer.nbytes, True, "", 0)] * self._layers
        return _native.cuda_link(regions, device=0, buffer_bytes=self._record, buffers=16)

    def close(self) -> None:
        pass


class TimedLayers(LaunchedLayers):
    """Layers whose choice arrives when the GPU has computed it."""

    def answer(self, ordinal: int) -> None:
        landed = self._requests[ordinal].landed
        assert landed is not None
        self._packed[ordinal][:] = self._pages.accelerator.arrived(landed)[: len(self._packed[ordinal])]
        super().answer(ordinal)


class AttentionCache:
    """An attention cache for the decoder, which only takes its memory."""

    def __init__(self, layers: list[ReservedLayer]) -> None:
        self.layers = layers


class RankedRouter:
    """A router in a recording: its scores come from :class:`Chosen`."""

    def __init__(self, experts: int) -> None:
        self._scores = torch.zeros(1, experts)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._scores


class Chosen:
    """What the GPU reports of each layer: experts, their weights, and the places of predictions, by rankings.

    Args:
        tier: The tier.
        trace: Routing.
        rankings: int32 ``[lookahead, tokens, layers, width]``; ``None``: there are no predictions.

    Attributes:
        token: At work.
    """

    def __init__(self, tier: ExpertTier, trace: Trace, rankings: Ints | None) -> None:
        self._tier, self._trace, self._rankings = tier, trace, rankings
        self.token = 0

    def __call__(self, ordinal: int, size: int) -> Ints:
        tier = self._tier
        values = np.zeros(size, np.int32)
        values[: tier.top_k] = self._trace.experts[self.token, ordinal]
        begin, experts = 2 * tier.top_k, tier.geometry.num_experts
        # Where all experts fit, recordings leave predictions out.
        if self._rankings is not None and tier.pages < tier.blocks:
            for ahead, layer in tier.ranked_layers(ordinal, 1, tier.settings.predicted_layers):
                token = self.token + (ordinal + ahead) // tier.layers
                scores = np.full(experts, -1.0, np.float32)
                ranking = self._rankings[ahead - 1, min(token, self._rankings.shape[1] - 1), layer]
                scores[ranking] = np.arange(len(ranking), 0, -1)
                values[begin : begin + experts] = scores.view(np.int32)
                begin += experts
        return values


class Model(nn.Module):
    """A model whose dense parts only take time, so that the decoder can record it."""

    def __init__(self, gpu: TimedGpu, layers: int, top_k: int, hidden_size: int) -> None:
        super().__init__()
        self._gpu = gpu
        self.parts = nn.ModuleList(nn.Module() for _ in range(layers))
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self._hidden_size = hidden_size
        self._index = torch.zeros(1, top_k, dtype=torch.int64)
        self._weight = torch.ones(1, top_k)

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **named: Any) -> Any:
        hidden = torch.ones(1, self._hidden_size)
        for part in self.parts:
            self._gpu.layer()
            vars(part)[EXPERTS_RUNNER].forward(hidden, self._index, self._weight)
        self._gpu.head()
        return SimpleNamespace(logits=torch.ones(1, 1, 2), **{CACHE: named.get(CACHE)})


@dataclass(frozen=True)
class Timed:
    """What a run took.

    Attributes:
        seconds: Virtual seconds of each token.
        counts: Of the model of the GPU; see ``native/tests/timed_cuda.cc``.
        stats: The native runner's counters.
        host: Processor time of this machine for each token: Python, native code, and the model of the GPU.
    """

    seconds: npt.NDArray[np.float64]
    counts: dict[str, float]
    stats: dict[str, Any]
    host: npt.NDArray[np.float64]

    @property
    def tpot(self) -> float:
        """Mean seconds of a token."""
        return float(self.seconds.mean())


class TimedEngine:
    """Decodes a trace.

    Args:
        clock: The driver.
        subject: Model, machine and plan.
        trace: Routing.
        rankings: Predictions, int32 ``[lookahead, tokens, layers, width]``.
        figures: Figures of the GPU other than the machine's.
        layer_host: Host seconds of Python and native code for a layer, beside calls of the GPU.
        run_ahead: As for ``GraphDecoder``.
    """

    def __init__(
        self,
        clock: Clock,
        subject: Subject,
        trace: Trace,
        rankings: Ints | None,
        *,
        figures: Mapping[str, float],
        layer_host: float,
        run_ahead: bool | None,
    ) -> None:
        _native.set_num_threads(subject.profile.cores)
        self._clock, self._trace = clock, trace
        geometry, layers, shape = subject.geometry, subject.shape.layers, subject.shape
        clock.become(subject.profile, shape)
        clock.set(**figures)
        self.gpu = TimedGpu(clock, subject.profile, shape, subject.context, layer_host)
        placement = GpuPlacement(self.gpu, geometry)
        pages = placement.pages
        kernels = TimedKernels(geometry, self.gpu)
        pages.kernels_of = lambda _: kernels  # type: ignore[method-assign]
        pages.routers = [RankedRouter(geometry.num_experts)] * layers if rankings is not None else ()
        far = NoMemory(geometry, layers)
        placement.far = far  # type: ignore[assignment]
        pages.far_records = far.records()
        store: Any = SimpleNamespace(geometry=geometry, layers=range(layers))
        config = TierConfig(store, shape.top_k)
        self.tier = ExpertTier(
            config, placement, pages=subject.pages, settings=subject.settings, knowledge=subject.knowledge
        )
        if subject.made is not None:
            self.tier.switch(subject.settings, subject.made)
        if self.tier.pages >= self.tier.blocks:  # as loading
            self.tier.fill(lambda *_: None)
            pages.lookup = TimedLookup(
                self.gpu,
                self.tier.runner,
                geometry,
                address=pages.memory.data_ptr(),
                layers=layers,
                picks=shape.top_k,
            )
        self._chosen = self.gpu.answers = Chosen(self.tier, trace, rankings)
        model = Model(self.gpu, layers, shape.top_k, geometry.hidden_size)
        for ordinal, part in enumerate(model.parts):
            vars(part)[EXPERTS_RUNNER] = self.tier.layer(ordinal)
        self.notices: list[str] = []
        self._decoder = GraphDecoder(
            model,
            list(model.parts),
            self.gpu.graphs,
            dtype=torch.float32,
            clocks=pages.clocks,
            notify=self.notices.append,
            run_ahead=run_ahead,
            launched=TimedLayers,
        )
        self._cache = AttentionCache([ReservedLayer(1024) for _ in range(layers)])
        self._decoder.memory.lend(self._cache)
        for layer in self._cache.layers:
            before = torch.zeros(1, 1, _POSITION, 2)
            layer.update(before, before)

    def fill(self, tokens: int) -> None:
        """Let the first tokens of the trace fill the cache; everything missing is fetched."""
        runner, chosen = self.tier.runner, self._chosen
        weight = np.ones((1, self.tier.top_k), np.float32)
        lists = np.zeros(1 << 20, np.int32)
        for _ in range(tokens):
            for ordinal in range(self.tier.layers):
                picks = self._trace.experts[chosen.token, ordinal][None].astype(np.int64)
                runner.begin(ordinal, picks, weight, "fetch")
                runner.finish_on_device(self.gpu.stream(), 1, 1 << 18, lists, 0, lambda *_: 0)
                runner.drain()
            chosen.token += 1

    def decode(self, warm: int, tokens: int) -> Timed:
        """Decode further tokens of the trace; the first ``warm`` of them are not counted."""
        seconds, host = [], []
        for number in range(warm + tokens):
            if number == warm:
                self._clock.reset()
                self.tier.reset_stats()
            begun, started = self._clock.now(), time.thread_time()
            self._token()
            seconds.append(self._clock.now() - begun)
            host.append(time.thread_time() - started)
        if self.notices:
            raise RuntimeError(self.notices[0])
        stats = self.tier.stats()
        return Timed(np.array(seconds[warm:]), self._clock.counts(), stats, np.array(host[warm:]))

    def _token(self) -> None:
        self.gpu.answered = 0
        with torch.inference_mode():
            self._decoder(
                input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{CACHE: self._cache}
            )
        if self.gpu.answered == 0:
            # The GPU computes the head meanwhile.
            self._clock.spend(self.tier.layers * pattern.LAYER_ACCOUNT)
        self._chosen.token += 1
        # The token is sampled on the GPU, and comes to the host.
        self._clock.copy(self.gpu.stream(), 8, to_host=True)
        self._clock.finish(self.gpu.stream())
        self._clock.spend(pattern.TOKEN_HOST)

    def close(self) -> None:
        """Give everything back."""
        self.tier.close()
        self.gpu.close()
