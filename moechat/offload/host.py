"""The CPU as a placement: dense weights and pages in the memory of the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from moechat import _native
from moechat.budget.memory_plan import RAM_LABELS, Budget, MemoryPlan, automatic_budget
from moechat.budget.needs import HostMemory
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import Near
from moechat.configurator.systems import MOST_LOOKAHEAD, CacheSettings, Prefetch
from moechat.hardware.memory import available_bytes, give_back_unused, process_bytes
from moechat.models.decode import NativeModules, install_native_modules
from moechat.models.dense_form import DenseForm
from moechat.models.router_search import find_routers
from moechat.models.skeleton import Skeleton
from moechat.models.threads import make_thread_invariant
from moechat.offload.far_memory import ReadProgress
from moechat.offload.links import open_link
from moechat.offload.observed import Observed, observed_costs
from moechat.offload.placement import PassDecoder
from moechat.offload.tier import ExpertTier, PageMemory, TierConfig
from moechat.options import LoadOptions
from moechat.predict import NextRouterPredictor, Predictor
from moechat.predict.additive import AdditivePredictor
from moechat.sizes.dense_types import resolve_type
from moechat.store.store import Store


class HostPlacement:
    """The CPU; see :class:`~moechat.offload.placement.ModelPlacement`. All memory is the process's own."""

    near: Near = "ram"
    device = torch.device("cpu")
    labels = RAM_LABELS
    maps_experts = True
    can_shrink = False
    in_ram = 0.0

    def dtype(self, name: str) -> torch.dtype:
        """See :meth:`ModelPlacement.dtype`."""
        found: torch.dtype = getattr(torch, resolve_type(name, on_gpu=False))
        return found

    def memory(self, options: LoadOptions) -> HostMemory:
        """See :meth:`ModelPlacement.memory`."""
        give_back_unused()
        return HostMemory(process_bytes(), _native.num_threads())

    def budget(self, options: LoadOptions, base: int) -> Budget:
        """See :meth:`ModelPlacement.budget`."""
        return automatic_budget(available_bytes(), base) if options.ram is None else Budget(options.ram)

    def reserve(self, plan: MemoryPlan) -> None:
        """Does nothing: a process cannot enforce a limit on its own memory."""

    def packed_memory(self, nbytes: int, form: DenseForm, dtype: torch.dtype) -> None:
        """Packed weights are mapped from their file."""

    def adopt(
        self, skeleton: Skeleton, form: DenseForm, *, prefetch: Prefetch
    ) -> tuple[NativeModules, Predictor | None]:
        """See :meth:`ModelPlacement.adopt`."""
        # The heap left by conversions would stay beside the pages.
        give_back_unused()
        make_thread_invariant(skeleton.model)
        native_modules = install_native_modules(skeleton.model)
        if prefetch == "next-router":
            return native_modules, NextRouterPredictor(find_routers(skeleton.model, skeleton.experts))
        if prefetch == "adaptive":
            routers = find_routers(skeleton.model, skeleton.experts)
            experts = max(entry.num_experts for entry in skeleton.experts)
            return native_modules, AdditivePredictor(routers, experts, MOST_LOOKAHEAD)
        return native_modules, None

    def read_far(
        self,
        store: Store,
        options: LoadOptions,
        activations: npt.NDArray[np.int64] | None,
        progress: ReadProgress,
    ) -> None:
        """Does nothing: the link reads the store's files."""

    def open_pages(self, pages: int, config: TierConfig) -> PageMemory:
        """See :meth:`Placement.open_pages`."""
        return PageMemory(open_link(config.store, config.link))

    def observed(self, before: Costs, observed: Observed) -> Costs | None:
        """See :meth:`Placement.observed`: the native runner's clocks."""
        return observed_costs(before, observed)

    def serve(self, settings: Sequence[CacheSettings]) -> None:
        """Does nothing: nothing is recorded."""

    def may_take_turns(self, at_work: CacheSettings, other: CacheSettings) -> bool:
        """See :meth:`Placement.may_take_turns`."""
        return True

    def layer(self, tier: ExpertTier, ordinal: int) -> HostExpertLayer:
        """See :meth:`Placement.layer`."""
        return HostExpertLayer(tier, ordinal)

    def warm(self, model: PreTrainedModel, top_k: int, dtype: torch.dtype) -> None:
        """Does nothing: the kernels were compiled when moechat was installed."""

    def decoder(
        self,
        model: PreTrainedModel,
        parts: Sequence[nn.Module],
        dtype: torch.dtype,
        notify: Callable[[str], None],
        *,
        graphs: bool,
    ) -> PassDecoder | None:
        """``None``: the model's own forward is the only way."""
        return None

    def close_pages(self) -> None:
        """Does nothing: the runner owns the pages."""

    def close(self) -> None:
        """Does nothing: closing the runner frees everything."""


@dataclass
class HostExpertLayer:
    """The routed experts of one decoder layer, computed by the CPU from the pages of a tier.

    Attributes:
        tier: The tier of the model.
        ordinal: Number among the expert layers.
    """

    tier: ExpertTier
    ordinal: int

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts; equal to :meth:`ExpertLayer.forward`, bit by bit.

        Raises:
            LinkError: A block cannot be read, or nothing has arrived for the link's stall limit. The tier
                stays usable.
        """
        tier = self.tier
        runner = tier.runner
        x = hidden.detach().to(torch.float32).contiguous()
        tokens = len(x)
        index = top_k_index.reshape(tokens, -1).to(torch.int64).contiguous().numpy()
        if tier.replay is not None:
            index = tier.replay.route(self.ordinal, tokens)
        weight = top_k_weights.detach().reshape(tokens, -1).to(torch.float32).contiguous().numpy()
        runner.begin(self.ordinal, index, weight)
        tier.prefetch(self.ordinal, x, index, weight)
        out = torch.empty_like(x)
        tier.counters.bytes_read += runner.finish(x.numpy(), out.numpy())
        tier.counters.activations += index.size
        return out.to(hidden.dtype)
