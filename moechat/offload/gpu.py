"""A GPU as a placement: dense weights and pages in its memory, experts in the host's or in their files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from moechat.budget.held_experts import choose_experts, experts_held
from moechat.budget.memory_plan import VRAM_LABELS, Budget, MemoryPlan, automatic_budget, gpu_budget
from moechat.budget.needs import LIBRARY_BYTES, GpuMemory
from moechat.config import cuda_graphs_wanted, run_ahead_wanted
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import Near
from moechat.configurator.systems import CacheSettings, Prefetch, RequestForm
from moechat.errors import DoesNotFitError, MoechatWarning
from moechat.geometry import ExpertGeometry
from moechat.hardware.memory import available_bytes, give_back_unused, process_bytes
from moechat.models.decode import NativeModules
from moechat.models.dense_form import DenseForm
from moechat.models.packed_rows import register_codec
from moechat.models.router_search import find_routers
from moechat.models.skeleton import Skeleton
from moechat.offload import fused_feed, fused_layers
from moechat.offload.accelerator import Accelerator
from moechat.offload.far_memory import FarMemory, ReadProgress
from moechat.offload.fused_steps import FusedSteps, recognise_steps
from moechat.offload.gpu_clocks import GpuClocks
from moechat.offload.gpu_layer import GpuExpertLayer
from moechat.offload.gpu_pages import GpuPages, routers_on
from moechat.offload.graph_decoder import GraphDecoder
from moechat.offload.kernels import packed_linear
from moechat.offload.kernels.device_rows import DeviceRows
from moechat.offload.links import open_link
from moechat.offload.observed import Observed, observed_on_gpu
from moechat.offload.packed_on_gpu import PackedGpuMemory
from moechat.offload.placement import PassDecoder
from moechat.offload.tier import ExpertTier, PageMemory, TierConfig
from moechat.options import LoadOptions
from moechat.predict import Predictor
from moechat.store.files import format_bytes
from moechat.store.store import Store


class GpuPlacement:
    """A GPU; see :class:`~moechat.offload.placement.ModelPlacement`.

    Args:
        accelerator: The GPU.
        geometry: Shape and encoding of the experts.

    Attributes:
        pages: The pages, and the routers that predict.
        far: The experts in the host's memory or files; ``None``: the link is a simulated one.
    """

    near: Near = "gpu"
    labels = VRAM_LABELS
    maps_experts = False
    can_shrink = True

    def __init__(self, accelerator: Accelerator, geometry: ExpertGeometry) -> None:
        accelerator.release()
        self.accelerator = accelerator
        self.device = accelerator.device
        self.pages = GpuPages(accelerator, geometry)
        self.far: FarMemory | None = None
        self._steps = FusedSteps()
        if self.device.type != "cpu":  # a test's stand-in, for which the native code is right
            register_codec(self.device.type, DeviceRows())

    def dtype(self, name: str) -> torch.dtype:
        """See :meth:`ModelPlacement.dtype`."""
        dtype: torch.dtype = self.accelerator.dtype if name == "auto" else getattr(torch, name)
        return dtype

    def memory(self, options: LoadOptions) -> GpuMemory:
        """See :meth:`ModelPlacement.memory`."""
        graphs = cuda_graphs_wanted() and not options.deterministic
        return GpuMemory(self.accelerator.context_bytes, graphs, not options.deterministic)

    def budget(self, options: LoadOptions, base: int) -> Budget:
        """See :meth:`ModelPlacement.budget`; warns where less is free than the user gave."""
        free, _ = self.accelerator.memory()
        budget, short = gpu_budget(options.vram, free, base)
        if short:
            warnings.warn(short, MoechatWarning, stacklevel=2)
        return budget

    def reserve(self, plan: MemoryPlan) -> None:
        """See :meth:`ModelPlacement.reserve`; the libraries allocate their part past torch."""
        self.accelerator.limit(plan.budget - plan.base - LIBRARY_BYTES)

    def packed_memory(self, nbytes: int, form: DenseForm, dtype: torch.dtype) -> PackedGpuMemory:
        """See :meth:`ModelPlacement.packed_memory`."""
        with _dense_weights_fit(form):
            return PackedGpuMemory(nbytes, form, dtype, self.device)

    def adopt(
        self, skeleton: Skeleton, form: DenseForm, *, prefetch: Prefetch
    ) -> tuple[NativeModules, Predictor | None]:
        """See :meth:`ModelPlacement.adopt`; scores of routers come to the host with the router's choice."""
        with _dense_weights_fit(form):
            if prefetch in ("next-router", "adaptive"):
                routers = find_routers(skeleton.model, skeleton.experts)
                self.pages.routers = routers_on(routers, self.device)
            if cuda_graphs_wanted():
                # By probes on the CPU: on the GPU they would be launches, and memory.
                self._steps = recognise_steps(skeleton.model)
            # Buffers too: the model makes rotary frequencies and masks on its own device.
            skeleton.model.to(self.device)  # type: ignore[arg-type]
        give_back_unused()
        return NativeModules(), None

    def read_far(
        self,
        store: Store,
        options: LoadOptions,
        activations: npt.NDArray[np.int64] | None,
        progress: ReadProgress,
    ) -> None:
        """See :meth:`ModelPlacement.read_far`; experts that do not fit into memory stay in their files."""
        process = process_bytes()
        found = options.ram
        budget = automatic_budget(available_bytes(), process).nbytes if found is None else found
        layers, experts = len(store.layers), store.geometry.num_experts
        count = experts_held(budget, layers * experts, store.geometry.expert_bytes, process)
        held = choose_experts(layers, experts, count, activations)
        self.far = FarMemory(store, ordinal=self.accelerator.ordinal, held=held, progress=progress)
        if count > 0:
            self.pages.far_records, self.pages.far_experts = self.far.records, self.far.held

    @property
    def in_ram(self) -> float:
        """See :attr:`ModelPlacement.in_ram`."""
        held, experts = self.pages.far_experts, self.pages.geometry.num_experts
        return sum(map(len, held)) / (len(held) * experts) if self.pages.far_records else 0.0

    def open_pages(self, pages: int, config: TierConfig) -> PageMemory:
        """See :meth:`Placement.open_pages`."""
        address = self.pages.open(pages)
        link = open_link(config.store, config.link) if self.far is None else self.far.link(config.link.copies)
        return PageMemory(link, address, self.pages.far_records, self.pages.far_experts)

    def observed(self, before: Costs, observed: Observed) -> Costs | None:
        """See :meth:`Placement.observed`: the GPU's own clocks, since it computes while the host goes on."""
        return observed_on_gpu(before, observed, self.pages.clocks.take())

    def serve(self, settings: Sequence[CacheSettings]) -> None:
        """See :meth:`Placement.serve`."""
        form = RequestForm(0, False)
        for each in settings:
            form = form.union(self.pages.request_form(each))
        self.pages.served = form

    def may_take_turns(self, at_work: CacheSettings, other: CacheSettings) -> bool:
        """See :meth:`Placement.may_take_turns`: the requests of recorded graphs have to serve both."""
        return self.pages.request_form(at_work).serves(self.pages.request_form(other))

    def layer(self, tier: ExpertTier, ordinal: int) -> GpuExpertLayer:
        """See :meth:`Placement.layer`."""
        return GpuExpertLayer(tier, self.pages, ordinal)

    def warm(self, model: PreTrainedModel, top_k: int, dtype: torch.dtype) -> None:
        """See :meth:`ModelPlacement.warm`."""
        self.accelerator.warm(
            [
                *self.pages.first_launches(top_k, dtype),
                *packed_linear.first_launches(model.modules(), dtype),
                *fused_layers.first_launches(self._steps.layers.values(), dtype),
                *fused_feed.first_launches(
                    self._steps.blocks.values(), self._steps.mlps.values(), dtype, self.device
                ),
            ]
        )

    def decoder(
        self,
        model: PreTrainedModel,
        parts: Sequence[nn.Module],
        dtype: torch.dtype,
        notify: Callable[[str], None],
        *,
        graphs: bool,
    ) -> PassDecoder | None:
        """See :meth:`ModelPlacement.decoder`."""
        clocks = self.pages.clocks
        if graphs:
            return GraphDecoder(
                model,
                parts,
                self.accelerator.graphs,
                dtype=dtype,
                clocks=clocks,
                notify=notify,
                run_ahead=run_ahead_wanted(),
                steps=self._steps,
            )

        return _TimedPasses(model, clocks)

    def close_pages(self) -> None:
        """See :meth:`Placement.close_pages`."""
        self.pages.close()
        self.accelerator.release()  # libraries and the driver allocate past torch

    def close(self) -> None:
        """See :meth:`Placement.close`."""
        self._steps = FusedSteps()  # it holds the modules of the model
        if self.far is not None:
            self.far.close()
        self.pages.close()


class _TimedPasses:
    """The model's own passes, some of them timed."""

    def __init__(self, model: PreTrainedModel, clocks: GpuClocks) -> None:
        self._model = model
        self._clocks = clocks

    def lend(self, cache: object) -> None:
        """Does nothing: no recording reads the memory of a cache."""

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        with self._clocks.token(input_ids.shape[1]):
            return self._model(input_ids=input_ids, **arguments)


@contextmanager
def _dense_weights_fit(form: DenseForm) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{format_bytes(form.nbytes)} of dense weights do not fit on the GPU: {error}",
            hint="end other programs that use the GPU",
        ) from error
