"""Computes the rows of a table in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from moechat.simulate.simulated_model import SimulatedModel

Inputs = TypeVar("Inputs")
Job = TypeVar("Job")
Row = TypeVar("Row")


@dataclass(frozen=True)
class TableRow:
    """What a row of a table is about.

    Attributes:
        trace: Name of the trace.
        model: Name of the model.
        profile: Name of the machine.
        accuracy: Mean accuracy of the predictions.
        seed: Random seed of the predictions.
    """

    trace: str
    model: str
    profile: str
    accuracy: float
    seed: int

    @property
    def input(self) -> str:
        """Trace, model and assumptions, for a heading."""
        return f"{self.trace}, {self.model}, accuracy {self.accuracy:g}, seed {self.seed}"


# What a worker process computes a row with. Sent once, because a trace has megabytes and a job refers to
# it by number.
_row_of: Callable[[Any], Any] | None = None


def rows_of(
    row_of: Callable[[Inputs, Job], Row], inputs: Inputs, jobs: Sequence[Job], processes: int
) -> Iterator[Row]:
    """Rows in the order of the jobs, each as soon as it and those before it are done.

    Args:
        row_of: Computes one row; a function of a module.
        inputs: What the jobs refer to; its models as :func:`sendable` leaves them.
        jobs: The rows to compute.
        processes: Most processes at a time.
    """
    processes = min(processes, len(jobs))
    if processes <= 1:
        yield from (row_of(inputs, job) for job in jobs)
        return
    # Not forked: the parent may have started threads of torch.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(partial(row_of, inputs),),
    )
    try:
        yield from pool.map(_work, jobs)
    finally:
        pool.shutdown(cancel_futures=True)


def sendable(model: SimulatedModel) -> SimulatedModel:
    """A copy that can be pickled: a geometry that was used keeps a native object."""
    return replace(model, geometry=replace(model.geometry))


def _start_worker(row_of: Callable[[Any], Any]) -> None:
    global _row_of
    _row_of = row_of


def _work(job: Any) -> Any:
    assert _row_of is not None
    return _row_of(job)
