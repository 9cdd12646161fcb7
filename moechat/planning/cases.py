"""A budget of the near tier and all that follows from it: memory, targets, costs, a token's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.configurator.allocate import allocate
from moechat.configurator.allocation import Allocation
from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.estimate import CostFigures, ModelShape, cost_figures
from moechat.configurator.exposure import EngineModel
from moechat.configurator.pages import uniform_targets
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import evaluate
from moechat.geometry import ExpertGeometry
from moechat.hardware.model_times import TimesKey, load_times
from moechat.hardware.profile import HardwareProfile, ModelTimes
from moechat.offload.budget import MemoryPlan, Needs, plan_memory
from moechat.offload.planner import Knowledge, assumed_costs, plan_tier
from moechat.planning.machine import Machine
from moechat.planning.memory import CUDA_BYTES, plan_vram
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
)

if TYPE_CHECKING:
    from moechat.models.shape import ModelOutline

# Tokens that a decoded token attends to, where the plan says how fast it is.
SPEED_CONTEXT = 1024
# A page to compute from while another one is filled.
_MIN_PAGES = 2


@dataclass(frozen=True)
class Case:
    """What a budget comes to.

    Attributes:
        memory: The near tier, part by part.
        allocation: Targets; ``None`` if all experts are near.
        exposed: Seconds a layer that nothing hides, float64 ``[layers]``; ``None`` as before.
        costs: What it was made with.
        decode: A token.
        remarks: Why another allocation than the settings' was made, if one was.
    """

    memory: MemoryPlan
    allocation: Allocation | None
    exposed: npt.NDArray[np.float64] | None
    costs: Costs
    decode: Decode
    remarks: tuple[str, ...] = ()


class Cases:
    """A model on a machine, for any budget.

    Args:
        found: The model.
        machine: The machine.
        settings: How the near tier is run.
        ctx: Context wanted, or ``None``.
        dense_bits: Of a dense weight.

    Attributes:
        outline: The model's sizes.
        geometry: Its experts.
        shape: What the time of a token depends on.
        routing: Its statistics.
        times: Measured on this model on this machine, if it was.
        ctx: As wanted, checked against the model.

    Raises:
        DoesNotFitError: The context is longer than the model allows.
        MoechatError: moechat cannot run the model.
    """

    def __init__(
        self,
        found: PlannedModel,
        machine: Machine,
        settings: CacheSettings,
        ctx: int | None,
        dense_bits: int = 16,
    ) -> None:
        # Imported here: torch and transformers come with them.
        import torch

        from moechat.models.assets import context_length
        from moechat.models.shape import automatic_type, outline_model

        if machine.near == "gpu":
            dtype = torch.bfloat16
        else:
            dtype = automatic_type() if machine.here else torch.float32
        self.machine, self.settings = machine, settings
        self.ctx = None if ctx is None else context_length(found.config, ctx)
        with refusals_with_hint(found.name):
            self.outline: ModelOutline = outline_model(found.config, dtype, dense_bits)
            self.geometry: ExpertGeometry = (
                self.outline.geometry(found.bits) if found.store is None else found.store.geometry
            )
        self.shape = _shape(self.outline, self.geometry)
        self.routing: Routing = routing_of(found, self.outline.model_type, self.shape, settings)
        self.times = self._measured_times(found)

    @property
    def dtype(self) -> str:
        """Of the dense weights."""
        return str(self.outline.dtype).removeprefix("torch.")

    def needs(self) -> Needs:
        """What the model takes of the near tier."""
        outline, geometry, machine = self.outline, self.geometry, self.machine
        on_gpu = machine.near == "gpu"
        threads = 0
        if not on_gpu:
            here = machine.here or machine.profile is None
            threads = _native.num_threads() if here or machine.profile is None else machine.profile.cores
        return Needs(
            base=CUDA_BYTES if on_gpu else machine.process.nbytes,
            dense=outline.dense_bytes + outline.router_copies,
            loading=0 if on_gpu else outline.loading,
            kv=outline.cache.nbytes,
            workspace=outline.workspace,
            scratch=outline.scratch + (outline.unpacked if on_gpu else 0),
            page_bytes=geometry.record_bytes,
            blocks=self.shape.layers * geometry.num_experts * geometry.blocks_per_expert,
            min_pages=_MIN_PAGES,
            own_context=outline.own_context,
            threads=threads,
        )

    def case(self, needs: Needs, budget: int, *, given: bool, ctx: int | None, ram_share: float) -> Case:
        """What a budget comes to.

        Args:
            needs: See :meth:`needs`.
            budget: Bytes of the near tier, or of the whole process where that is RAM.
            given: Whether the user said so.
            ctx: Context, or ``None`` for the usual rule.
            ram_share: Of all experts, what RAM behind a graphics card holds.

        Raises:
            DoesNotFitError: It is too small.
        """
        card = self.machine.vram
        if card is None:
            memory = plan_memory(needs, budget, given=given, ctx=ctx)
        else:
            memory = plan_vram(needs, budget, card, given=given, ctx=ctx)
        costs = self._costs(memory, ram_share)
        statistics = self.routing.statistics
        if memory.mapped:
            return Case(memory, None, None, costs, decode_speed(costs, self.shape, statistics))
        found, remarks = self._allocation(memory.pages, costs)
        exposed = expected_exposed(self.settings, costs, self.shape, statistics, found)
        decode = decode_speed(costs, self.shape, statistics, found, exposed)
        return Case(memory, found, exposed, costs, decode, remarks)

    def resident(self, memory: MemoryPlan) -> float:
        """Share of all experts that the near tier holds."""
        return min(1.0, memory.expert_bytes / self.shape.all_expert_bytes)

    def cost_figures(self, profile: HardwareProfile, memory: MemoryPlan) -> CostFigures:
        """Costs with their origins, with RAM holding all experts."""
        context = min(SPEED_CONTEXT, memory.context)
        return cost_figures(profile, self.shape, times=self.times, near=self.machine.near, context=context)

    def prompts(self, case: Case, profile: HardwareProfile) -> dict[int, float] | None:
        """Seconds to the first token, for prompts that the context has room for; ``None`` where the profile
        says nothing about many tokens.
        """
        stream = self.shape.expert_bytes / case.costs.load
        rates = prefill_rates(profile, self.shape, self.machine.near, stream)
        if rates is None:
            return None
        chunk = self.outline.pass_tokens(case.memory.context)
        statistics = self.routing.statistics
        return {
            tokens: prompt_seconds(tokens, chunk, self.shape, rates, statistics, case.allocation, case.costs)
            for tokens in PROMPTS
            if tokens < case.memory.context
        }

    def _costs(self, memory: MemoryPlan, ram_share: float) -> Costs:
        profile = self.machine.figures
        if profile is None:
            return assumed_costs(self.shape)
        costs = self.cost_figures(profile, memory).costs
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

    def _allocation(self, pages: int, costs: Costs) -> tuple[Allocation, tuple[str, ...]]:
        """How pages are divided, and why not as the settings say, if so."""
        if self.machine.near == "ram":
            return self._as_the_engine_does(pages, costs)
        top_k = self.outline.top_k
        _, reserve = uniform_targets(self.geometry, self.shape.layers, pages, top_k, self.settings)
        found = allocate(
            self.settings,
            self.routing.statistics,
            costs,
            blocks=self.geometry.blocks_per_expert,
            pages=int((pages - reserve) * self.settings.keep),
            top_k=top_k,
        )
        return found, ()

    def _as_the_engine_does(self, pages: int, costs: Costs) -> tuple[Allocation, tuple[str, ...]]:
        settings, statistics = self.settings, self.routing.statistics
        top_k, blocks = self.outline.top_k, self.geometry.blocks_per_expert
        knowledge = Knowledge(statistics, costs, self.routing.source, self.machine.name)
        made = plan_tier(self.geometry, self.shape.layers, pages, top_k, settings, knowledge)
        if made.allocation is not None:
            return made.allocation, made.notes
        # The same for every layer, of which the engine expects nothing.
        curves = RoutingCurves.of(statistics, settings, top_k)
        model = EngineModel.of(settings, costs, curves.top_k, blocks)
        expected = evaluate(made.targets, curves, model, blocks)
        return Allocation(made.method, made.targets, expected.loaded, expected.exposed), made.notes

    def _measured_times(self, found: PlannedModel) -> ModelTimes | None:
        profile, store = self.machine.profile, found.store
        if not self.machine.here or self.machine.near != "ram" or profile is None or store is None:
            return None
        return load_times(
            TimesKey(
                profile=profile.key,
                model=store.manifest.source.fingerprint,
                dtype=self.dtype,
                threads=_native.num_threads(),
                bits=store.geometry.bits,
                dense_bits=self.outline.form.bits,
            )
        )


def _shape(outline: ModelOutline, geometry: ExpertGeometry) -> ModelShape:
    return ModelShape(
        layers=len(outline.expert_layers),
        experts=geometry.num_experts,
        top_k=outline.top_k,
        bits=geometry.bits,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=outline.expert_weights,
        dense_bytes=outline.form.in_layers,
        head_bytes=outline.form.head_bytes,
        dense_itemsize=outline.form.itemsize,
        kv_bytes=outline.cache.nbytes(SPEED_CONTEXT) // SPEED_CONTEXT,
        hidden_size=geometry.hidden_size,
    )
