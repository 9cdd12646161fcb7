"""The near tier of a model: pages, link and cache of all its expert layers, and the layers over it.

Sources: split experts, LCP and next-layer speculation are MoEpic's (sections 3.2 and 3.3); what differs is
said in ``native/src/cache/split_cache.h`` and ``native/src/offload/runner.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.configurator.estimate import ModelShape
from moechat.configurator.pages import in_transit
from moechat.configurator.systems import CacheSettings
from moechat.errors import DoesNotFitError, UsageError
from moechat.offload.experts import ExpertCounters, RunsExperts
from moechat.offload.perfect import PerfectPredictor, refuse_without_replay
from moechat.offload.planner import Knowledge, TierPlan, defaults, plan_tier
from moechat.offload.settings import LinkSettings
from moechat.predict import Predictor
from moechat.routing import Replay
from moechat.routing.statistics import RoutingStatistics
from moechat.store.store import Store

# A page to compute from while another one is filled.
MIN_PAGES = 2
# A pass is treated as a prefill, whose next layer is streamed whole, when it needs this share of a layer.
_STREAM_SHARE = 0.5


class NearTier:
    """Pages, link and cache of an engine's expert layers.

    Args:
        store: Where the experts lie.
        pages: Pages of one block record each, at least :data:`MIN_PAGES`.
        top_k: Experts that the model's routers choose for a token.
        settings: What is kept and what is fetched ahead.
        link: How blocks come.
        predictor: Ranks the experts of layers to come; ``None``: none are fetched ahead by prediction.
        replay: Chooses the experts in place of the routers.
        counters: Of the engine.
        knowledge: What the targets are made from, if the settings want others than the same for every layer;
            ``None`` takes what the package knows of the family.
        activation_bits: How inputs meet quantised weights: 8 or 16, integers; 32, float32.
        near_memory: Address of memory of a device for the pages; 0: the host's.
        source: The link, in place of one that ``link`` describes.
        far_records: Records of each layer in memory, from which the CPU can compute what is missing on a
            device; empty: it cannot.

    Attributes:
        settings: How it is run now; ``first_settings``: how it was at first.
        plan: Where the targets in effect come from.

    Raises:
        UsageError: The settings cannot work, such as ``belady`` without a replay or an impossible number of
            pages.
        DoesNotFitError: The system refuses memory for the pages.
        MoechatError: Files of the store cannot be opened.
    """

    def __init__(
        self,
        store: Store,
        *,
        pages: int,
        top_k: int,
        settings: CacheSettings,
        link: LinkSettings | None = None,
        predictor: Predictor | None = None,
        replay: Replay | None = None,
        counters: ExpertCounters | None = None,
        knowledge: Knowledge | None = None,
        activation_bits: int = 16,
        near_memory: int = 0,
        source: _native.Link | None = None,
        far_records: Sequence[npt.NDArray[np.uint8]] = (),
    ) -> None:
        refuse_without_replay(settings, replay)
        link = LinkSettings() if link is None else link
        geometry = store.geometry
        self.geometry = geometry
        self.settings = settings
        self.layers = len(store.layers)
        self.top_k = top_k
        self.replay = replay
        self._predictor = predictor
        self.counters = ExpertCounters() if counters is None else counters
        if pages < MIN_PAGES:
            raise UsageError(f"{pages} pages are too few; at least {MIN_PAGES} are needed")
        if pages >= 1 << 63:  # the native code could not even say that it refuses them
            raise UsageError(f"{pages} pages of experts are more than any memory holds")
        if settings.keep == 0:
            # Pages beyond those in transit would be a cache, which such a system does not have.
            pages = min(pages, max(MIN_PAGES, in_transit(geometry, top_k, settings)))
        self.knowledge = _family(store, top_k, settings) if knowledge is None else knowledge
        self.pages = pages
        self.plan = plan_tier(geometry, self.layers, pages, top_k, settings, self.knowledge)
        self.reserve = self.plan.reserve
        policy = _policy(settings, self.layers, geometry.num_experts, replay, self.knowledge)
        source = _link(store, link) if source is None else source
        try:
            self.runner = _native.ExpertRunner(
                geometry.layout,
                geometry.activation.value,
                geometry.alpha,
                geometry.limit,
                layers=self.layers,
                experts=geometry.num_experts,
                pages=pages,
                targets=self.plan.targets,
                reserve=self.reserve,
                policy=policy,
                link=source,
                stall_seconds=link.stall_seconds,
                whole_experts=settings.whole_experts,
                # Bytes that never arrive must be memory of their own, or the kernels would read one zero
                # page.
                populate=link.kind == "sim" and not link.copy,
                top_k=min(top_k, geometry.num_experts),
                activation_bits=activation_bits,
                near_memory=near_memory,
                far_records=far_records,
            )
        except ValueError as error:
            raise UsageError(f"{pages} pages of experts cannot be made: {error}") from error
        except (RuntimeError, MemoryError) as error:
            raise DoesNotFitError(
                f"{pages} pages of experts cannot be made: {error}",
                hint="give a smaller memory budget, so that fewer are made",
            ) from error
        self.first_settings = settings
        self._run_by(settings)
        # Tokens from which a pass needs so much of a layer that the next one is streamed whole.
        share = min(top_k, geometry.num_experts) / geometry.num_experts
        stream = np.log(1 - _STREAM_SHARE) / np.log1p(-share) if share < 1 else 1.0
        self.stream_tokens = max(2, int(np.ceil(stream)))

    def layer(self, ordinal: int) -> RunsExperts:
        """Expert layer ``ordinal`` (0 is the first layer that has experts)."""
        if not 0 <= ordinal < self.layers:
            raise IndexError(f"there are {self.layers} expert layers, and no number {ordinal}")
        return CachedExpertLayer(self, ordinal)

    @property
    def clocked(self) -> bool:
        """Whether the native runner's clocks tell what computing takes."""
        return True

    def shrink(self, share: float) -> int:
        """Give so many of the pages back; returns the bytes. Only pages on a card can be."""
        del share
        return 0

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, as the native runner gives them."""
        return self.runner.stats()

    def reset_stats(self) -> None:
        """Set all counters to 0."""
        self.runner.reset_stats()

    def routing_statistics(self) -> RoutingStatistics:
        """What decoding was routed to since the last reset, a copy; one native call, some megabytes."""
        top_k = min(self.top_k, self.geometry.num_experts)
        return RoutingStatistics(self.settings.policy, top_k, *self.runner.routing_counts())

    def reset_routing_counts(self) -> None:
        """Count the routing from nothing again."""
        self.runner.reset_routing_counts()

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """int32 ``[layers, 2]``: experts that a layer keeps, and blocks of each."""
        return self.plan.targets

    def set_targets(self, targets: npt.NDArray[np.int32]) -> None:
        """Other targets, at once and without moving a block; the budget stays.

        Raises:
            ValueError: The targets take more pages than there are besides the reserve.
        """
        self.apply(TierPlan(targets, self.reserve, "given"))

    def apply(self, plan: TierPlan) -> None:
        """As :meth:`set_targets`, for a plan from :meth:`plan_for`."""
        self.runner.set_targets(plan.targets)
        self.plan = plan

    def plan_for(self, settings: CacheSettings, knowledge: Knowledge | None = None) -> TierPlan:
        """A plan for these pages that other settings or other knowledge would give; nothing changes."""
        return plan_tier(
            self.geometry,
            self.layers,
            self.pages,
            self.top_k,
            settings,
            self.knowledge if knowledge is None else knowledge,
            reserve=self.reserve,
        )

    def switch(self, settings: CacheSettings, plan: TierPlan) -> None:
        """Another way to run the same pages from the next layer on, without moving a block.

        Args:
            settings: With the policy and the ``whole_experts`` that the near tier was made with.
            plan: From :meth:`plan_for`.

        Raises:
            ValueError: The settings need another native runner, or the plan is for other pages.
        """
        if (settings.policy, settings.whole_experts) != (self.settings.policy, self.settings.whole_experts):
            raise ValueError("another policy, or whole experts instead of blocks, need another near tier")
        self.apply(plan)
        self._run_by(settings)

    def _run_by(self, settings: CacheSettings) -> None:
        """What is fetched ahead, and how far."""
        self.settings = settings
        self.predictor = {"next-router": self._predictor, "perfect": self._perfect()}.get(settings.prefetch)
        experts = self.top_k if settings.prefetch_experts is None else settings.prefetch_experts
        self.prefetch_experts = min(experts, self.geometry.num_experts)
        depth = min(settings.lookahead, self.layers - 1)
        self.ahead = [
            [(ahead, (ordinal + ahead) % self.layers) for ahead in range(1, depth + 1)]
            for ordinal in range(self.layers)
        ]

    def _perfect(self) -> Predictor | None:
        return None if self.replay is None else PerfectPredictor(self.replay, self.geometry.num_experts)

    def prefetch_whole(self, ordinal: int, tokens: int) -> bool:
        """Fetch all of the next layer ahead, where a pass of so many tokens, or the system, wants that.

        Returns:
            Whether it does; then nothing else is to be fetched ahead.
        """
        settings = self.settings
        last = ordinal == self.layers - 1
        if settings.prefetch != "whole-layer" and (tokens < self.stream_tokens or last):
            return False
        for _, layer in self.ahead[ordinal][:1]:
            self.runner.prefetch(layer, None, self.geometry.num_experts, settings.prefetch_bytes)
        return True

    def prefetch_ranked(self, ahead: int, layer: int, scores: npt.NDArray[np.float32]) -> None:
        """Fetch the experts of a layer ahead that a predictor ranks highest.

        Args:
            ahead: How many layers from the one at work.
            layer: Which.
            scores: ``[experts]``.
        """
        self.runner.prefetch(
            layer, scores, self.prefetch_experts, self.settings.prefetch_bytes, far=ahead > 1
        )

    def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        self.runner.drain()

    def close(self) -> None:
        """Stop the link and give the pages back; harmless when repeated."""
        self.runner.close()


@dataclass
class CachedExpertLayer:
    """The routed experts of one decoder layer, over the near tier.

    Attributes:
        near: Shared by all layers of an engine.
        ordinal: Number among the expert layers.
    """

    near: NearTier
    ordinal: int

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts; as :meth:`ExpertLayer.forward`, bit by bit.

        Raises:
            LinkError: A block cannot be read, or nothing has arrived for the link's stall limit. The near
                tier stays usable.
        """
        near = self.near
        runner = near.runner
        x = hidden.detach().to(torch.float32).contiguous()
        tokens = len(x)
        index = top_k_index.reshape(tokens, -1).to(torch.int64).contiguous().numpy()
        if near.replay is not None:
            index = near.replay.route(self.ordinal, tokens)
        weight = top_k_weights.detach().reshape(tokens, -1).to(torch.float32).contiguous().numpy()
        runner.begin(self.ordinal, index, weight)
        if near.settings.prefetch != "none":
            self._prefetch(x)
        out = torch.empty_like(x)
        near.counters.bytes_read += runner.finish(x.numpy(), out.numpy())
        near.counters.activations += index.size
        return out.to(hidden.dtype)

    def _prefetch(self, x: torch.Tensor) -> None:
        near = self.near
        if near.prefetch_whole(self.ordinal, len(x)) or near.predictor is None:
            return
        if len(x) > 1 and self.ordinal < near.layers - 1:
            return
        for ahead, layer in near.ahead[self.ordinal]:
            scores = near.predictor.scores(self.ordinal, ahead, x[-1:])
            if scores is not None:
                near.prefetch_ranked(ahead, layer, scores)


