"""A model on a machine, for any budget: memory, targets, costs, the time of a token."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.budget.knowledge import Knowledge, assumed_costs
from moechat.budget.memory_plan import RAM_LABELS, VRAM_LABELS, Budget, MemoryPlan, Needs, plan_memory
from moechat.budget.needs import SPEED_CONTEXT, memory_needs, model_shape
from moechat.budget.tier_targets import TierTargets, plan_tier, simulated_seconds
from moechat.config import run_ahead_wanted, user_paths
from moechat.configurator.allocation import Allocation
from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.estimate import CostFigures, cost_figures
from moechat.configurator.exposure import EngineModel
from moechat.configurator.gpu_pattern import runs_ahead
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import evaluate
from moechat.configurator.transit_reserve import uniform_targets
from moechat.hardware.profile import HardwareProfile, ModelTimes
from moechat.hardware.times_file import TimesKey, load_times
from moechat.options import LoadOptions
from moechat.outline.find_outline import find_outline
from moechat.planning.machine import Machine
from moechat.planning.routing import Routing, routing_of
from moechat.planning.source import PlannedModel, refusals_with_hint
from moechat.planning.speed import (
    PROMPTS,
    Decode,
    behind_disk,
    decode_speed,
    expected_exposed,
    prefill_rates,
    prompt_seconds,
    scaled_to,
)
from moechat.simulate.strategy import Strategy, strategies
from moechat.sizes.context_length import context_length
from moechat.sizes.dense_types import resolve_type

if TYPE_CHECKING:
    from moechat.routing.statistics import RoutingStatistics
    from moechat.sizes.model_outline import ModelOutline


@dataclass(frozen=True)
class Case:
    """The outcome of one budget.

    Attributes:
        memory: The tier that computes, part by part.
        allocation: Targets; ``None`` if all experts are near.
        exposed: Seconds of each layer that nothing hides, float64 ``[layers]``; ``None`` if all experts are
            near.
        costs: Costs of a decoded token, with which the allocation was made.
        decode: Time of a decoded token.
        remarks: Why another allocation than that of the settings was made, if one was.
        made: Targets and strategy as the engine takes them; ``None`` if all experts are near.
    """

    memory: MemoryPlan
    allocation: Allocation | None
    exposed: npt.NDArray[np.float64] | None
    costs: Costs
    decode: Decode
    remarks: tuple[str, ...] = ()
    made: TierTargets | None = None

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that was chosen by simulation; ``None`` if the settings leave no choice."""
        if self.made is None or self.made.strategy is None:
            return None
        return self.made.strategy.strategy


