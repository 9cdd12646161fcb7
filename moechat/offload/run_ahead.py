"""Decoded tokens whose experts the GPU looks up by itself, so that it need not wait for the host.

The expert layers of a token are recorded too: a lookup of the blocks in the table of pages
(:mod:`moechat.offload.page_lookup`), the kernels over them, and a report in the host's memory.

- Where every block of the model is on the GPU, a token is two graphs: all layers, and the head, during which
  the host reads the reports. No layer costs the host anything. This is the default where every block has a
  page (:func:`moechat.configurator.gpu_pattern.runs_ahead`); loading then fills the pages.
- Else, and only with ``MOECHAT_RUN_AHEAD=1``, the GPU runs up to :data:`DEPTH` layers ahead of the host, past
  layers that lately lacked nothing. The
  host reads a layer's report while the GPU computes the next one. If a block was missing, the layers behind
  it have computed nothing that counts: they find the mark of the missing block and launch no product over
  blocks, and what they wrote (attention keys and values of this position, their own tensors) is written
  again. The host computes the layer as without this module, and continues from there.
- A layer that lately lacked something in one of four tokens or more is not run ahead of: it costs what it
  did before.

Decisions do not depend on who computed a layer: the host accounts for layers in their order, by the same
code (``native/src/offload/runner_ahead.cc``). They may come later than the GPU's reading of the table, so
pages are refilled behind the kernels that may read them (``native/src/offload/page_table.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from moechat.offload.gpu_layer import ExpertRequest, GpuExpertLayer
from moechat.offload.graphs import Graph, Graphs
from moechat.offload.kernels.triton_lookup import MISSING
from moechat.offload.page_lookup import CAPACITY, SLOTS, PageLookup
from moechat.offload.tier import ExpertTier

# Layers that the GPU runs ahead of the host. One would leave the GPU idle where the dense part of a layer is
# shorter than the host's part; each more is wasted at a missing block.
DEPTH = 2
# Share of the tokens in which a layer has to lack nothing. One that lacks a block costs the dense part of the
# layers behind it, for nothing; one that lacks none saves the host's part, which takes about as long as that
# of one layer.
LEAST_SHARE = 0.75


def can_run_ahead(layers: Sequence[GpuExpertLayer], requests: Sequence[ExpertRequest]) -> bool:
    """Whether a GPU can look up the experts of these layers: of one token, chosen by routers on the GPU, with
    copies into pages that the GPU orders.
    """
    tier = layers[0].tier
    return (
        _routed(tier)
        and len({request.chosen for request in requests}) == 1
        and all(len(request.x) == 1 for request in requests)
        and tier.runner.keep_page_table(LEAST_SHARE)
    )


class RunAhead:
    """Recorded expert layers of one recording of the model.

    Args:
        layers: The expert layers.
        requests: Their requests, in the recording's memory.
        sums: Memory for their sums.
        graphs: Makes graphs in other memory than those of the recording; recording is possible on the
            current stream.

    Attributes:
        missed: Layers of all tokens so far that were run ahead of and lacked a block.
        repeated: Parts between expert layers that were replayed again, since they ran behind such a layer.

    Raises:
        torch.OutOfMemoryError: Too little memory.
        Exception: Something cannot be recorded or built.
    """

    def __init__(
        self,
        layers: Sequence[GpuExpertLayer],
        requests: Sequence[ExpertRequest],
        sums: Sequence[torch.Tensor],
        graphs: Graphs,
    ) -> None:
        self.missed = self.repeated = 0
        self._tier = layers[0].tier
        self._pages = layers[0].pages
        self._runner = self._tier.runner
        self._picks = requests[0].chosen
        self._lookup = _lookup_for(layers, self._picks)
        self._all_fit = self._tier.pages >= self._tier.blocks
        self._layers = layers
        self._requests = requests
        self._sums = sums
        accelerator = self._pages.accelerator
        words = max(request.packed.numel() for request in requests)
        # The last word says whether a block is missing.
        reports = accelerator.host_memory(len(layers), -(-(words + 1) // 4) * 4).view(torch.int32)
        self._reports = list(reports)
        self._seen: npt.NDArray[np.int32] = reports.numpy()
        self._places = _places(requests)
        self._points = [accelerator.point() for _ in range(DEPTH)]
        # Kernels are built before they are recorded.
        self._lookup.refuse_all()
        for ordinal in self._pages.differing_layers():
            self.launch(ordinal, requests[ordinal], sums[ordinal])
        self._lookup.launch_changes(self._lookup.fill(0, clear=True))
        accelerator.finish_stream()
        self._changes = [
            _recorded(graphs, partial(self._lookup.launch_changes, slot)) for slot in range(SLOTS)
        ]
        self._experts = [
            _recorded(graphs, partial(self.launch, ordinal, request, total))
            for ordinal, (request, total) in enumerate(zip(requests, sums, strict=True))
        ]

    def serves(self) -> bool:
        """Whether the recorded kernels read the pages that the tier has now, for routers' choices."""
        return (
            _routed(self._tier)
            and self._lookup is self._pages.lookup
            and self._lookup.fits(self._tier.runner, self._pages.memory.data_ptr(), self._picks)
        )

    def launch(self, ordinal: int, request: ExpertRequest, total: torch.Tensor) -> None:
        """Launch the experts of a layer, to be recorded.

        Args:
            ordinal: The layer.
            request: Its request.
            total: Memory for its sum, ``[1, hidden]``: zeros where a block is missing.
        """
        lookup, kernels = self._lookup, self._pages.kernels_of(ordinal)
        lookup.launch(ordinal, request.packed, self._reports[ordinal])
        parts = kernels.partials(lookup.items, request.x.dtype)
        kernels.add(self._pages.memory, lookup.blocks, lookup.items, request.x, parts)
        kernels.combine(parts, lookup.items, total)

    def replay(self, pieces: Sequence[Graph]) -> None:
        """Replay a token.

        Args:
            pieces: Graphs of the parts before, between and after the expert layers. They keep what lives from
                one to another, so that each can be replayed again.

        Raises:
            Exception: Any error of an expert layer; the token is to be replayed again.
        """
        layers, runner = self._layers, self._runner
        pieces[0].replay()
        seen = launched = 0
        while seen < len(layers):
            while launched < len(layers) and launched - seen < DEPTH and self._launched(launched, seen):
                launched += 1
                pieces[launched].replay()
            packed = None
            if launched > seen:
                self._points[seen % DEPTH].synchronize()
                report = self._seen[seen]
                if report[-1] != MISSING:
                    if launched == seen + 1:
                        self._lookup.marked = False
                        runner.end_ahead()
                    self._account(seen, 1)
                    seen += 1
                    continue
                # The layers behind it find the mark of the missing block, and read no page.
                runner.end_ahead()
                self.missed += 1
                self.repeated += launched - seen
                packed = report
            layers[seen].answer(self._requests[seen], self._sums[seen], packed)
            seen += 1
            pieces[seen].replay()
            launched = seen

    def _launched(self, layer: int, seen: int) -> bool:
        """Launch the experts of a layer, if that pays before the host has seen layer ``seen``."""
        changes = self._lookup.next_changes()
        count = self._runner.look_ahead(layer, self._pages.accelerator.stream(), changes)
        if count < 0:
            return False
        # None is under way: the mark is that of an earlier layer.
        clear = self._lookup.marked and layer == seen
        if count > 0 or clear:
            self._apply(count, clear=clear)
        if count == CAPACITY:
            self._update()
        self._lookup.marked = True
        self._experts[layer].replay()
        self._points[layer % DEPTH].record()
        return True

    def complete(self) -> bool:
        """Whether every block of the model is on the GPU, where every lookup will find it."""
        if not self._all_fit:
            return False
        self._update()
        return self._runner.complete()

    def replay_complete(self, layers: Graph, head: Graph, *, counted: bool) -> bool:
        """Replay a token whose expert layers were recorded with the rest; REQUIRES: :meth:`complete`.

        Args:
            layers: The pass up to the last expert layer.
            head: The rest.
            counted: Account for the layers.

        Returns:
            False: an expert was not found, so that the results mean nothing.
        """
        runner = self._runner
        changes = self._lookup.next_changes()
        count = runner.look_ahead(0, self._pages.accelerator.stream(), changes)
        if count > 0 or self._lookup.marked:
            self._apply(max(0, count), clear=self._lookup.marked)
        self._lookup.marked = True
        layers.replay()
        self._points[0].record()
        head.replay()
        self._points[0].synchronize()
        runner.end_ahead()
        if (self._seen[:, -1] == MISSING).any():
            return False
        self._lookup.marked = False
        if counted:
            self._account(0, len(self._layers))
        return True

    def repeats(self, ordinal: int) -> bool:
        """Compute a layer that the host has answered once more by lookup, for comparison.

        Returns:
            False: the sum is another one. It is as the host left it afterwards.
        """
        if self._runner.far_blocks() > 0:
            return True  # the CPU's part is rounded in other places
        total = self._sums[ordinal]
        expected = total.clone()
        self._update(clear=True)
        self._lookup.marked = True
        self._experts[ordinal].replay()
        self._points[0].record()
        self._points[0].synchronize()
        found = self._seen[ordinal, -1] == MISSING or torch.equal(total, expected)
        total.copy_(expected)
        return found

    def _update(self, *, clear: bool = False) -> None:
        """Bring the table up to date."""
        count = CAPACITY
        while count == CAPACITY:
            count = self._runner.page_changes(self._lookup.next_changes())
            if count > 0 or clear:
                self._apply(count, clear=clear)

    def _apply(self, count: int, *, clear: bool) -> None:
        slot = self._lookup.fill(count, clear=clear)
        self._changes[slot].replay()
        self._lookup.mark(slot)

    def _account(self, first: int, count: int) -> None:
        """Decide and count as if the host had launched these layers, whose reports are there."""
        tier = self._tier
        shared = self._requests[first].inputs
        tier.counters.bytes_read += self._runner.account(
            self._seen,
            first,
            count,
            self._picks,
            self._places,
            miss=self._pages.miss(tier.settings, 1) if shared else "fetch",
            **tier.loading_rules(),
        )
        tier.counters.activations += self._picks * count


