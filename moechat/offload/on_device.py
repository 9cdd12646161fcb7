"""The near tier in a card's memory, and the expert layers over it.

A layer of a decoded token: one small copy brings the router's choice (and the scores of the next layer's
router) to the host; the native runner decides; kernels over the resident blocks are launched, then those over
the blocks on their way, which the card holds back until their copies are done. Nothing else is waited for.

Hybrid execution: where the experts lie in memory, the CPU computes a part of what is missing while the link
brings the rest (``native/src/offload/far_share.h``). Its inputs come with the router's choice, and its part
of the sum goes to the card in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.configurator.systems import CacheSettings, Miss
from moechat.errors import DoesNotFitError
from moechat.offload.accelerator import Accelerator
from moechat.offload.cached import MIN_PAGES, NearTier
from moechat.offload.experts import ExpertCounters
from moechat.offload.far_memory import FarMemory
from moechat.offload.kernels.block_list import BlockList, Items, ListMemory
from moechat.offload.kernels.launch import FEW_TOKENS, BlockKernels
from moechat.offload.planner import Knowledge
from moechat.offload.settings import LinkSettings
from moechat.routing import Replay
from moechat.store.store import Store

# (token, block) pairs of one launch: their activations take at most 64 MiB.
WORK_PAIRS = 1 << 18
PAIR_BYTES = 64 * 4
# Passes of more tokens leave the CPU nothing to compute: nearly all experts have too many of them.
SHARED_TOKENS = 256


class Ranks(Protocol):
    """A layer's router, as :class:`moechat.models.routers.Router`."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens, experts]`` for hidden states ``[tokens, hidden]``, on their device."""
        ...


