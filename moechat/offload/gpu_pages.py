"""Pages in a GPU's memory: the kernels over them, and host memory for the part that the CPU computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.budget.gpu_sizes import FEW_TOKENS, SHARED_TOKENS
from moechat.configurator.systems import CacheSettings, Miss, RequestForm
from moechat.errors import DoesNotFitError
from moechat.geometry import ExpertGeometry
from moechat.offload.accelerator import Accelerator
from moechat.offload.gpu_clocks import GpuClocks
from moechat.offload.kernels.block_list import BlockList, Items, ListMemory
from moechat.offload.kernels.launch import BlockKernels
from moechat.offload.page_lookup import PageLookup


class Ranks(Protocol):
    """A layer's router, as :class:`moechat.models.router_search.Router`."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens, experts]`` for hidden states ``[tokens, hidden]``, on their device."""
        ...


class GpuPages:
    """Pages on a GPU, and everything that its expert layers share.

    Args:
        accelerator: The GPU.
        geometry: Shape and encoding of the experts.
        routers: Router of each expert layer, on the GPU, for prediction; ``None``: that layer is not
            predicted.

    Attributes:
        memory: uint8 ``[pages, record_bytes]``; empty while no pages are open.
        lists: Lists of blocks that host and GPU share.
        far_records: Records of each layer in host memory; empty: the CPU computes none of them.
        clocks: Times of decoded tokens.
        served: What requests contain besides what the settings at work need, so that other settings can take
            turns with them.
        far_experts: int32 of each layer: the experts that these are of.
        lookup: Where the GPU looks the blocks up; ``None``: it does not.
    """

    def __init__(
        self, accelerator: Accelerator, geometry: ExpertGeometry, routers: Sequence[Ranks | None] = ()
    ) -> None:
        self.accelerator = accelerator
        self.geometry = geometry
        self.routers = routers
        self._kernels: dict[object, BlockKernels] = {}
        self.lists = ListMemory(geometry, accelerator)
        self.memory = torch.empty(0)
        self.far_records: Sequence[npt.NDArray[np.uint8]] = ()
        self.clocks = GpuClocks(accelerator.mark, accelerator.passed, accelerator.seconds_between)
        self.served = RequestForm(0, False)
        self.far_experts: Sequence[npt.NDArray[np.int32]] = ()
        self.lookup: PageLookup | None = None
        self._far_out: torch.Tensor | None = None
        self._far_there: torch.Tensor | None = None

    def kernels_of(self, ordinal: int) -> BlockKernels:
        """Kernels of expert layer ``ordinal``; layers with the same encodings and gate share them."""
        kind = self._kind(ordinal)
        if kind not in self._kernels:
            accelerator = self.accelerator
            self._kernels[kind] = BlockKernels(self.geometry, accelerator.device, ordinal, accelerator.stream)
        return self._kernels[kind]

    def differing_layers(self) -> list[int]:
        """One expert layer for every kind of kernels."""
        layers = max(1, len(self.geometry.kept), len(self.geometry.layer_gates))
        return list({self._kind(ordinal): ordinal for ordinal in range(layers)}.values())

    def _kind(self, ordinal: int) -> object:
        geometry = self.geometry
        return geometry.kept[ordinal] if geometry.kept else None, geometry.gate_of(ordinal)

    def open(self, pages: int) -> int:
        """Allocate pages; returns their address.

        Raises:
            DoesNotFitError: The GPU has not so much memory.
        """
        try:
            self.memory = self.accelerator.pages(pages, self.geometry.record_bytes)
        except (torch.OutOfMemoryError, _native.CudaError) as error:
            raise DoesNotFitError(
                f"{pages} pages of experts cannot be made on the GPU: {error}",
                hint="give a smaller --vram (vram=), or end other programs that use the GPU",
            ) from error
        return self.memory.data_ptr()

    def close(self) -> None:
        """Give the pages back to torch's allocator."""
        self.memory = torch.empty(0)
        self.lookup = None

    def miss(self, settings: CacheSettings, tokens: int) -> Miss:
        """Treatment of the blocks that a pass of so many tokens misses."""
        return settings.miss if self.far_records and tokens <= SHARED_TOKENS else "fetch"

    def request_form(self, settings: CacheSettings) -> RequestForm:
        """See :meth:`CacheSettings.request_form`."""
        return settings.request_form(predicts=bool(self.routers), far_computes=bool(self.far_records))

    def recorded_form(self, planned: CacheSettings, wanted: CacheSettings, *, all_fit: bool) -> RequestForm:
        """What recorded requests contain.

        Args:
            planned: The settings that the targets were planned for.
            wanted: The settings at work.
            all_fit: Every block of the model has a page: nothing is fetched ahead, or computed by the CPU.
        """
        if all_fit:
            return RequestForm(0, inputs=False)
        form = self.request_form(planned)
        if not form.serves(self.request_form(wanted)):
            form = self.request_form(wanted)
        return form.union(self.served)

    def far_out(self, tokens: int) -> torch.Tensor:
        """Memory for the CPU's part of a layer, float32 ``[tokens, hidden]``.

        All layers use the same: a layer's part has been copied to the GPU when the choice of the next
        layer's router arrives, since that comes after it in the stream.
        """
        if self._far_out is None or len(self._far_out) < tokens:
            self._far_out = self.accelerator.host_memory(tokens, self.geometry.hidden_size)
        return self._far_out[:tokens]

    def far_there(self) -> torch.Tensor:
        """Memory of the GPU for the CPU's part of a layer of one token, float32 ``[1, hidden]``."""
        if self._far_there is None:
            _, there = self.accelerator.list_memory(self.geometry.hidden_size)
            self._far_there = there.view(torch.float32)[None]
        return self._far_there

    def first_launches(
        self, top_k: int, dtype: torch.dtype, passes: Sequence[int] = (1, FEW_TOKENS + 1, 64)
    ) -> list[Callable[[], None]]:
        """Launches of every kernel of a decoded token and of a prompt, so that they are built; what they
        compute means nothing.

        Args:
            top_k: Experts of a token.
            dtype: Type of the hidden states.
            passes: Tokens of the passes.
        """
        return [
            partial(self._launch_first, kernels, tokens, top_k, dtype)
            for tokens in passes
            for kernels in map(self.kernels_of, self.differing_layers())
        ]

    def _launch_first(self, kernels: BlockKernels, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        device = self.accelerator.device
        rows = min(top_k, self.geometry.num_experts)
        # Every token chooses the same experts, whose first blocks lie in the first page.
        places, none = np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32)
        token, ends = np.tile(np.arange(tokens, dtype=np.int32), rows), places * tokens
        items = Items.build(ends, token, np.ones(rows * tokens, np.float32), tokens, device)
        blocks = BlockList.build(none, places, none, ends, device)
        x = torch.zeros(tokens, self.geometry.hidden_size, dtype=dtype, device=device)
        partial_sums = kernels.partials(items, dtype)
        kernels.add(self.memory, blocks, items, x, partial_sums)
        for others in (None, torch.zeros_like(x, dtype=torch.float32)):
            kernels.combine(partial_sums, items, torch.empty_like(x), others)


def routers_on(routers: Sequence[Any], device: torch.device) -> list[Ranks | None]:
    """Copies of routers on a device.

    Args:
        routers: From :func:`moechat.models.router_search.find_routers`.
        device: Device of the copies.
    """

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    return [
        None
        if router is None
        else replace(
            router,
            weight=router.weight.to(device),
            bias=moved(router.bias),
            correction=moved(router.correction),
        )
        for router in routers
    ]
