"""Which system to use: which is the fastest, and whether that is sure.

Times are measured by :mod:`moechat.bench.measure` or simulated by :mod:`moechat.simulate.compare`; what is
here takes them as numbers and is the same for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_SYSTEM = "auto"
# Differences below this share are none, however close the runs of each system are.
_LEAST_GAP = 0.01
# The same for simulations, which are no better than their figures and routing.
LEAST_GAP_OF_SIMULATIONS = 0.03
# The same for single runs, which have no spread.
LEAST_GAP_OF_SINGLE_RUNS = 0.05
# A system that takes so many times as long as the fastest is not the one to use, whatever more runs show.
TOO_SLOW = 3.0


@dataclass(frozen=True)
class Cell:
    """One system at one share of the experts.

    Attributes:
        system: The entry's system.
        fraction: Share of all experts that fit in memory.
        nbytes: Bytes of that memory.
        runs: Milliseconds per token, for each run; a simulation has one.
        first_token_s: Seconds for the prompt; ``None``: not known.
        ready: Share of a token's experts that are in memory or on their way when it needs them.
    """

    system: str
    fraction: float
    nbytes: int
    runs: tuple[float, ...]
    first_token_s: float | None
    ready: float

    @property
    def ms(self) -> float:
        """Median milliseconds per token."""
        return statistics.median(self.runs)

    @property
    def low(self) -> float:
        """The fastest run."""
        return min(self.runs)

    @property
    def high(self) -> float:
        """The slowest run."""
        return max(self.runs)

    def surely_faster(self, other: Cell, *, exact: bool) -> bool:
        """Whether this is faster beyond the spread: every run of one is faster than every run of the other.

        Args:
            other: At the same share of the experts.
            exact: Simulated times, which are without noise.
        """
        least = _LEAST_GAP
        if exact:
            least = LEAST_GAP_OF_SIMULATIONS
        elif min(len(self.runs), len(other.runs)) < 2:
            least = LEAST_GAP_OF_SINGLE_RUNS
        return self.high < other.low and other.ms > (1 + least) * self.ms


@dataclass(frozen=True)
class Advice:
    """The system to use at one share of the experts.

    Attributes:
        fraction: The share.
        nbytes: Bytes of that memory.
        use: The default, unless another one is faster beyond the spread.
        ms: Its milliseconds per token.
        equal: Other systems that differ from it by no more than the spread, the fastest first.
        following: The fastest of those that are slower beyond the spread; ``None``: there is none.
        faster_by: By what share ``use`` makes more tokens a second than ``following``.
        over_floor: By what share it takes longer than with all experts in memory; negative for noise,
            ``None`` if that was not measured.
        default_ms: Milliseconds per token of the default, where another one is faster; else ``None``.
    """

    fraction: float
    nbytes: int
    use: str
    ms: float
    equal: tuple[str, ...]
    following: str | None
    faster_by: float | None
    over_floor: float | None
    default_ms: float | None = None


def advise(cells: Sequence[Cell], floor_ms: float | None, *, exact: bool) -> Advice:
    """The advice for one share of the experts.

    Args:
        cells: All systems at that share, at least one.
        floor_ms: Milliseconds per token with all experts in memory, if known.
        exact: As for :meth:`Cell.surely_faster`.
    """
    ordered = sorted(cells, key=lambda cell: cell.ms)
    default = next((cell for cell in ordered if cell.system == DEFAULT_SYSTEM), None)
    use = ordered[0]
    if default is not None:
        # The fastest may be so by chance, beside another one that is sure to be faster.
        use = next((cell for cell in ordered if cell.surely_faster(default, exact=exact)), default)
    others = [cell for cell in ordered if cell is not use]
    slower = [cell for cell in others if use.surely_faster(cell, exact=exact)]
    return Advice(
        use.fraction,
        use.nbytes,
        use.system,
        use.ms,
        tuple(cell.system for cell in others if cell not in slower),
        slower[0].system if slower else None,
        slower[0].ms / use.ms - 1 if slower else None,
        None if floor_ms is None else use.ms / floor_ms - 1,
        default.ms if default is not None and default is not use and default in slower else None,
    )


def hopeful(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The default, and the systems at one share of the experts that are worth more runs."""
    most = TOO_SLOW * min(cell.ms for cell in cells)
    return tuple(cell.system for cell in cells if cell.low <= most or cell.system == DEFAULT_SYSTEM)


def contenders(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Systems at one share of the experts that could be the one to use, so that more runs of them are worth
    their time; empty if it is clear.

    The default is one of them unless it is slower than the fastest by more than the spread of both.
    """
    fastest = min(cells, key=lambda cell: cell.ms)
    close = [cell for cell in cells if cell.low <= fastest.high]
    default = next((cell for cell in cells if cell.system == DEFAULT_SYSTEM), None)
    # A default that seems slower by little is looked at again: three runs can be apart by chance.
    if default is not None and default not in close and default.ms < 1.15 * fastest.ms:
        close.append(default)
    return tuple(cell.system for cell in cells if cell in close) if len(close) > 1 else ()
