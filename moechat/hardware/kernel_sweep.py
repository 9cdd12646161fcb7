"""Measures the CPU: memory bandwidth, kernels by bits and threads, and kernels while a link is busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from moechat.errors import MoechatError
from moechat.hardware.measure_cpu import (
    HIDDEN,
    Background,
    ExpertMemory,
    compute_rate,
    operation_rate,
    thread_counts,
)
from moechat.hardware.profile import Figure

# Everything is measured twice and the better figure counts, because other load varies within seconds.
ROUNDS = 2


class KernelSweep:
    """Figures of the CPU, collected over several rounds.

    Attributes:
        stream: Memory read bandwidth in bytes per second; ``None`` before :meth:`read_memory`.
        rate: By bits and threads: bytes of blocks per second at one token.
        operations: By bits: operations per second with many tokens.
        together: By bits: as ``rate``, with all threads while the link is busy.
        failure: Why link and kernels could not be measured together; empty if they could.
    """

    def __init__(self, memory: ExpertMemory, cores: int, report: Callable[[str], None]) -> None:
        """Prepare; nothing is measured yet.

        Args:
            memory: Memory for experts.
            cores: Most threads.
            report: Called with a short description of each step.
        """
        self._memory = memory
        self._cores = cores
        self._report = report
        self.stream: Figure | None = None
        self.rate: dict[int, dict[int, Figure]] = {}
        self.operations: dict[int, Figure] = {}
        self.together: dict[int, Figure] = {}
        self.failure = ""
        self._link_rates: dict[int, float] = {}

    @property
    def link_together(self) -> Figure | None:
        """Bytes per second of the link while kernels run on all threads; ``None`` if not measured."""
        if not self._link_rates:
            return None
        how = "median over bits, while kernels run on all threads"
        return Figure(median(self._link_rates.values()), "measured", how)

    def read_memory(self, seconds: float) -> Figure:
        """Measure :attr:`stream`."""
        self._report("memory: reading")
        # One thread may be the fastest if many cores share few memory channels.
        counts = {1, self._cores}
        best = max(self._memory.stream_rate(threads, seconds / len(counts)) for threads in counts)
        how = "reading alone, the fastest of several passes"
        self.stream = _better(self.stream, best, how)
        return self.stream

    def run(
        self,
        bits: Iterable[int],
        *,
        compute_seconds: float,
        many_seconds: float,
        link: Callable[[int], float] | None,
    ) -> None:
        """Measure one round of the kernels of each encoding.

        Args:
            bits: Encodings.
            compute_seconds: Time for each number of threads.
            many_seconds: Time with many tokens.
            link: Keeps the link busy for a while, given a seed, and returns its bytes per second.
        """
        for each in bits:
            experts = self._memory.fill(each)
            rates = self.rate.setdefault(each, {})
            for threads in thread_counts(self._cores):
                self._report(f"CPU: experts of {each} bits, {threads} thread{'s' if threads > 1 else ''}")
                rate = compute_rate(experts, threads, seconds=compute_seconds)
                how = f"hidden size {HIDDEN}, one token, the best of several stretches"
                rates[threads] = _better(rates.get(threads), rate, how)
            many = operation_rate(experts, self._cores, seconds=many_seconds)
            how = f"hidden size {HIDDEN}, 128 tokens an expert"
            self.operations[each] = _better(self.operations.get(each), many, how)
            if link is None or self.failure:
                continue
            self._report(f"CPU and disk together: {each} bits")
            try:
                with Background(experts, self._cores) as background:
                    moved = link(each)
            except (OSError, MoechatError) as problem:
                self.failure = str(problem)
                continue
            # Both from the same round, as the best of different rounds could not be reached together.
            before = self.together.get(each)
            if before is None or background.rate > before.value:
                self.together[each] = Figure(background.rate, "measured", "while the file link is busy")
                self._link_rates[each] = moved

    def settle(self) -> None:
        """Raise figures measured alone to those measured under load, if they are lower.

        Nothing is slower alone than under load, and memory bandwidth is at least what the kernels read; lower
        figures are due to other programs.
        """
        for bits, together in self.together.items():
            self.raise_alone(bits, together, "as much as while the file link is busy")
        most = max((rate.value for rates in self.rate.values() for rate in rates.values()), default=0.0)
        self.stream = _better(self.stream, most, "as much as the kernels read")

    def raise_alone(self, bits: int, together: Figure, how: str) -> None:
        """Raise the rate of all threads alone to one measured under load, if it is lower."""
        self.rate[bits][self._cores] = _better(self.rate[bits][self._cores], together.value, how)


def _better(before: Figure | None, value: float, how: str) -> Figure:
    return before if before is not None and before.value >= value else Figure(value, "measured", how)
