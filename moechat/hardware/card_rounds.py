"""Rounds of measurements on a GPU, within limits of time; what fails is noted, not raised."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moechat.hardware.card import Card, Task
from moechat.hardware.measure_budget import Budget
from moechat.hardware.profile import Figure

Report = Callable[[str], None]

_ROUNDS, _FEW_ROUNDS = 5, 2


class TimeIsUpError(Exception):
    """A limit of the budget was reached."""


class CardRounds:
    """Takes medians of rounds, and notes what cannot be measured.

    Args:
        card: The GPU.
        budget: Limits; the time starts now.
        report: Called with a short description of each step.

    Attributes:
        missing: By part: why it was not measured.
        remarks: Notes on the figures, in sentences.
    """

    def __init__(self, card: Card, budget: Budget, report: Report) -> None:
        self.card = card
        self.budget = budget
        self.report = report
        self.missing: dict[str, str] = {}
        self.remarks: list[str] = []
        self._deadline = card.clock() + budget.gpu_seconds
        self._builds = budget.build_seconds

    @contextmanager
    def part(self, name: str, cell: str = "") -> Iterator[None]:
        """Note why a part was not measured, in place of an exception.

        Args:
            name: Of the part, a key of :attr:`missing`.
            cell: The figure, if the part has several.
        """
        try:
            yield
        except TimeIsUpError:
            before = self.missing.get(name, "")
            self.missing[name] = f"{before}, {cell}" if before else f"no time was left for {cell or 'it'}"
        except Exception as problem:  # torch, Triton and the driver raise many kinds
            text = " ".join(str(problem).split()) or type(problem).__name__
            self.missing.setdefault(name, text[:300])

    def warm(self, task: Task) -> None:
        """Run a task for the first time. That may build kernels, which has a limit of its own.

        Raises:
            TimeIsUpError: None is left.
        """
        if self._builds <= 0 or self.card.clock() >= self._deadline:
            raise TimeIsUpError
        started = self.card.clock()
        task.run()
        self.card.wait()
        took = self.card.clock() - started
        self._deadline += took
        self._builds -= took

    def rate(self, task: Task, amount: float, how: str) -> Figure:
        """``amount`` of one call per second of the GPU.

        Raises:
            TimeIsUpError: No time is left.
        """
        self.warm(task)
        one = max(1e-9, self.card.gpu_seconds(task.run, 1))
        calls = max(1, min(1000, math.ceil(self.budget.gpu_cell_seconds / _ROUNDS / one)))
        # Of work that takes long fewer rounds are enough.
        rounds = _ROUNDS if one < self.budget.gpu_cell_seconds else _FEW_ROUNDS
        times: list[float] = []
        while len(times) < rounds and not (times and self.card.clock() >= self._deadline):
            times.append(self.card.gpu_seconds(task.run, calls) / calls)
        return summary([amount / max(1e-12, time) for time in times], how)

    def repeated(self, how: str, sample: Callable[[], float], scale: float = 1.0) -> Figure:
        """The median of a sample, in a few rounds after one that warms up.

        Raises:
            TimeIsUpError: No time is left.
        """
        if self.card.clock() >= self._deadline:
            raise TimeIsUpError
        sample()
        return summary([scale * max(0.0, sample()) for _ in range(_ROUNDS)], how)

    def per_call(self, task: Task, calls: int) -> float:
        """Seconds of the GPU for a call."""
        return self.card.gpu_seconds(task.run, calls) / calls

    def started(self, task: Task, *, wait: bool) -> float:
        """Host seconds of a call among many; with ``wait`` until all of them are done."""
        card = self.card
        card.wait()
        begun = card.clock()
        for _ in range(self.budget.gpu_calls):
            task.run()
        if wait:
            card.wait()
        seconds = (card.clock() - begun) / self.budget.gpu_calls
        card.wait()
        return seconds

    def waited(self, work: Callable[[], object]) -> float:
        """Host seconds of work that begins on an idle GPU; the median of many."""
        found = []
        for _ in range(self.budget.gpu_calls):
            self.card.wait()
            begun = self.card.clock()
            work()
            found.append(self.card.clock() - begun)
        return statistics.median(found)


def summary(samples: Sequence[float], how: str) -> Figure:
    """The median of samples, with their range."""
    least, most = min(samples), max(samples)
    how = f"{how}; median of {len(samples)}"
    return Figure(statistics.median(samples), "measured", how, least, most)
