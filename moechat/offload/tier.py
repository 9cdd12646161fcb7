"""The expert tier of a model: the pages of all its expert layers, and the runner that fills and reads them.

A tier sets the targets and the policy, and chooses the experts to prefetch; the native runner decides which
blocks to fetch and to evict, moves them and computes them. The :class:`Placement` is the only difference
between the CPU and a GPU: where the pages lie, which link fills them, and which layer computes from
them.

Sources: split experts, LCP and next-layer speculation are MoEpic's (sections 3.2 and 3.3). The rules of this
cache and schedule stand in ``native/src/cache/split_cache.h`` and ``native/src/offload/layer_schedule.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.budget.gpu_sizes import MIN_PAGES
from moechat.budget.held_experts import HeldExperts
from moechat.budget.knowledge import Knowledge, defaults
from moechat.budget.tier_targets import TierTargets, plan_tier, shrunk
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape, Near
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import EXPERTS
from moechat.configurator.transit_reserve import in_transit, stream_tokens
from moechat.errors import DoesNotFitError, UsageError
from moechat.geometry import DEFAULT_ACTIVATION_BITS
from moechat.offload.experts import ExpertCounters, RunsExperts
from moechat.offload.observed import Observed
from moechat.offload.perfect import PerfectPredictor, refuse_without_replay
from moechat.offload.requests import Requests
from moechat.offload.settings import LinkSettings
from moechat.predict import Predictor
from moechat.predict.additive import AdditivePredictor
from moechat.predict.token_lookup import TokenLookup
from moechat.routing import Replay
from moechat.routing.statistics import RoutingStatistics
from moechat.simulate.strategy import loads_as
from moechat.store.store import Store

# Bytes that a tier that is filled gives to the link at a time: between two of them the link is idle for less
# than a thousandth of the time.
_FILL_BYTES = 256 << 20


class LoadingRules(TypedDict):
    """As :meth:`moechat._native.DeviceLayers.begin_token` takes them."""

    predicted: int
    experts: int
    max_bytes: int | None
    ahead: str
    lookahead: int
    stream_tokens: int


@dataclass(frozen=True)
class TierConfig:
    """The parts of a tier that stay the same when its runner is replaced.

    Attributes:
        store: The store of the experts.
        top_k: Experts that the model's routers choose for a token.
        link: Link between store and pages.
        predictor: Ranks the experts of the next layers; ``None``: no prefetch by prediction.
        requests: Predictors that learn from requests; ``None``: requests are told apart only for the policy.
        replay: Recorded routing in place of the routers' choices.
        activation_bits: Type of the inputs of quantised weights: 8 or 16, integers; 32, float32.
    """

    store: Store
    top_k: int
    link: LinkSettings = field(default_factory=LinkSettings)
    predictor: Predictor | None = None
    requests: Requests | None = None
    replay: Replay | None = None
    activation_bits: int = DEFAULT_ACTIVATION_BITS


@dataclass(frozen=True)
class PageMemory:
    """The memory of the pages, and the link that fills it.

    Attributes:
        link: The link.
        address: Address of memory of a device; 0: the runner allocates host memory.
        far_records: Records of each layer in memory, from which the CPU computes missing experts of a device;
            empty: it cannot.
        far_experts: int32 of each layer: the experts that these are of, in that order.
    """

    link: _native.Link
    address: int = 0
    far_records: Sequence[npt.NDArray[np.uint8]] = ()
    far_experts: Sequence[npt.NDArray[np.int32]] = ()


class Placement(Protocol):
    """The memory that the pages of a tier lie in, and the device that computes from them.

    Attributes:
        near: Name of the memory in costs and plans.
        maps_experts: Experts that all fit are computed from the mapped store, without a tier.
        can_shrink: Pages can be given back while the model is loaded.
    """

    near: Near
    maps_experts: bool
    can_shrink: bool

    def open_pages(self, pages: int, config: TierConfig) -> PageMemory:
        """Allocate memory for pages; REQUIRES: none are open.

        Raises:
            DoesNotFitError: The memory is not available.
            MoechatError: Files of the store cannot be opened.
        """
        ...

    def observed(self, before: Costs, observed: Observed) -> Costs | None:
        """Costs that were observed while decoding since the last call; ``None``: too little was timed.

        Args:
            before: The costs that these replace.
            observed: Counters of the tokens.
        """
        ...

    def serve(self, settings: Sequence[CacheSettings]) -> None:
        """Prepare for all of these settings, besides those at work: each may take effect at any token."""
        ...

    def may_take_turns(self, at_work: CacheSettings, other: CacheSettings) -> bool:
        """Whether a tier that was planned for one way to load can change to another, and back, at any token
        and at no cost.
        """
        ...

    def layer(self, tier: ExpertTier, ordinal: int) -> RunsExperts:
        """The layer that computes expert layer ``ordinal`` from the pages."""
        ...

    def close_pages(self) -> None:
        """Give the memory of the pages back; REQUIRES: the runner over them is closed."""
        ...

    def close(self) -> None:
        """Give everything back that pages and far memory take; harmless when repeated."""
        ...


class ExpertTier:
    """Pages, link and cache of a model's expert layers, over one placement.

    Args:
        config: The parts that never change.
        placement: Memory and device; the tier closes it.
        pages: Pages of one block record each, at least :data:`~moechat.budget.gpu_sizes.MIN_PAGES`.
        settings: Policy, split and prefetches.
        lent: More pages, which :meth:`lend` withholds at times.
        cached: Experts of each layer that are computed from the mapped store, in the system's page cache, and
            never get a page; ``None``: none are. Only where the CPU computes.
        counters: Counters of the engine.
        knowledge: Statistics and costs that targets are made from, if the settings want a plan;
            ``None`` takes the package's own for the family.

    Attributes:
        settings: Settings in effect; ``planned_settings``: those that the targets were planned for, which
            differ from them in loading alone; ``first_settings``: those at first; ``wanted``: those asked
            for, which may leave a choice.
        plan: Targets in effect and their origin; they count the experts in the page cache too.
        pages: The pages, those that are lent, and as many more as the experts in the page cache would take.
        withheld: Lent pages that hold nothing now.
        cached: See there.
        runner: The native runner; another one after :meth:`shrink`.
        lookup: What the first layer chose for the tokens so far.
        requests: Predictors that learn from requests.

    Raises:
        UsageError: The settings cannot work, such as ``belady`` without a replay or an impossible number of
            pages.
        DoesNotFitError: The system refuses memory for the pages.
        MoechatError: Files of the store cannot be opened.
    """

    def __init__(
        self,
        config: TierConfig,
        placement: Placement,
        *,
        pages: int,
        settings: CacheSettings,
        lent: int = 0,
        cached: HeldExperts | None = None,
        counters: ExpertCounters | None = None,
        knowledge: Knowledge | None = None,
    ) -> None:
        refuse_without_replay(settings, config.replay)
        store, top_k = config.store, config.top_k
        self.config = config
        self.placement = placement
        self.geometry = store.geometry
        self.layers = len(store.layers)
        self.top_k = top_k
        self.replay = config.replay
        self.lookup = TokenLookup()
        self.requests = config.requests or Requests(self.layers, self.geometry.num_experts)
        self.counters = ExpertCounters() if counters is None else counters
        self.knowledge = _family_knowledge(store, top_k, settings) if knowledge is None else knowledge
        self.wanted = settings
        self.cached = cached if cached and any(map(len, cached)) else None
        self.lent = lent
        self.withheld = 0
        try:
            self._open(pages, settings)
        except BaseException:
            placement.close()
            raise
        self.first_settings = self.settings
        self.stream_tokens = stream_tokens(top_k, self.geometry.num_experts)

    def _open(self, pages: int, settings: CacheSettings) -> None:
        """Make targets, memory and runner for a number of pages."""
        config, geometry = self.config, self.geometry
        if pages < MIN_PAGES:
            raise UsageError(f"{pages} pages are too few; at least {MIN_PAGES} are needed")
        if pages >= 1 << 63:  # beyond the native code's integers
            raise UsageError(f"{pages} pages of experts are more than any memory holds")
        if settings.keep == 0 and settings.miss != "cpu":
            # Pages beyond those in transit would be a cache, which such a system does not have. Where the CPU
            # computes every expert of a token, they serve prompts.
            pages = min(pages, max(MIN_PAGES, in_transit(geometry, self.top_k, settings)))
        cached = sum(map(len, self.cached or ())) * geometry.blocks_per_expert
        slab = pages + self.lent
        plan = plan_tier(
            geometry, self.layers, slab + cached, self.top_k, settings, self.knowledge, always=pages
        )
        policy = _policy(settings, self.layers, geometry.num_experts, config.replay, self.knowledge)
        memory = self.placement.open_pages(slab, config)
        try:
            self.runner = _native.ExpertRunner(
                geometry.layout,
                geometry.gate.native,
                layers=self.layers,
                experts=geometry.num_experts,
                pages=slab,
                targets=self._targets_in_pages(plan.targets, slab - plan.reserve),
                reserve=plan.reserve,
                policy=policy,
                link=memory.link,
                stall_seconds=config.link.stall_seconds,
                whole_experts=settings.whole_experts,
                admit=settings.admit,
                victims=settings.victims,
                adaptive=settings.adaptive_experts(self.top_k),
                adaptive_most=settings.lookahead,
                # A link that moves no bytes needs memory of its own, or the kernels would all read one page
                # of zeros.
                populate=config.link.kind == "sim" and not config.link.copy,
                top_k=min(self.top_k, geometry.num_experts),
                activation_bits=config.activation_bits,
                near_memory=memory.address,
                far_records=memory.far_records,
                far_experts=memory.far_experts,
                layer_layouts=list(geometry.layouts),
                layer_gates=[gate.native for gate in geometry.layer_gates],
                mapped_records=[] if self.cached is None else self._mapped_records(),
                mapped_experts=self.cached or [],
            )
        except ValueError as error:
            raise UsageError(f"{pages} pages of experts cannot be made: {error}") from error
        except (RuntimeError, MemoryError) as error:
            raise DoesNotFitError(
                f"{pages} pages of experts cannot be made: {error}",
                hint="give a smaller memory budget, so that fewer are made",
            ) from error
        self.pages, self.plan, self.reserve = slab + cached, plan, plan.reserve
        self.planned_settings = plan.settings_for(settings)
        self._run_by(self.planned_settings)

    def _mapped_records(self) -> list[npt.NDArray[np.uint8]]:
        """The records of all layers, mapped from the store."""
        store = self.config.store
        layers = [store.expert_layer(record.layer) for record in store.layers]
        for records in layers:
            _native.prefer_huge_pages(records)
        return [records.reshape(-1) for records in layers]

    def _targets_in_pages(self, targets: npt.NDArray[np.int32], pages: int) -> npt.NDArray[np.int32]:
        """The targets without the experts in the page cache, cut down to so many pages."""
        if self.cached is None and self.lent == 0:
            return targets
        own = targets.copy()
        if self.cached is not None:
            own[:, EXPERTS] = np.maximum(own[:, EXPERTS] - [len(experts) for experts in self.cached], 0)
        return shrunk(own, pages)

    def lend(self, nbytes: int) -> None:
        """Use so many bytes of what is lent; the other lent pages give their memory back. Between passes.

        Experts in those pages are evicted.

        Args:
            nbytes: What others do not use of that memory.
        """
        wanted = max(0, self.lent - max(0, nbytes) // self.geometry.record_bytes)
        if wanted == self.withheld:
            return
        runner = self.runner
        if wanted > self.withheld:
            runner.stop_preload()
            with suppress(_native.LinkError):  # the next demand reports it
                runner.drain()  # a page that is being filled cannot be given back
            self._target_pages(self.plan.targets, wanted)
            self.withheld = runner.withhold(wanted)
        else:
            self.withheld = runner.withhold(wanted)
            self._target_pages(self.plan.targets, self.withheld)

    def _target_pages(self, targets: npt.NDArray[np.int32], withheld: int) -> None:
        """Set the native targets, within the pages that are not withheld."""
        self.runner.set_targets(self._targets_in_pages(targets, self.runner.pages - withheld - self.reserve))

    def layer(self, ordinal: int) -> RunsExperts:
        """Expert layer ``ordinal`` (0 is the first layer that has experts)."""
        if not 0 <= ordinal < self.layers:
            raise IndexError(f"there are {self.layers} expert layers, and no number {ordinal}")
        return self.placement.layer(self, ordinal)

    @property
    def blocks(self) -> int:
        """Blocks of all experts of all layers."""
        return self.layers * self.geometry.num_experts * self.geometry.blocks_per_expert

    def fill(self, progress: Callable[[int, int], None]) -> None:
        """Load every expert, before the first pass; REQUIRES: every block has a page.

        A block that cannot be read is left out: the first demand for it reports the error.

        Args:
            progress: Called with the bytes that are there, and those of all experts.
        """
        experts = self.geometry.num_experts
        each = np.indices((self.layers, experts), dtype=np.int32).reshape(2, -1).T
        everything, done = np.ascontiguousarray(each), 0
        while done < len(everything):
            done += self.runner.preload(everything[done:], _FILL_BYTES)
            try:
                self.runner.drain()
            except _native.LinkError:
                return
            progress(done * self.geometry.expert_bytes, len(everything) * self.geometry.expert_bytes)
        self.runner.reset_stats()

    def shrink(self, share: float) -> int:
        """Give pages back to the memory that they lie in; the blocks in all pages have to be fetched again.

        Args:
            share: Share of the pages to give back.

        Returns:
            Bytes that were given back; 0, without any change, where no page can be.
        """
        before = self.pages
        after = max(MIN_PAGES, int(before * (1 - share)))
        if after >= before or not self.placement.can_shrink:
            return 0
        self.runner.close()
        self.placement.close_pages()
        self._open(after, self.settings)
        return (before - after) * self.geometry.record_bytes

    def stats(self) -> dict[str, Any]:
        """The native runner's counters since the last reset."""
        return self.runner.stats()

    def reset_stats(self) -> None:
        """Set all counters to 0."""
        self.runner.reset_stats()

    def routing_statistics(self) -> RoutingStatistics:
        """A copy of the routing of decoded tokens since the last reset; one native call, some megabytes."""
        top_k = min(self.top_k, self.geometry.num_experts)
        return RoutingStatistics(self.settings.policy, top_k, *self.runner.routing_counts())

    def reset_routing_counts(self) -> None:
        """Set the counts of the routing to 0."""
        self.runner.reset_routing_counts()

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """int32 ``[layers, 2]``: experts that a layer keeps, and blocks of each."""
        return self.plan.targets

    def set_targets(self, targets: npt.NDArray[np.int32]) -> None:
        """Change the targets, at once and without moving a block; the budget stays.

        Raises:
            ValueError: The targets take more pages than there are besides the reserve.
        """
        self.apply(TierTargets(targets, self.reserve, "given"))

    def apply(self, plan: TierTargets) -> None:
        """Like :meth:`set_targets`, for targets from :meth:`plan_for`."""
        self._target_pages(plan.targets, self.withheld)
        self.plan = plan

    def plan_for(self, settings: CacheSettings, knowledge: Knowledge | None = None) -> TierTargets:
        """Targets for these pages by other settings or other knowledge; they do not take effect."""
        return plan_tier(
            self.geometry,
            self.layers,
            self.pages,
            self.top_k,
            settings,
            self.knowledge if knowledge is None else knowledge,
            reserve=self.reserve,
        )

    @property
    def far_computes(self) -> bool:
        """Whether missing experts can be computed where they lie."""
        return self.knowledge is not None and self.knowledge.costs.far_computes

    def switch(self, settings: CacheSettings, plan: TierTargets) -> None:
        """Run the same pages by other settings from the next layer on, without moving a block.

        Args:
            settings: With the policy and the ``whole_experts`` that the tier was made with.
            plan: From :meth:`plan_for`.

        Raises:
            ValueError: The settings need another native runner, or the plan is for other pages.
        """
        for name in ("policy", "whole_experts", "admit", "victims", "per_request", "layer_factor"):
            if getattr(settings, name) != getattr(self.settings, name):
                raise ValueError(f"{name} {getattr(settings, name)!r} needs another tier")
        self.apply(plan)
        self.planned_settings = settings
        self._run_by(settings)

    def load_by(self, settings: CacheSettings) -> None:
        """Like :meth:`switch`, for settings that differ only in how missing experts are loaded."""
        if loads_as(self.settings, settings) != settings:
            raise ValueError("settings that keep other experts need other targets: use switch")
        self._run_by(settings)

    def _run_by(self, settings: CacheSettings) -> None:
        """Choose predictor, number and depth of prefetches."""
        self.settings = settings
        self.predictor: Predictor | None = self.config.predictor if settings.predicts else None
        if settings.prefetch == "perfect" and self.replay is not None:
            self.predictor = PerfectPredictor(self.replay, self.geometry.num_experts)
        self.prefetch_experts = min(settings.ranked_experts(self.top_k), self.geometry.num_experts)
        self._tokens: list[int] = []
        self._first_predicted: npt.NDArray[np.int32] | None = None

    def speculation(self, ordinal: int, tokens: int) -> tuple[int | None, list[tuple[int, int]]]:
        """The layer to prefetch whole, or ``None``; and distance and ordinal of the layers to predict.

        Args:
            ordinal: The layer at work.
            tokens: Tokens of the pass.
        """
        settings = self.settings
        if settings.prefetch == "adaptive" and tokens == 1:
            return None, self.runner.adaptive_layers()
        return _native.plan_speculation(
            settings.ahead, settings.lookahead, self.stream_tokens, ordinal, self.layers, tokens
        )

    def ranked_layers(self, ordinal: int, tokens: int, ahead: int) -> list[tuple[int, int]]:
        """Distance and ordinal of the layers, up to ``ahead`` further, that a pass predicts."""
        return _native.plan_speculation("ranked", ahead, self.stream_tokens, ordinal, self.layers, tokens)[1]

    def prefetch_ranked(self, ahead: int, layer: int, scores: npt.NDArray[np.float32]) -> None:
        """Prefetch the experts of a layer that a predictor ranks highest.

        Args:
            ahead: Distance from the layer at work.
            layer: Ordinal of the layer.
            scores: ``[experts]``.
        """
        self.runner.prefetch(
            layer, scores, self.prefetch_experts, self.settings.prefetch_bytes, later=ahead > 1
        )
        if layer == 0 and ahead == 1:
            self.expect_first(scores)

    def expect_first(self, scores: npt.NDArray[np.float32]) -> None:
        """Note what is predicted for the first layer of the next token, to compare it with its choice.

        Args:
            scores: ``[experts]``.
        """
        if self.settings.looks_up:
            self._first_predicted = np.argsort(-scores)[: self.top_k].astype(np.int32)

    def prefetch(
        self,
        ordinal: int,
        x: torch.Tensor,
        index: npt.NDArray[Any],
        weight: npt.NDArray[np.float32],
    ) -> None:
        """Prefetch for the next layers, by the predictors if there are any.

        Args:
            ordinal: The layer that has begun.
            x: ``[tokens, hidden]``: its inputs.
            index: ``[tokens, k]``: what its router chose.
            weight: float32 ``[tokens, k]``.
        """
        if self.settings.prefetch == "none":
            return
        if ordinal == 0:
            self.learn_tokens(index)
        whole, ranked = self.speculation(ordinal, len(x))
        if whole is not None:
            self.runner.prefetch(whole, None, self.geometry.num_experts, self.settings.prefetch_bytes)
        if self.settings.queues:
            hidden = x if x.is_cpu else None
            limit = self.settings.prefetch_bytes
            self.requests.chosen(self.runner, ordinal, index, weight, hidden, limit)
        if self.predictor is None:
            return
        if len(x) == 1 and isinstance(self.predictor, AdditivePredictor):
            self.predictor.observe(ordinal, index[0])
        for ahead, layer in ranked:
            scores = self.predictor.scores(ordinal, ahead, x[-1:])
            if scores is not None:
                self.prefetch_ranked(ahead, layer, scores)

    def begin_request(self, key: object, ids: Sequence[int]) -> None:
        """A request begins: predictors and the policy may tell it from others.

        Args:
            key: The request.
            ids: Its prompt.
        """
        self.requests.begin(self.runner, key, ids, self.targets[:, EXPERTS])

    def begin_pass(self, key: object, token: int) -> None:
        """A token of a request is decoded alone."""
        self.requests.begin_pass(self.runner, key, token)

    def begin_tokens(self, tokens: list[int]) -> None:
        """A pass of these tokens begins, alone or as a part of a prompt."""
        self._tokens = tokens
        if len(tokens) != 1 or not self.settings.looks_up or not self.lookup.better:
            return
        found = self.lookup.find(tokens[0])
        if found is not None:
            scores = np.zeros(self.geometry.num_experts, dtype=np.float32)
            scores[found] = 1
            self.runner.prefetch(
                0, scores, min(len(found), self.prefetch_experts), self.settings.prefetch_bytes
            )

    def learn_tokens(self, index: npt.NDArray[np.int64]) -> None:
        """Learn what the first layer chose for the tokens of the pass, ``[tokens, k]``."""
        tokens, self._tokens = self._tokens, []
        if len(tokens) != len(index) or not self.settings.looks_up:
            return
        if len(tokens) == 1:
            self.lookup.compare(tokens[0], index[0], self._first_predicted)
        self._first_predicted = None
        self.lookup.learn(tokens, index)

    def end_request(self, key: object) -> None:
        """A request has ended; harmless when repeated."""
        self.requests.end(key)

    def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        self.runner.drain()

    def loading_rules(self) -> LoadingRules:
        """How native code loads the experts of decoded tokens."""
        settings = self.settings
        return {
            "predicted": settings.predicted_layers,
            "experts": self.prefetch_experts,
            "max_bytes": settings.prefetch_bytes,
            "ahead": settings.ahead,
            "lookahead": settings.lookahead,
            "stream_tokens": self.stream_tokens,
        }

    def detach(self) -> Placement:
        """Close all but the placement, which another tier may use; the caller closes it."""
        self.runner.close()
        self.placement.close_pages()
        return self.placement

    def close(self) -> None:
        """Stop the link and give all memory back; harmless when repeated."""
        self.runner.close()
        self.placement.close()


def _family_knowledge(store: Store, top_k: int, settings: CacheSettings) -> Knowledge | None:
    """The package's knowledge of the family, where the settings need any."""
    if not settings.allocates and settings.policy != "static":
        return None
    geometry = store.geometry
    shape = ModelShape(
        layers=len(store.layers),
        experts=geometry.num_experts,
        top_k=top_k,
        bits=geometry.bits,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=geometry.expert_weights,
        dense_bytes=0,
        head_bytes=0,
        dense_itemsize=4,
        kv_bytes=0,
        hidden_size=geometry.hidden_size,
        grids=geometry.grid_share,
    )
    return defaults(shape, store.manifest.model_type, settings.policy)


def _policy(
    settings: CacheSettings, layers: int, experts: int, replay: Replay | None, knowledge: Knowledge | None
) -> _native.EvictionPolicy:
    ranks = future = None
    if settings.policy == "static":
        # Of equally popular experts, and without statistics, the first of each layer.
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
        layer_factor=settings.layer_factor,
        per_request=settings.per_request,
        ranks=ranks,
        future=future,
    )