def _routed(tier: ExpertTier) -> bool:
    return tier.replay is None and tier.predictor is None and not tier.settings.queues


def _lookup_for(layers: Sequence[GpuExpertLayer], picks: int) -> PageLookup:
    """The table of the pages of these layers, made where there is none that fits."""
    tier, pages = layers[0].tier, layers[0].pages
    lookup, address = pages.lookup, pages.memory.data_ptr()
    if lookup is None or not lookup.fits(tier.runner, address, picks):
        lookup = PageLookup(
            tier.runner,
            pages.accelerator,
            pages.geometry,
            address=address,
            layers=len(layers),
            picks=picks,
        )
        pages.lookup = lookup
    return lookup


def _places(requests: Sequence[ExpertRequest]) -> npt.NDArray[np.int32]:
    """int32 ``[layers, places, 2]``: distance and ordinal of the layers that are scored; distance 0: none."""
    most = max(len(request.places) for request in requests)
    places = np.zeros((len(requests), most, 2), np.int32)
    for row, request in zip(places, requests, strict=True):
        row[: len(request.places)] = np.reshape(request.places, (-1, 2))
    return places


def _recorded(graphs: Graphs, launch: Callable[[], None]) -> Graph:
    graph = graphs.new()
    try:
        graph.begin()
        launch()
        graph.end()
    except BaseException:
        graph.abandon()
        raise
    return graph