def _family(store: Store, top_k: int, settings: CacheSettings) -> Knowledge | None:
    """What the package knows, where the settings ask for it."""
    if settings.allocation == "uniform" and settings.policy != "static":
        return None
    return defaults(shape_of(store, top_k), store.manifest.model_type, settings.policy)


def shape_of(
    store: Store, top_k: int, *, dense_bytes: int = 0, head_bytes: int = 0, itemsize: float = 4
) -> ModelShape:
    """What a plan has to know about a stored model.

    Args:
        store: With the experts.
        top_k: Experts a token.
        dense_bytes: Dense weights that a token reads between embedding and final norm.
        head_bytes: Of final norm and head.
        itemsize: Bytes of a dense weight, in the mean.
    """
    geometry = store.geometry
    return ModelShape(
        layers=len(store.layers),
        experts=geometry.num_experts,
        top_k=top_k,
        bits=geometry.bits,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=3 * geometry.hidden_size * geometry.intermediate_size,
        dense_bytes=dense_bytes,
        head_bytes=head_bytes,
        dense_itemsize=itemsize,
        kv_bytes=0,
        hidden_size=geometry.hidden_size,
    )


def _policy(
    settings: CacheSettings, layers: int, experts: int, replay: Replay | None, knowledge: Knowledge | None
) -> _native.EvictionPolicy:
    ranks = future = None
    if settings.policy == "static":
        # Of equally popular experts, and where nothing is known of them, the first of each layer.
        ranks = np.tile(-np.arange(experts, dtype=np.float64), (layers, 1)) / (experts + 1)
        if knowledge is not None and knowledge.statistics is not None:
            ranks += knowledge.statistics.activations
    if replay is not None and settings.policy == "belady":
        future = np.ascontiguousarray(replay.future(), dtype=np.int32)
    return _native.EvictionPolicy(
        settings.policy,
        layers,
        experts,
        omega=settings.omega,
        rho=settings.rho,
        gamma=settings.gamma,
        ranks=ranks,
        future=future,
    )


def _link(store: Store, settings: LinkSettings) -> _native.Link:
    if settings.kind == "sim":
        return _native.sim_link(
            [store.expert_layer(record.layer).reshape(-1) for record in store.layers],
            bandwidth=settings.bandwidth,
            latency=settings.latency,
            jitter=settings.jitter,
            seed=settings.seed,
            reorder=settings.reorder,
            in_flight_bytes=settings.in_flight_bytes,
            copy=settings.copy,
        )
    extents = [store.expert_extent(record.layer) for record in store.layers]
    return _native.file_link(
        [(str(extent.path), extent.offset, extent.nbytes) for extent in extents],
        io=settings.io,
        direct=settings.direct,
        in_flight_bytes=settings.in_flight_bytes,
    )
