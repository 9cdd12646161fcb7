"""Describes a loaded model: its shape, and how its memory is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from moechat import _native
from moechat.config import active_isa
from moechat.configurator.targets import BLOCKS, EXPERTS
from moechat.geometry import DenseBits
from moechat.loading import LoadedModel
from moechat.offload.tier import ExpertTier


@dataclass(frozen=True, kw_only=True)
class Description:
    """Facts about a loaded model; the fields of :meth:`to_json`.

    Attributes:
        name: As the user named the model.
        model_type: Its transformers family.
        source: Of the weights.
        source_weight_type: Element type of the source's expert weights.
        bits: Of an expert weight; of kept encodings those of :class:`moechat.geometry.ExpertGeometry`.
        experts_form: The form of expert weights for people: ``4 bits``, or ``Q4_K and Q6_K``.
        expert_layers: Layers with routed experts.
        experts_per_layer: Experts in one of them.
        blocks_per_expert: Blocks of 64 neurons.
        expert_bytes: Of all experts in the store.
        dense_dtype: Type that the dense part computes in.
        dense_bits: Of a dense weight.
        dense_weights: Bits of the dense weights by the kind of their layer.
        activation_bits: Of the inputs of quantised weights.
        kv_bits: Of a key or value in the attention cache: 16 as in ``dense_dtype``, or 8.
        device: ``cpu``, ``cuda:0``, ...
        context_length: Most tokens of prompt and answer together.
        context_limited_by_memory: The model allows more.
        threads: Of the CPU.
        isa: Instruction set of the native kernels.
        memory_budget_bytes: For everything.
        memory_budget_given: The user chose it.
        memory_process_bytes: Taken before loading.
        memory_dense_bytes: Dense weights.
        memory_attention_cache_bytes: Keys and values of a whole context, and one layer of them unpacked
            where they have 8 bits.
        memory_attention_cache_exact: The figure above is exact, not a bound.
        memory_workspace_bytes: Activations of a pass.
        memory_scratch_bytes: Of the native kernels.
        memory_margin_bytes: Kept free.
        memory_mtp_bytes: The head for multi-token prediction; 0: there is none.
        memory_experts_bytes: Pages of experts, or all experts where they are mapped.
        memory_lent_bytes: Experts in the part of the attention cache that most conversations do not use.
        memory_beyond_bytes: Experts beyond the budget, in memory that the system takes back when other
            programs need it.
        experts: How the experts are held, for people.
        pages: Pages of experts; 0 where they are mapped.
        page_bytes: Of one page.
        blocks: Of all experts.
        system: Name of the offloading system.
        policy: Eviction policy; this and the fields below are ``None`` where experts are mapped.
        split: Share of an expert's blocks that is kept; ``None``: the plan chooses it layer by layer.
        prefetch: What is fetched ahead.
        plan: Method that divided the pages among the layers.
        plan_experts_by_layer: Experts to keep in each layer.
        plan_blocks_by_layer: Blocks to keep of each of them.
        plan_exposed_ms: Load time of a token that nothing hides, as the plan expects it.
        strategy: The strategy that was chosen for ``auto`` by simulation; ``None`` where nothing was chosen.
        plan_statistics: Origin of the plan's routing statistics.
        plan_costs: Origin of the plan's costs.
    """

    name: str
    model_type: str
    source: str
    source_weight_type: str
    bits: int
    experts_form: str
    expert_layers: int
    experts_per_layer: int
    blocks_per_expert: int
    expert_bytes: int
    dense_dtype: str
    dense_bits: DenseBits
    dense_weights: str
    activation_bits: int
    kv_bits: int
    device: str
    context_length: int
    context_limited_by_memory: bool
    threads: int
    isa: str
    memory_budget_bytes: int
    memory_budget_given: bool
    memory_process_bytes: int
    memory_dense_bytes: int
    memory_attention_cache_bytes: int
    memory_attention_cache_exact: bool
    memory_workspace_bytes: int
    memory_scratch_bytes: int
    memory_margin_bytes: int
    memory_mtp_bytes: int
    memory_experts_bytes: int
    memory_lent_bytes: int
    memory_beyond_bytes: int
    experts: str
    pages: int
    page_bytes: int
    blocks: int
    system: str
    policy: str | None = None
    split: float | None = None
    prefetch: str | None = None
    plan: str | None = None
    plan_experts_by_layer: list[int] | None = None
    plan_blocks_by_layer: list[int] | None = None
    plan_exposed_ms: float | None = None
    strategy: str | None = None
    plan_statistics: str | None = None
    plan_costs: str | None = None

    def rows(self, size: Callable[[float], str]) -> list[tuple[str, str]]:
        """The most important facts, for people.

        Args:
            size: Formats a number of bytes.
        """
        return [
            ("model", f"{self.name} ({self.model_type}, {self.experts_form})"),
            ("device", self.device),
            ("memory", size(self.memory_budget_bytes)),
            ("memory, experts", size(self.memory_experts_bytes)),
            ("experts", self.experts),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values, without those of pages where experts are mapped."""
        return {
            entry.name: value
            for entry in fields(self)
            if (value := getattr(self, entry.name)) is not None or (entry.name == "split" and self.policy)
        }


