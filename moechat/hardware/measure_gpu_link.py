"""Measures the link to a GPU, alone and beside the CPU, and how much memory can be pinned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.hardware.card_link import sustained, waits
from moechat.hardware.card_rounds import CardRounds, summary
from moechat.hardware.measure_budget import format_size
from moechat.hardware.measure_cpu import Background, ExpertMemory
from moechat.hardware.profile import Figure, LinkFigures
from moechat.hardware.resident_pages import touched_pages

_ROUNDS = 3
_BACK_COPIES = 8

Bytes = npt.NDArray[np.uint8]


def measure_gpu_link(rounds: CardRounds, memory: ExpertMemory, cores: int) -> LinkFigures | None:
    """Measure the engine's link to a GPU; ``None``, with a reason in ``rounds``, if it cannot be measured.

    Args:
        rounds: The GPU and the limits.
        memory: Memory for the CPU's experts.
        cores: Threads of the CPU.
    """
    return _LinkSweep(rounds, memory, cores).run()


class _LinkSweep:
    def __init__(self, rounds: CardRounds, memory: ExpertMemory, cores: int) -> None:
        self._rounds = rounds
        self._card = rounds.card
        self._budget = rounds.budget
        self._memory = memory
        self._cores = cores

    def run(self) -> LinkFigures | None:
        part, found = self._rounds.part, None
        with part("link gpu"):
            source = touched_pages(1, self._budget.gpu_link_bytes).reshape(-1)
            if refusal := self._card.pin(source):
                raise ValueError(f"the system pins no memory for it: {refusal}")
            try:
                found = self._alone(source)
                with part("link gpu back"):
                    found = self._back(found)
                with part("link gpu while computing"):
                    found = self._together(found, source)
            finally:
                self._card.unpin(source)
        if found is None:
            return None
        with part("link gpu through pinned buffers"):
            found = replace(found, staged=self._staged(source))
        with part("pinned memory"):
            found = self._pinned(found)
        self._card.release()
        return found

    def _alone(self, source: Bytes) -> LinkFigures:
        by_depth: dict[int, dict[int, Figure]] = {}
        latencies: dict[int, Figure] = {}
        seconds = self._budget.gpu_cell_seconds
        for nbytes in self._budget.gpu_transfers:
            self._rounds.report(f"GPU: copying {format_size(nbytes)} at a time")
            link = self._card.link(source, pinned=True, buffer_bytes=nbytes)
            found = waits(link, self._card.target(1, nbytes), seconds=seconds)
            latencies[nbytes] = summary(found, "one at a time, as the host sees it")
            for depth in self._depths(source, nbytes):
                rates = self._copied(source, nbytes, depth, seconds)
                by_depth.setdefault(nbytes, {})[depth] = summary(rates, f"{depth} in flight, pinned memory")
        bandwidth = {
            nbytes: max(rates.values(), key=lambda figure: figure.value) for nbytes, rates in by_depth.items()
        }
        return LinkFigures(
            "gpu", bandwidth, latencies[min(latencies)], latencies=latencies, by_depth=by_depth
        )

    def _depths(self, source: Bytes, nbytes: int) -> list[int]:
        """Transfers in flight that the source allows; at least half of it is not in flight."""
        return [
            depth for depth in self._budget.gpu_depths if depth == 1 or depth * nbytes <= source.nbytes // 2
        ]

    def _copied(
        self, source: Bytes, nbytes: int, depth: int, seconds: float, *, pinned: bool = True
    ) -> list[float]:
        link = self._card.link(source, pinned=pinned, buffer_bytes=nbytes)
        target = self._card.target(depth, nbytes)
        try:
            return sustained(link, target, seconds=seconds / _ROUNDS, rounds=_ROUNDS)
        finally:
            self._card.release()

    def _back(self, link: LinkFigures) -> LinkFigures:
        self._rounds.report("GPU: copying to the host")
        found = {}
        for nbytes in link.bandwidth:
            task = self._card.back(nbytes, _BACK_COPIES)
            found[nbytes] = self._rounds.rate(task, task.nbytes, f"{_BACK_COPIES} copies to pinned memory")
        self._card.release()
        return replace(link, back=found)

    def _together(self, link: LinkFigures, source: Bytes) -> LinkFigures:
        """Link and CPU at once; both rates are of the same seconds."""
        nbytes = max(link.bandwidth)
        depth = max(link.by_depth[nbytes])
        how = "while the CPU computes experts with all threads"
        experts: dict[int, Figure] = {}
        rates: list[float] = []
        for bits in self._budget.bits:
            self._rounds.report(f"GPU: copying while the CPU computes experts of {bits} bits")
            filled = self._memory.fill(bits)
            with Background(filled, self._cores) as background:
                rates += self._copied(source, nbytes, depth, self._budget.gpu_together_seconds)
            experts[bits] = Figure(background.rate, "measured", "while the link to the GPU is busy")
        together, back = summary(rates, how), None
        if link.back:
            task = self._card.back(nbytes, _BACK_COPIES)
            with Background(self._memory.fill(min(self._budget.bits)), self._cores):
                back = self._rounds.rate(task, task.nbytes, how)
        # Nothing is slower alone than under load: then another program slowed it.
        alone = link.bandwidth[nbytes]
        if alone.value < together.value:
            alone = Figure(together.value, "measured", "as much as while the CPU computes")
        bandwidth = {**link.bandwidth, nbytes: alone}
        return replace(link, bandwidth=bandwidth, together=together, experts=experts, back_together=back)

    def _staged(self, source: Bytes) -> dict[int, Figure]:
        self._rounds.report("GPU: copying through pinned buffers")
        found = {}
        for nbytes in self._budget.gpu_transfers:
            depth = max(self._depths(source, nbytes))
            rates = self._copied(source, nbytes, depth, self._budget.gpu_cell_seconds, pinned=False)
            found[nbytes] = summary(rates, f"{depth} in flight, memory that is not pinned")
        return found

    def _pinned(self, link: LinkFigures) -> LinkFigures:
        """How much host memory can be pinned, up to a bound that leaves enough to other programs."""
        self._rounds.report("GPU: pinning memory")
        budget, card = self._budget, self._card
        bound, ends = budget.pin_bound(), card.clock() + budget.pin_seconds
        held: list[Bytes] = []
        refusal = ""
        try:
            while (len(held) + 1) * budget.pin_chunk <= bound and card.clock() < ends and not refusal:
                try:
                    chunk = _native.huge_empty(budget.pin_chunk)
                    refusal = card.pin(chunk)
                except MemoryError as problem:
                    refusal = str(problem) or "no memory"
                if not refusal:
                    held.append(chunk)
            # The source of the copies was pinned before.
            pinned = max(len(held) * budget.pin_chunk, budget.gpu_link_bytes)
        finally:
            while held:
                card.unpin(held.pop())
        if refusal:
            self._rounds.remarks.append(
                f"The system pins no more than about {format_size(pinned)} of memory for the GPU; experts "
                "beyond that are copied through pinned buffers."
            )
        how = f"more was refused: {refusal}" if refusal else "at least; nothing was refused"
        return replace(link, pinned=Figure(pinned, "measured", how), pins_more=not refusal)