class Cases:
    """A model on a machine, for any budget.

    Args:
        found: The model.
        machine: The machine.
        options: As for loading.
        keep: Keep a model's outline in the user's cache, for later plans.

    Attributes:
        outline: The model's sizes.
        geometry: Shape and encoding of its experts.
        shape: The sizes that the time of a token depends on.
        needs: Bytes that the model takes of the tier that computes.
        routing: Its statistics.
        times: Times of this model's layers, if they were measured on this machine.
        ctx: Wanted context, checked against the model.

    Raises:
        DoesNotFitError: The context is longer than the model allows.
        MoechatError: moechat cannot run the model.
    """

    def __init__(
        self, found: PlannedModel, machine: Machine, options: LoadOptions, *, keep: bool = False
    ) -> None:
        self.machine, self.settings = machine, options.settings
        on_gpu = machine.near == "gpu"
        with refusals_with_hint(found.name):
            self.outline: ModelOutline = find_outline(
                found.config,
                resolve_type(options.dtype, on_gpu=on_gpu, capability=machine.capability, here=machine.here),
                dense_bits=options.dense_bits,
                activation_bits=options.activation_bits,
                kv_bits=options.kv_bits,
                on_gpu=on_gpu,
                headers=found.headers,
                directory=user_paths().cache / "outlines",
                keep=keep,
            )
            self.geometry, self.remark = found.geometry(self.outline)
        self.ctx = None if options.ctx is None else context_length(self.outline.stated_context, options.ctx)
        memory = machine.memory(options)
        self.shape = model_shape(self.outline, self.geometry, memory)
        learned = self.settings.learned_bytes(
            len(self.outline.expert_layers), self.geometry.num_experts, self.geometry.hidden_size
        )
        self.needs: Needs = memory_needs(
            self.outline, self.geometry, memory, options.conversations, learned=learned
        )
        self.routing: Routing = routing_of(found, self.outline.model_type, self.shape, self.settings)
        self.times = self._measured_times(found, options)

    @property
    def dtype(self) -> str:
        """Type that the dense part computes in."""
        return self.outline.dtype

    def case(
        self,
        budget: Budget,
        *,
        ctx: int | None,
        ram_share: float,
        strategy: Strategy | None = None,
    ) -> Case:
        """The outcome of a budget.

        Args:
            budget: Of the tier that computes: of the GPU, or of the whole process.
            ctx: Context, or ``None`` for the usual rule.
            ram_share: Share of all experts that RAM holds behind a GPU.
            strategy: The strategy, where the settings leave a choice; ``None``: the fastest.

        Raises:
            DoesNotFitError: It is too small.
        """
        gpu = self.machine.gpu
        labels = RAM_LABELS if gpu is None else VRAM_LABELS
        memory = plan_memory(
            self.needs,
            budget,
            ctx=ctx,
            labels=labels if self.machine.here else labels.elsewhere(),
            capacity=self._capacity,
            keeps_experts=self.settings.keeps_experts,
        )
        costs = self._costs(memory, ram_share, ahead=self.runs_ahead(memory))
        statistics = self.routing.statistics
        if memory.mapped:
            return Case(memory, None, None, costs, decode_speed(costs, self.shape, statistics))
        found, made = self._allocation(memory, costs, strategy)
        seconds = None if made.strategy is None else made.strategy.seconds_of_choice
        decode, exposed = self._decode(found, costs, made.settings_for(self.settings), seconds)
        return Case(memory, found, exposed, costs, decode, made.notes, made)

    @property
    def usual_strategy(self) -> Strategy | None:
        """The settings as they are; ``None`` where they leave no choice."""
        return strategies(self.settings, far_computes=False)[0] if self.settings.choose else None

    @property
    def _capacity(self) -> int | None:
        """Bytes that the memory that computes has in all, of a GPU or of another machine."""
        gpu, profile = self.machine.gpu, self.machine.profile
        if gpu is not None:
            return int(gpu.vram.value)
        return None if self.machine.here or profile is None else int(profile.ram.value)

    def _decode(
        self, found: Allocation, costs: Costs, settings: CacheSettings, simulated: float | None
    ) -> tuple[Decode, npt.NDArray[np.float64]]:
        """Time of a token, and of each layer what nothing hides."""
        statistics = self.routing.statistics
        exposed = expected_exposed(settings, costs, self.shape, statistics, found)
        if simulated is not None:
            # A simulation counts what the expectation leaves out: queues, and tokens that differ.
            rest = costs.head + self.shape.layers * (costs.attention + costs.moe)
            exposed = scaled_to(exposed, max(0.0, simulated - rest))
        return decode_speed(costs, self.shape, statistics, found, exposed), exposed

    def on(self, machine: Machine | None = None, *, statistics: RoutingStatistics | None = None) -> Cases:
        """The same model on a machine that differs only in its rates, or with other routing."""
        other = copy.copy(self)
        other.machine = machine or self.machine
        if statistics is not None:
            other.routing = replace(self.routing, statistics=statistics, bounds=None)
        return other

    def decode_at(self, case: Case, ram_share: float) -> Decode:
        """Time of a decoded token with targets and strategy of a case that was made for other routing."""
        return self.decode_with(case, self._costs(case.memory, ram_share, ahead=self.runs_ahead(case.memory)))

    def decode_with(self, case: Case, costs: Costs) -> Decode:
        """Time of a decoded token with targets and strategy of a case that was made with other costs."""
        assert case.allocation is not None
        assert case.made is not None
        settings, simulated = case.made.settings_for(self.settings), None
        if case.made.strategy is not None:
            simulated = simulated_seconds(
                self.geometry, case.memory.near_pages, self.outline.top_k, case.made, self._knowledge(costs)
            )
        found = self._evaluated(case.allocation.method, case.allocation.targets, costs, settings)
        return self._decode(found, costs, settings, simulated)[0]

    def resident(self, memory: MemoryPlan) -> float:
        """Share of all experts that the tier that computes holds."""
        near = memory.expert_bytes + memory.lent_bytes + memory.cached_bytes
        return min(1.0, near / self.shape.all_expert_bytes)

    def runs_ahead(self, memory: MemoryPlan) -> bool:
        """Whether decoded tokens wait for the host at no layer."""
        if self.machine.near != "gpu":
            return False
        pages = self.needs.blocks if memory.mapped else memory.pages
        return runs_ahead(pages, self.needs.blocks, graphs=self.shape.graphs, wanted=run_ahead_wanted())

    def cost_figures(
        self, profile: HardwareProfile, memory: MemoryPlan, *, ahead: bool, ram_share: float = 1.0
    ) -> CostFigures:
        """Costs of the experts that RAM holds, with their origins.

        Args:
            profile: The machine.
            memory: Its context bounds the tokens that attention reads.
            ahead: As :meth:`runs_ahead`.
            ram_share: Share of the experts that RAM holds behind a GPU.
        """
        return cost_figures(
            profile,
            self.shape,
            times=self.times,
            near=self.machine.near,
            context=min(SPEED_CONTEXT, memory.context),
            in_ram=ram_share,
            ahead=ahead,
        )

    def prompts(self, case: Case, profile: HardwareProfile) -> dict[int, float] | None:
        """Seconds to the first token, by length of the prompt, for prompts that fit into the context;
        ``None`` where the profile has no figures for many tokens.
        """
        stream = self.shape.expert_bytes / case.costs.load
        rates = prefill_rates(profile, self.shape, self.machine.near, stream)
        if rates is None:
            return None
        chunk = self.outline.pass_tokens(case.memory.context)
        # The host launches every layer of a prompt.
        costs = self._costs(case.memory, 1.0, ahead=False)
        statistics = self.routing.statistics
        return {
            tokens: prompt_seconds(
                tokens,
                chunk,
                case.memory.wave,
                self.shape,
                rates,
                statistics,
                case.allocation,
                costs,
            )
            for tokens in PROMPTS
            if tokens < case.memory.context
        }

    def _costs(self, memory: MemoryPlan, ram_share: float, *, ahead: bool) -> Costs:
        profile = self.machine.figures
        if profile is None:
            return assumed_costs(self.shape)
        costs = self.cost_figures(profile, memory, ahead=ahead, ram_share=ram_share).costs
        if self.machine.near == "ram" or ram_share >= 1 or "file" not in profile.links:
            return costs
        return behind_disk(
            costs,
            self.shape,
            self.routing.statistics,
            near_share=self.resident(memory),
            ram_share=ram_share,
            disk_rate=profile.links["file"].rate(self.shape.expert_bytes),
        )

    def _allocation(
        self, memory: MemoryPlan, costs: Costs, strategy: Strategy | None
    ) -> tuple[Allocation, TierTargets]:
        """The division of the pages and the strategy, as loading makes them."""
        settings, pages = self.settings, memory.near_pages
        made = plan_tier(
            self.geometry,
            self.shape.layers,
            pages,
            self.outline.top_k,
            settings,
            self._knowledge(costs),
            always=memory.pages,
            strategy=strategy,
        )
        if made.allocation is not None:
            return made.allocation, made
        # Every layer keeps the same, for which the engine computes no expected times. One pool for all layers
        # is taken to be divided so.
        kept = made.targets
        if settings.allocation == "shared":
            evenly = replace(settings, allocation="uniform")
            kept, _ = uniform_targets(
                self.geometry, self.shape.layers, pages, self.outline.top_k, evenly, far_computes=False
            )
        return self._evaluated(made.method, kept, costs, made.settings_for(settings)), made

    def _knowledge(self, costs: Costs) -> Knowledge:
        profile = self.machine.figures
        return Knowledge(
            self.routing.statistics,
            costs,
            self.routing.source,
            self.machine.name,
            near=self.machine.near,
            threads=_native.num_threads() if profile is None else profile.cores,
        )

    def _evaluated(
        self, method: str, targets: npt.NDArray[np.int32], costs: Costs, settings: CacheSettings
    ) -> Allocation:
        blocks = self.geometry.blocks_per_expert
        curves = RoutingCurves.of(self.routing.statistics, settings, self.outline.top_k)
        model = EngineModel.of(settings, costs, curves.top_k, blocks)
        expected = evaluate(targets, curves, model, blocks)
        return Allocation(method, targets, expected.loaded, expected.exposed)

    def _measured_times(self, found: PlannedModel, options: LoadOptions) -> ModelTimes | None:
        profile, store = self.machine.profile, found.store
        if not self.machine.here or self.machine.near != "ram" or profile is None or store is None:
            return None
        return load_times(
            TimesKey(
                profile=profile.key,
                model=store.manifest.source.fingerprint,
                dtype=self.dtype,
                threads=options.threads or _native.num_threads(),
                bits=store.geometry.bits,
                dense_bits=self.outline.form.bits,
                dense_bytes=self.outline.form.nbytes,
                activation_bits=self.outline.form.activation_bits,
                kv_bits=self.outline.cache.bits,
            )
        )