def describe(loaded: LoadedModel, *, name: str, system: str, mapped_by_tuner: bool) -> Description:
    """The facts about a model that is loaded.

    Args:
        loaded: The model.
        name: As the user named it.
        system: Name of the offloading system.
        mapped_by_tuner: The tuner replaced the pages by a mapped store.
    """
    manifest, geometry, plan = loaded.store.manifest, loaded.store.geometry, loaded.plan
    layers = len(manifest.layers)
    return Description(
        name=name,
        model_type=manifest.model_type,
        source=manifest.source.name,
        source_weight_type=manifest.source.weight_type.value,
        bits=geometry.bits,
        experts_form=geometry.title,
        expert_layers=layers,
        experts_per_layer=geometry.num_experts,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_bytes=layers * geometry.layer_bytes,
        dense_dtype=str(loaded.dtype).removeprefix("torch."),
        dense_bits=loaded.form.bits,
        dense_weights=loaded.form.title,
        activation_bits=loaded.form.activation_bits,
        kv_bits=loaded.cache.bits,
        device=str(loaded.device),
        context_length=plan.context,
        context_limited_by_memory=plan.context_limited,
        threads=_native.num_threads(),
        isa=active_isa(),
        memory_budget_bytes=plan.budget,
        memory_budget_given=plan.given,
        memory_process_bytes=plan.base,
        memory_dense_bytes=plan.dense,
        memory_attention_cache_bytes=plan.kv,
        memory_attention_cache_exact=loaded.cache.exact,
        memory_workspace_bytes=plan.workspace,
        memory_scratch_bytes=plan.scratch,
        memory_margin_bytes=plan.margin,
        memory_mtp_bytes=plan.mtp,
        memory_experts_bytes=plan.expert_bytes,
        memory_lent_bytes=plan.lent_bytes,
        memory_beyond_bytes=plan.beyond_bytes,
        experts=_how_experts_are_held(loaded, mapped_by_tuner),
        pages=plan.pages,
        page_bytes=plan.page_bytes,
        blocks=layers * geometry.num_experts * geometry.blocks_per_expert,
        system=system,
        **({} if loaded.near is None else _describe_pages(loaded.near)),
    )


def _describe_pages(near: ExpertTier) -> dict[str, Any]:
    settings = near.settings
    facts: dict[str, Any] = {
        "policy": settings.policy,
        "split": settings.split,
        "prefetch": settings.prefetch,
        "plan": near.plan.method,
        "strategy": None if near.plan.strategy is None else near.plan.strategy.strategy.title,
        "plan_experts_by_layer": near.targets[:, EXPERTS].tolist(),
        "plan_blocks_by_layer": near.targets[:, BLOCKS].tolist(),
    }
    if near.knowledge is not None and near.plan.allocation is not None:
        facts |= {
            "plan_exposed_ms": 1000 * near.plan.allocation.exposed_total,
            "plan_statistics": near.knowledge.statistics_from,
            "plan_costs": near.knowledge.costs_from,
        }
    return facts


def _how_experts_are_held(loaded: LoadedModel, mapped_by_tuner: bool) -> str:
    if loaded.accelerator is not None:
        return "in pages on the GPU, " + ("all of them" if loaded.plan.mapped else "the rest copied")
    if loaded.plan.mapped:
        return "mapped: all of them fit"
    if mapped_by_tuner:
        return "mapped: the page cache was faster than pages"
    cached = loaded.plan.cached_experts
    return "in pages, " + (f"{cached} in the page cache, " if cached else "") + "the rest read when needed"
