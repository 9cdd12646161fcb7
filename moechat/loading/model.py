"""A loaded model and the progress of loading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moechat.budget.memory_plan import MemoryPlan
from moechat.models.attention_cache import new_cache
from moechat.models.decode import NativeModules
from moechat.models.dense_form import DenseForm
from moechat.models.mtp_head import MtpHead
from moechat.models.waves import Waves
from moechat.offload.accelerator import Accelerator
from moechat.offload.experts import ExpertCounters, ExpertLayer, attach
from moechat.offload.placement import PassDecoder
from moechat.offload.tier import ExpertTier
from moechat.offload.upkeep import Upkeep
from moechat.sizes.cache_shape import CacheShape
from moechat.sizes.model_outline import ModelOutline
from moechat.store.background_check import BackgroundCheck
from moechat.store.store import Store


@dataclass(frozen=True)
class Progress:
    """The progress of loading.

    Attributes:
        stage: ``convert``, ``wait``, ``verify`` or ``load``; or ``notice``: ``detail`` is a line to show,
            and there is no step.
        done: Bytes done.
        total: Bytes in all, or ``None`` where unknown.
        detail: Name of the current step.
    """

    stage: str
    done: int
    total: int | None
    detail: str = ""


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class ExpertsPart:
    """The experts module of one layer; a :class:`moechat.models.router_search.ExpertLayer`."""

    name: str
    module: nn.Module
    num_experts: int
    hidden_size: int


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        store: Its block store.
        config: Configuration of transformers.
        model: The model, with its dense weights and its expert layers attached.
        outline: Its sizes.
        form: Form of the dense weights.
        chunk: Tokens of a prompt computed in one pass, where a prompt may come in parts.
        waves: Computes several chunks of a prompt layer by layer; see ``plan.wave``.
        plan: Division of the memory.
        near: The tier of its experts; ``None`` if they are mapped.
        counters: Counters of the expert layers.
        parts: The experts modules, in order.
        upkeep: Keeps statistics and replans; ``None`` without a tier.
        native_modules: The parts of the model that are computed natively in decoding steps.
        accelerator: The GPU that it runs on; ``None``: the CPU.
        decoder: Calls the model with fewer launches on the GPU; ``None``: call the model.
        conversations: Attention caches that the plan has memory for.
        check: Verifies files of the store again while the program waits; ``None``: nothing does.
        mtp: The head for multi-token prediction; ``None``: there is none.
    """

    store: Store
    config: Any
    model: Any
    outline: ModelOutline
    form: DenseForm
    chunk: int
    waves: Waves
    plan: MemoryPlan
    near: ExpertTier | None
    counters: ExpertCounters
    parts: tuple[Any, ...]
    upkeep: Upkeep | None
    native_modules: NativeModules
    accelerator: Accelerator | None
    decoder: PassDecoder | None
    conversations: int = 1
    check: BackgroundCheck | None = None
    mtp: MtpHead | None = None

    @property
    def device(self) -> torch.device:
        """Device of tokens and logits."""
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    @property
    def dtype(self) -> torch.dtype:
        """Type that the dense part computes in."""
        found: torch.dtype = getattr(torch, self.outline.dtype)
        return found

    @property
    def cache(self) -> CacheShape:
        """Shape of the attention cache."""
        return self.outline.cache

    def new_cache(self, tokens: int) -> Any:
        """A cache for so many tokens; ``None`` if the model has to create its own."""
        return new_cache(self.cache, self.model.config, tokens)

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.outline.top_k

    def named_parts(self) -> list[ExpertsPart]:
        """The experts modules with their names and sizes, in order."""
        geometry = self.store.geometry
        return [
            ExpertsPart(record.module, part, geometry.num_experts, geometry.hidden_size)
            for record, part in zip(self.store.layers, self.parts, strict=True)
        ]

    def map_experts(self) -> None:
        """Attach layers that compute the experts from the mapped store."""
        for ordinal, (record, part) in enumerate(zip(self.store.layers, self.parts, strict=True)):
            records = self.store.expert_layer(record.layer)
            attach(
                part,
                ExpertLayer(self.store.geometry, records, self.counters, self.form.activation_bits, ordinal),
            )

    def page_experts(self) -> None:
        """Attach layers that compute the experts from the pages of the tier."""
        assert self.near is not None
        for ordinal, part in enumerate(self.parts):
            attach(part, self.near.layer(ordinal))
