"""Expert layers over pages in a GPU's memory.

A layer of a decoded token: one small copy brings the router's choice (and the scores of the next layer's
router) to the host; the native runner decides; kernels over the resident blocks are launched, then those over
the blocks in flight, which the GPU holds back until their copies are done. The host waits for nothing else.

Hybrid execution: where the experts lie in memory, the CPU computes a part of the missing ones while the link
brings the rest (``native/src/offload/far_share.h``). Its inputs come with the router's choice, and its part
of the sum goes to the GPU in one copy.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moechat.budget.gpu_sizes import WORK_PAIRS
from moechat.configurator.systems import RequestForm
from moechat.models.decode.routers import Rule
from moechat.models.router_search import Router, Scoring
from moechat.offload.gpu_pages import GpuPages, Ranks
from moechat.offload.kernels import routing
from moechat.offload.tier import ExpertTier


@dataclass(frozen=True)
class ExpertRequest:
    """The inputs of the experts of a layer, on the GPU.

    Attributes:
        x: ``[tokens, hidden]``.
        packed: int32: the experts that each token chose, their weights' bits, the bits of the scores of every
            place, and if ``inputs`` the bits of ``x`` in float32.
        chosen: Number of (token, expert) pairs.
        places: The layers that the scores are for: distance and ordinal.
        inputs: The CPU may compute a part.
        landed: Host memory that a recorded pass copies ``packed`` to; ``None``: nothing does.
    """

    x: torch.Tensor
    packed: torch.Tensor
    chosen: int
    places: tuple[tuple[int, int], ...]
    inputs: bool
    landed: torch.Tensor | None = None


class Capture(Protocol):
    """Records a pass without its experts; see :mod:`moechat.offload.graph_decoder`.

    Attributes:
        form: What the requests contain; it serves the settings of the tier.
        fused: Kernels of ours make the requests, in one launch.
    """

    form: RequestForm
    fused: bool

    def cut(self, ordinal: int, request: ExpertRequest) -> torch.Tensor:
        """Memory for the sum of the experts of layer ``ordinal``, ``[tokens, hidden]``."""
        ...


@dataclass
class GpuExpertLayer:
    """The routed experts of one decoder layer, over pages in a GPU's memory.

    Attributes:
        tier: The tier of the model.
        pages: Its pages.
        ordinal: Number among the expert layers.
        capture: Records the current pass; ``None``: it is not recorded.
    """

    tier: ExpertTier
    pages: GpuPages
    ordinal: int
    capture: Capture | None = None

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts; see :meth:`moechat.offload.experts.ExpertLayer.forward`.

        The sum of a token is in float32, its experts in ascending order, each a few chains of blocks in
        ascending order: it does not depend on the budget, or on the resident blocks. The CPU's part, where
        there is one, is added last, and the last bits depend on the division of the blocks.

        Raises:
            LinkError: A block cannot be read, or nothing has arrived for the link's stall limit.
            DeviceLostError: The GPU has failed.
        """
        request = self._request(hidden, top_k_index, top_k_weights)
        return self.answer(request) if self.capture is None else self.capture.cut(self.ordinal, request)

    def forward_routed(
        self, hidden: torch.Tensor, logits: torch.Tensor, rule: Rule, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """As :meth:`forward`, of what a router chooses; REQUIRES: a pass is recorded by kernels of ours.

        Args:
            hidden: ``[1, hidden]``, contiguous.
            logits: The router's, ``[1, experts]``, contiguous.
            rule: What it computes, but for the correction.
            correction: ``[experts]``, contiguous, or ``None``.
        """
        assert self.capture is not None
        routers, places, inputs = self._asked(1)
        ranks = _launched(routers, hidden)
        if ranks is None:
            weights, index = routing.route(logits, rule, correction)
            return self.forward(hidden, index, weights)
        packed = routing.routed_request(hidden, logits, rule, correction, ranks, inputs=inputs)
        request = ExpertRequest(hidden, packed, rule.chosen, places, inputs)
        return self.capture.cut(self.ordinal, request)

    def _request(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> ExpertRequest:
        x = hidden.detach().contiguous()
        routers, places, inputs = self._asked(len(x))
        packed = self._packed(x, top_k_index, top_k_weights.detach(), routers, inputs)
        return ExpertRequest(x, packed, top_k_index.numel(), places, inputs)

    def _asked(self, tokens: int) -> tuple[list[Ranks], tuple[tuple[int, int], ...], bool]:
        """Routers whose scores the host wants, their places, and whether it wants the inputs."""
        settings = self.tier.settings
        if self.capture is not None:
            form = self.capture.form
            ahead, inputs = form.ahead, form.inputs
        else:
            ahead = settings.predicted_layers
            inputs = self.pages.miss(settings, tokens) != "fetch"
        routers = self._routers(tokens, ahead)
        places = tuple((distance, layer) for distance, layer, _ in routers)
        return [router for _, _, router in routers], places, inputs

    def _packed(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        routers: Sequence[Ranks],
        inputs: bool,
    ) -> torch.Tensor:
        """The words of a request."""
        if self.capture is not None and self.capture.fused:
            ranks = _launched(routers, x)
            if ranks is not None and routing.serves_request(x, top_k_index, top_k_weights):
                return routing.request(x, top_k_index, top_k_weights, ranks, inputs=inputs)
        parts = [
            top_k_index.to(torch.int32),
            top_k_weights.to(torch.float32),
            *(one.scores(x[-1:])[0] for one in routers),
            *([x.to(torch.float32)] if inputs else []),
        ]
        return torch.cat([part.reshape(-1).view(torch.int32) for part in parts])

    def _routers(self, tokens: int, ahead: int) -> list[tuple[int, int, Ranks]]:
        """Distance and ordinal of the next ``ahead`` layers, and what ranks their experts."""
        routers = self.pages.routers
        if ahead == 0 or not routers:
            return []
        found = []
        for distance, layer in self.tier.ranked_layers(self.ordinal, tokens, ahead):
            router = routers[layer]
            if router is not None:
                found.append((distance, layer, router))
        return found

    def answer(
        self,
        request: ExpertRequest,
        into: torch.Tensor | None = None,
        packed: npt.NDArray[np.int32] | None = None,
    ) -> torch.Tensor:
        """Sum of the experts of a request, ``[tokens, hidden]``; raises as :meth:`forward`.

        Args:
            request: The inputs.
            into: Memory for the sum; ``None`` allocates it.
            packed: The words of the request's, and perhaps more, in host memory; ``None``: they are copied.
        """
        tier, tokens, chosen = self.tier, len(request.x), request.chosen
        self.pages.clocks.begin_layer()
        if packed is None:
            accelerator = self.pages.accelerator
            landed = request.landed
            packed = accelerator.to_host(request.packed) if landed is None else accelerator.arrived(landed)
        packed = packed[: request.packed.numel()]
        index, weight = packed[:chosen], packed[chosen : 2 * chosen]
        experts = tier.geometry.num_experts
        scores = list(packed[2 * chosen :][: experts * len(request.places)].reshape(-1, experts))
        miss = self.pages.miss(tier.settings, tokens) if request.inputs else "fetch"
        picks = index.reshape(tokens, -1).astype(np.int64)
        if tier.replay is not None:
            picks = tier.replay.route(self.ordinal, tokens)
        weights = weight.view(np.float32).reshape(tokens, -1)
        tier.runner.begin(self.ordinal, picks, weights, miss)
        wanted = self._wanted(tokens)
        for (ahead, layer), score in zip(request.places, scores, strict=True):
            if ahead in wanted:
                tier.prefetch_ranked(ahead, layer, score.view(np.float32))
        tier.prefetch(self.ordinal, request.x, picks, weights)
        return self.answer_begun(request, packed, picks.size, into)

    def answer_begun(
        self,
        request: ExpertRequest,
        packed: npt.NDArray[np.int32],
        activations: int,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        """As :meth:`answer`, of a layer that has begun in the runner, with its prefetches.

        Args:
            request: The inputs.
            packed: As :meth:`answer`.
            activations: Pairs of a token and an expert.
            into: As :meth:`answer`.
        """
        tokens = len(request.x)
        inputs = None
        if request.inputs and self.pages.miss(self.tier.settings, tokens) != "fetch":
            rest = 2 * request.chosen + self.tier.geometry.num_experts * len(request.places)
            inputs = packed[rest : request.packed.numel()].view(np.float32).reshape(tokens, -1)
        return self._compute(request.x, activations, inputs, into)

    def _wanted(self, tokens: int) -> Container[int]:
        """Distances of the layers whose scores are used: a recorded pass may bring more."""
        settings = self.tier.settings
        if settings.prefetch == "adaptive" and tokens == 1:
            return {ahead for ahead, _ in self.tier.runner.adaptive_layers()}
        return range(1, settings.predicted_layers + 1)

    def _compute(
        self,
        x: torch.Tensor,
        activations: int,
        inputs: npt.NDArray[np.float32] | None,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        tier, pages, tokens = self.tier, self.pages, len(x)
        # Read once: another thread may close the tier, and kernels read these pages until the pass is over.
        kernels, accelerator = pages.kernels_of(self.ordinal), pages.accelerator
        memory, lists = pages.memory, pages.lists
        clocks, record_bytes = pages.clocks, pages.geometry.record_bytes
        items = lists.begin(tier.runner, tokens, activations // max(1, tokens))
        partial = kernels.partials(items, x.dtype)
        far_out = None
        if inputs is not None:
            far_out = pages.far_out(tokens)
        # The CPU may compute all blocks of an expert; the first launch clears the outputs without blocks.
        clear = inputs is not None

        def launch(begin: int, end: int, entries: int, rows: int, slots: int) -> int:
            nonlocal clear
            blocks = lists.blocks(begin, end, entries, rows, slots)
            accelerator.before_kernels()
            clocks.begin_launch(entries * record_bytes)
            kernels.add(memory, blocks, items, x, partial, clear=clear)
            clocks.end_launch()
            clear = False
            return lists.next(end)

        tier.counters.bytes_read += tier.runner.finish_on_device(
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
        if clear:
            partial.zero_()
        tier.counters.activations += activations
        out = torch.empty_like(x) if into is None else into
        others = None
        if far_out is not None and tier.runner.far_blocks():
            others = accelerator.to_device(far_out)
        accelerator.before_kernels()
        kernels.combine(partial, items, out, others)
        clocks.end_layer()
        return out


def _launched(routers: Sequence[Ranks], x: torch.Tensor) -> list[routing.Ranks] | None:
    """Routers as kernels of ours take them; ``None``: they cannot compute the scores of ``x``."""
    found = []
    for router in routers:
        if not isinstance(router, Router) or router.weight.device != x.device:
            return None
        if router.weight.shape[1] != x.shape[1]:
            return None
        if router.correction is not None and router.scoring is Scoring.SOFTMAX:
            return None
        sigmoid = router.scoring is Scoring.SIGMOID
        found.append(routing.Ranks(router.weight, router.bias, sigmoid, router.correction))
    return found