class DeviceTier(NearTier):
    """Pages in a card's memory, the experts in the host's.

    Args:
        store: Where the experts lie.
        accelerator: The card.
        far: Where its link reads from; ``None``: a simulated link.
        owns_far: Close ``far`` with this.
        pages: Pages of one block record each.
        top_k: Experts that the model's routers choose for a token.
        settings: What is kept and what is fetched ahead.
        link: A simulated link in place of the card's, and how long nothing may arrive.
        routers: Of each expert layer, on the card, for prediction; ``None``: that layer is not predicted.
        replay: Chooses the experts in place of the routers.
        counters: Of the engine.
        knowledge: As :class:`NearTier`.
        activation_bits: As :class:`NearTier`, for what the CPU computes.

    Raises:
        UsageError, DoesNotFitError, MoechatError: As :class:`NearTier`.
    """

    def __init__(
        self,
        store: Store,
        accelerator: Accelerator,
        far: FarMemory | None,
        *,
        owns_far: bool = True,
        pages: int,
        top_k: int,
        settings: CacheSettings,
        link: LinkSettings | None = None,
        routers: Sequence[Ranks | None] = (),
        replay: Replay | None = None,
        counters: ExpertCounters | None = None,
        knowledge: Knowledge | None = None,
        activation_bits: int = 16,
    ) -> None:
        self.accelerator = accelerator
        self.far = far
        self._owns_far = owns_far
        self.kernels = BlockKernels(store.geometry, accelerator.device)
        self.lists = ListMemory(store.geometry, accelerator.device, accelerator.finish_stream)
        self._routers = routers
        self._rest: dict[str, Any] = {
            "store": store,
            "top_k": top_k,
            "link": link,
            "replay": replay,
            "counters": counters,
            "knowledge": knowledge,
            "activation_bits": activation_bits,
        }
        try:
            self._make(pages, settings)
        except BaseException:
            if far is not None and owns_far:
                far.close()
            raise

    def _make(self, pages: int, settings: CacheSettings) -> None:
        store: Store = self._rest["store"]
        try:
            self.memory = self.accelerator.pages(pages, store.geometry.record_bytes)
            source = None if self.far is None else self.far.link()
            self._far_records = [] if self.far is None else self.far.records()
            self._far_out: torch.Tensor | None = None
        except (torch.OutOfMemoryError, _native.CudaError) as error:
            raise DoesNotFitError(
                f"{pages} pages of experts cannot be made on the graphics card: {error}",
                hint="give a smaller --vram (vram=), or end other programs that use the card",
            ) from error
        super().__init__(
            pages=pages,
            settings=settings,
            near_memory=self.memory.data_ptr(),
            source=source,
            far_records=self._far_records,
            **self._rest,
        )

    def miss(self, tokens: int) -> Miss:
        """What becomes of blocks that a pass of so many tokens misses."""
        return self.settings.miss if self._far_records and tokens <= SHARED_TOKENS else "fetch"

    def far_out(self, tokens: int) -> torch.Tensor:
        """Memory for the CPU's part of a layer, float32 ``[tokens, hidden]``.

        The same for every layer: what a layer left here has been copied to the card when the next one's
        router has spoken, since that comes after it in the stream.
        """
        if self._far_out is None or len(self._far_out) < tokens:
            self._far_out = self.accelerator.host_memory(tokens, self.geometry.hidden_size)
        return self._far_out[:tokens]

    def warm(self, dtype: torch.dtype) -> None:
        """Build the kernels of a decoded token and of a prompt; what they compute means nothing.

        Args:
            dtype: Of the hidden states.

        Raises:
            DeviceUnavailableError: They cannot be built.
        """
        self.accelerator.warm(lambda: self._launch_all(dtype))

    def _launch_all(self, dtype: torch.dtype) -> None:
        device = self.accelerator.device
        rows = min(self.top_k, self.geometry.num_experts)
        places = np.arange(rows + 1, dtype=np.int32)
        for tokens in (1, FEW_TOKENS + 1, 64):
            # Every token chooses the same experts, whose first blocks lie in the first page.
            token = np.tile(np.arange(tokens, dtype=np.int32), rows)
            ends = places * tokens
            items = Items.build(ends, token, np.ones(rows * tokens, np.float32), tokens, device)
            x = torch.zeros(tokens, self.geometry.hidden_size, dtype=dtype, device=device)
            partial = self.kernels.partials(items, dtype)
            none = np.zeros(rows, np.int32)
            self.kernels.add(
                self.memory, BlockList.build(none, places, none, ends, device), items, x, partial
            )
            for others in (None, torch.zeros_like(x, dtype=torch.float32)):
                self.kernels.combine(partial, items, torch.empty_like(x), others)

    def shrink(self, share: float) -> int:
        """Give pages back to the card's memory; what they all held has to be fetched anew.

        Args:
            share: Of the pages.

        Returns:
            Bytes that were given back; 0, and nothing has changed, when there are no fewer pages to be had.
        """
        before = self.pages
        after = max(MIN_PAGES, int(before * (1 - share)))
        if after >= before:
            return 0
        settings = self.settings
        self._rest["counters"] = self.counters
        self.runner.close()
        self.memory = torch.empty(0)
        self.accelerator.release()  # libraries and the driver take memory past torch
        self._make(after, settings)
        return (before - after) * self.geometry.record_bytes

    @property
    def clocked(self) -> bool:
        """A card computes while the host does something else: the runner's clocks say nothing of it."""
        return False

    def layer(self, ordinal: int) -> DeviceExpertLayer:
        """Expert layer ``ordinal`` (0 is the first layer that has experts)."""
        if not 0 <= ordinal < self.layers:
            raise IndexError(f"there are {self.layers} expert layers, and no number {ordinal}")
        return DeviceExpertLayer(self, ordinal)

    def ranked(self, ordinal: int, hidden: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """What a layer's hidden states say of layers to come: how far ahead, layer, scores ``[experts]``."""
        if self.settings.prefetch != "next-router" or not self._routers:
            return []
        found = []
        for ahead, layer in self.ahead[ordinal]:
            router = self._routers[layer]
            if router is not None:
                found.append((ahead, layer, router.scores(hidden[-1:])[0]))
        return found

    def give_up(self) -> FarMemory | None:
        """Close all but what the link reads from, which is the caller's from now on."""
        self._owns_far = False
        self.close()
        return self.far

    def close(self) -> None:
        """Stop the link and give the memory back; harmless when repeated."""
        super().close()
        if self.far is not None and self._owns_far:
            self.far.close()
        self.memory = torch.empty(0)


@dataclass(frozen=True)
class Asked:
    """What the experts of a layer are asked, on the card.

    Attributes:
        x: ``[tokens, hidden]``.
        packed: int32: the experts that each token chose, their weights' bits, the bits of the scores of every
            place, and where the CPU may compute a part the bits of ``x`` in float32.
        chosen: How many (token, expert) pairs there are.
        places: Layers to come that scores are for: how far ahead, and which.
    """

    x: torch.Tensor
    packed: torch.Tensor
    chosen: int
    places: tuple[tuple[int, int], ...]


class Capture(Protocol):
    """Records a pass and not its experts; see :mod:`moechat.offload.graph_decoder`."""

    def cut(self, ordinal: int, asked: Asked) -> torch.Tensor:
        """Where the experts of layer ``ordinal`` will have put their sum, ``[tokens, hidden]``."""
        ...


@dataclass
class DeviceExpertLayer:
    """The routed experts of one decoder layer, over pages in a card's memory.

    Attributes:
        near: Shared by all layers of an engine.
        ordinal: Number among the expert layers.
        capture: Records the pass that is under way; ``None``: none does.
    """

    near: DeviceTier
    ordinal: int
    capture: Capture | None = None

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts; as :meth:`moechat.offload.experts.ExpertLayer.forward`.

        The sum of a token is one of float32, its experts in ascending order, each a few chains of blocks in
        ascending order: it does not depend on the budget, or on what is resident. Where the CPU computes a
        part, that is added last, and the last bits depend on who had time for which blocks.

        Raises:
            LinkError: A block cannot be read, or nothing has arrived for the link's stall limit.
            DeviceLostError: The card has failed.
        """
        asked = self._ask(hidden, top_k_index, top_k_weights)
        return self.answer(asked) if self.capture is None else self.capture.cut(self.ordinal, asked)

    def _ask(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Asked:
        near = self.near
        x = hidden.detach().contiguous()
        alone = len(x) == 1 or self.ordinal == near.layers - 1
        ranked = near.ranked(self.ordinal, x) if alone else []
        parts = [
            top_k_index.to(torch.int32),
            top_k_weights.detach().to(torch.float32),
            *(score for _, _, score in ranked),
            *([x.to(torch.float32)] if near.miss(len(x)) != "fetch" else []),
        ]
        return Asked(
            x,
            torch.cat([part.reshape(-1).view(torch.int32) for part in parts]),
            top_k_index.numel(),
            tuple((ahead, layer) for ahead, layer, _ in ranked),
        )

    def answer(self, asked: Asked, into: torch.Tensor | None = None) -> torch.Tensor:
        """Sum of the experts that were asked for, ``[tokens, hidden]``; raises as :meth:`forward`.

        Args:
            asked: What they are asked.
            into: Where it goes; ``None``: into memory of its own.
        """
        near, tokens, chosen = self.near, len(asked.x), asked.chosen
        packed = near.accelerator.to_host(asked.packed)
        index, weight = packed[:chosen], packed[chosen : 2 * chosen]
        experts = near.geometry.num_experts
        rest = 2 * chosen + experts * len(asked.places)
        scores = list(packed[2 * chosen : rest].reshape(-1, experts))
        miss = near.miss(tokens)
        inputs = None if miss == "fetch" else packed[rest:].view(np.float32).reshape(tokens, -1)
        picks = index.reshape(tokens, -1).astype(np.int64)
        if near.replay is not None:
            picks = near.replay.route(self.ordinal, tokens)
        near.runner.begin(self.ordinal, picks, weight.view(np.float32).reshape(tokens, -1), miss)
        self._prefetch(asked.x, asked.places, scores)
        return self._compute(asked.x, picks.size, inputs, into)

    def _compute(
        self,
        x: torch.Tensor,
        activations: int,
        inputs: npt.NDArray[np.float32] | None,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        near, tokens = self.near, len(x)
        # Once: another thread may close the tier, and kernels read these pages until the pass is over.
        kernels, accelerator, memory, lists = near.kernels, near.accelerator, near.memory, near.lists
        items = lists.begin(near.runner, tokens, activations // max(1, tokens))
        partial = kernels.partials(items, x.dtype)
        far_out = None
        if inputs is not None:
            far_out = near.far_out(tokens)
            partial.zero_()  # an expert may have no block here

        def launch(begin: int, end: int, entries: int, rows: int, slots: int) -> int:
            accelerator.before_kernels()
            kernels.add(memory, lists.blocks(begin, end, entries, rows, slots), items, x, partial)
            return lists.next(end)

        near.counters.bytes_read += near.runner.finish_on_device(
            accelerator.stream(),
            tokens,
            WORK_PAIRS,
            lists.host,
            lists.first,
            launch,
            x=inputs,
            out=None if far_out is None else far_out.numpy(),
        )
        lists.finish()
        near.counters.activations += activations
        out = torch.empty_like(x) if into is None else into
        others = None
        if far_out is not None and near.runner.far_blocks():
            others = accelerator.to_device(far_out)
        kernels.combine(partial, items, out, others)
        return out

    def _prefetch(
        self, x: torch.Tensor, places: Sequence[tuple[int, int]], scores: Sequence[npt.NDArray[np.int32]]
    ) -> None:
        near = self.near
        if near.settings.prefetch == "none" or near.prefetch_whole(self.ordinal, len(x)):
            return
        for (ahead, layer), score in zip(places, scores, strict=True):
            near.prefetch_ranked(ahead, layer, score.view(np.float32))
        if near.predictor is None or (len(x) > 1 and self.ordinal < near.layers - 1):
            return
        # A perfect one reads a trace, and nothing on the card.
        for ahead, layer in near.ahead[self.ordinal]:
            known = near.predictor.scores(self.ordinal, ahead, x[-1:])
            if known is not None:
                near.prefetch_ranked(ahead, layer, known)


def routers_on(routers: Sequence[Any], device: torch.device) -> list[Ranks | None]:
    """Copies of routers on a device.

    Args:
        routers: From :func:`moechat.models.routers.find_routers`.
        device: Where they go.
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
