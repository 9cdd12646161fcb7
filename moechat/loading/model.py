"""What loading gives: a model that can run, wherever it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moechat.config import parse_size
from moechat.errors import UnsupportedModelError, UsageError
from moechat.models.attention_cache import CacheShape
from moechat.models.decode import Quickened
from moechat.models.dense_form import DenseForm
from moechat.models.shape import automatic_type
from moechat.models.skeleton import Skeleton
from moechat.offload.accelerator import Accelerator
from moechat.offload.budget import MemoryPlan
from moechat.offload.cached import NearTier
from moechat.offload.experts import ExpertCounters, ExpertLayer, attach
from moechat.offload.upkeep import Upkeep
from moechat.store.store import Store

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Progress:
    """How far loading has come.

    Attributes:
        stage: ``convert``, ``wait``, ``verify`` or ``load``.
        done: Bytes done.
        total: Bytes in all, or ``None`` where unknown.
        detail: What is being worked on.
    """

    stage: str
    done: int
    total: int | None
    detail: str = ""


Report = Callable[[Progress], None]


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        store: Its block store.
        config: transformers' configuration.
        model: With its dense weights, and expert layers attached.
        dtype: Type that the dense part computes in.
        form: How its weights are kept.
        cache: Shape of its attention cache.
        chunk: Tokens of a prompt computed in one pass, where a prompt may come in parts.
        plan: How the memory is spent.
        near: Pages and link of the experts; ``None`` if they are mapped.
        counters: Of the expert layers.
        top_k: Experts a token.
        parts: The experts modules, in order.
        upkeep: What the near tier learns while it runs; ``None`` without one.
        quickened: What of the model is computed natively in decoding steps.
        accelerator: The card that it runs on; ``None``: the CPU.
        routers: Of the expert layers, on the card, for prediction.
        decoder: Calls the model with fewer calls of the card; ``None``: the model is called.
    """

    store: Store
    config: Any
    model: Any
    dtype: torch.dtype
    form: DenseForm
    cache: CacheShape
    chunk: int
    plan: MemoryPlan
    near: NearTier | None
    counters: ExpertCounters
    top_k: int
    parts: tuple[Any, ...]
    upkeep: Upkeep | None
    quickened: Quickened
    accelerator: Accelerator | None = None
    routers: tuple[Any, ...] = ()
    decoder: Callable[..., Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    def map_experts(self) -> None:
        """Let the experts be computed from the mapped store, whatever computed them before."""
        for record, part in zip(self.store.layers, self.parts, strict=True):
            records = self.store.expert_layer(record.layer)
            attach(
                part,
                ExpertLayer(self.store.geometry, records, self.counters, self.form.activation_bits),
            )

    def page_experts(self) -> None:
        """Let the near tier compute the experts, whatever computed them before."""
        assert self.near is not None
        for ordinal, part in enumerate(self.parts):
            attach(part, self.near.layer(ordinal))


def parse_budget(size: str | int | None, name: str = "ram") -> int | None:
    """Bytes of a memory budget.

    Args:
        size: Such as ``"2G"``, or a number of bytes; ``None`` stays so.
        name: Of the budget, for messages.

    Raises:
        UsageError: It is neither a size nor a positive number of bytes, or larger than any memory.
    """
    if size is None:
        return None
    given, size = size, parse_size(size) if isinstance(size, str) else size
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise UsageError(f"{name} is {given!r}", hint="give a size such as '2G', or a number of bytes")
    if size >= 1 << 63:
        raise UsageError(f"{name} is {size.bit_length()} bits long; no memory is larger than 2⁶³ - 1 bytes")
    return size


def dense_type(dtype: str) -> torch.dtype:
    """The torch type of a name; for ``auto`` see :func:`moechat.models.shape.automatic_type`."""
    if dtype != "auto":
        return DTYPES[dtype]
    return automatic_type()


@dataclass
class Trial:
    """Stands in for an expert layer in the trial pass, and notes how many experts a token takes."""

    top_k: list[int] = field(default_factory=list)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        self.top_k.append(index.shape[-1])
        return torch.empty_like(hidden)


def check_same_experts(skeleton: Skeleton, store: Store) -> None:
    """Refuse a store whose experts are not those of its configuration.

    Raises:
        UnsupportedModelError: They differ.
    """
    built = [
        (entry.layer, entry.num_experts, entry.hidden_size, entry.intermediate_size)
        for entry in skeleton.experts
    ]
    geometry = store.geometry
    shape = (geometry.num_experts, geometry.hidden_size, geometry.intermediate_size)
    stored = [(record.layer, *shape) for record in store.manifest.layers]
    if built != stored:
        raise UnsupportedModelError(
            f"{store.path} holds {len(stored)} expert layers unlike the {len(built)} of its configuration",
            hint="it was made with another version of transformers; convert the checkpoint again",
        )
