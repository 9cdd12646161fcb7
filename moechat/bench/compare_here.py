"""Measures all systems on this machine, for ``moechat compare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moechat.bench.advice import LEAST_GAP_OF_SINGLE_RUNS, TOO_SLOW, Cell, contenders, hopeful
from moechat.bench.compared import Compared
from moechat.bench.decode import Bench
from moechat.bench.entries import Entry
from moechat.bench.measure import Measurement
from moechat.bench.options import BenchOptions, parse_systems
from moechat.engine import Engine
from moechat.errors import UsageError
from moechat.hardware.gpu import find_gpus
from moechat.validation import require_whole

# The time that a measurement should take if the number of tokens is not given.
_SECONDS = 180.0
_FEWEST_TOKENS, _MOST_TOKENS = 16, 128
_MOST_RUNS = 1000
# Turns beyond those of all systems, for systems that differ by no more than the spread.
_MORE_TURNS = 2
# A system takes longer than the default, which is tried out, by about this factor.
_OTHERS = 1.3
# Expected shares of the systems that run again after the first turn, and in those turns.
_HOPEFUL, _CLOSE = 0.8, 0.4
# Expected seconds that are done, and all of them.
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison.

    Attributes:
        entries: The systems.
        fractions: Shares of all experts that fit in memory, ascending.
        tokens: Timed tokens of a run; ``None``: as many as fit in a few minutes, at most 128.
        prompt_tokens: Tokens of the prompt.
        runs: Runs of each system.
        seed: Random seed.

    Raises:
        UsageError: A value is out of range.
    """

    entries: tuple[Entry, ...]
    fractions: tuple[float, ...]
    tokens: int | None = None
    prompt_tokens: int = 64
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("--runs", self.runs, 1, _MOST_RUNS)
        self.bench_options(_FEWEST_TOKENS if self.tokens is None else self.tokens)

    def bench_options(self, tokens: int) -> BenchOptions:
        """The options of one turn with so many timed tokens; half as many before them fill the cache."""
        return BenchOptions(
            systems=parse_systems(",".join(entry.system for entry in self.entries)),
            fractions=self.fractions,
            prompt_tokens=self.prompt_tokens,
            warmup_tokens=max(4, tokens // 2),
            tokens=tokens,
            runs=1,
            seed=self.seed,
            expect=False,
        )


class ComparisonHere:
    """A comparison on this machine, which may be interrupted.

    A short run of the first system tells how long everything takes.

    Args:
        engine: The model, loaded without pages; its state is restored at the end.
        options: Options of the comparison.
        prompt: First tokens of the prompt; ``None``: random tokens.

    Attributes:
        seconds: Expected seconds of :meth:`run`.
        tokens: Timed tokens of a run.

    Raises:
        UsageError: The tokens exceed the context.
        DoesNotFitError: The machine has too little memory for a near tier.
        MoechatError: Blocks cannot be read.
    """

    def __init__(self, engine: Engine, options: CompareOptions, prompt: Sequence[int] | None) -> None:
        self._options = options
        self._bench = Bench(engine)
        trial = Measurement(self._bench, options.bench_options(_FEWEST_TOKENS), prompt, lambda _: None)
        trial.try_out()  # the first one finds files and caches cold
        self._trial = trial.try_out()
        systems, shares, more = len(options.entries), len(options.fractions), options.runs - 1
        hopeful = systems if systems < 3 else round(_HOPEFUL * systems)
        close = min(hopeful, max(2, round(_CLOSE * systems))) if more and systems > 1 else 0
        self._runs = shares * (1 + systems + hopeful * more + close * _MORE_TURNS)
        self.tokens = self._affordable() if options.tokens is None else options.tokens
        self.seconds = self._runs * self._one(self.tokens)
        chosen = options.bench_options(self.tokens)
        if chosen.all_tokens > engine.context_length:
            raise UsageError(
                f"a run of {self.tokens} timed tokens takes {chosen.all_tokens} with its prompt and those "
                f"that fill the cache; the context holds {engine.context_length}",
                hint="give fewer --tokens",
            )
        self._measurement = Measurement(self._bench, chosen, prompt, self._report)
        self._progress: Progress = lambda _, __, ___: None

    def _affordable(self) -> int:
        """Timed tokens of a run, so that all runs take about as long as they should."""
        tokens = _MOST_TOKENS
        context = self._bench.engine.context_length
        while tokens > _FEWEST_TOKENS and (
            self._runs * self._one(tokens) > _SECONDS
            or self._options.bench_options(tokens).all_tokens > context
        ):
            tokens //= 2
        return tokens

    def _one(self, tokens: int) -> float:
        """Expected seconds of one run."""
        options, trial = self._options.bench_options(tokens), self._trial
        decoded = options.warmup_tokens + options.tokens
        return trial.around + _OTHERS * (trial.ttft + decoded * trial.tpot)

    def _report(self, text: str) -> None:
        one = self._one(self.tokens)
        text = text.replace(", run 1 of 1,", f", run 1 of {self._options.runs},")  # of this turn alone
        self._progress(min(self._measurement.done, self._runs) * one, self._runs * one, text)

    def run(self, progress: Progress) -> None:
        """Run everything; what an interrupt leaves is in :meth:`result`.

        Args:
            progress: Called after each run.

        Raises:
            MoechatError: Blocks cannot be read.
        """
        self._progress = progress
        self._measurement.run()
        runs = self._options.runs
        for turn in range(1, runs):
            self._run_again(hopeful, f"run {turn + 1} of {runs}")
        for _ in range(_MORE_TURNS if runs > 1 else 0):
            self._run_again(contenders, "once more, as others are close")

    def _run_again(self, choose: Callable[[Sequence[Cell]], tuple[str, ...]], turn: str) -> None:
        """Run some systems once more at each share.

        Args:
            choose: Names them, by the cells of a share.
            turn: Words for progress.
        """
        chosen = {share: choose(cells) for share, cells in self._by_fraction().items()}
        self._measurement.run_again(chosen, turn)

    def _by_fraction(self) -> dict[float, list[Cell]]:
        found: dict[float, list[Cell]] = {}
        for cell in cells_of(self._measurement.result()):
            found.setdefault(cell.fraction, []).append(cell)
        return found

    def result(self, *, complete: bool) -> Compared | None:
        """What has been measured so far; ``None``: nothing."""
        found = self._measurement.result()
        cells = cells_of(found)
        if not cells:
            return None
        tokens = {key: found["tokens"][key] for key in ("prompt", "warmup", "timed")}
        tokens["runs"] = self._options.runs
        floor = tuple(1000 * run.tpot for run in self._measurement.floors)
        return Compared(
            "measured",
            complete,
            found["model"],
            {"name": "this machine", **found["machine"]},
            tokens,
            self._options.entries,
            cells,
            floor,
            tuple(_assumptions(tokens, bool(floor))),
        )


def cells_of(result: Mapping[str, Any]) -> tuple[Cell, ...]:
    """The cells of a measurement; see :mod:`moechat.bench.report`."""
    return tuple(
        Cell(
            case["system"],
            case["fraction"],
            case["pages_bytes"],
            tuple(1000 * run for run in case["tpot_s"]["runs"]),
            case["ttft_s"]["median"],
            case["hits"]["full"] + case["hits"]["prefetch"],
        )
        for case in result["cases"]
    )


def _assumptions(tokens: Mapping[str, int], has_floor: bool) -> list[str]:
    turns = (
        f"They took turns, {tokens['runs']} times; those that were close {_MORE_TURNS} times more, those "
        f"that took over {TOO_SLOW:g} times as long as the fastest no further."
    )
    if tokens["runs"] == 1:
        turns = f"One run has no spread: differences below {LEAST_GAP_OF_SINGLE_RUNS:.0%} count as none."
    said = [
        f"Every system computed the same tokens: {tokens['prompt']} of a prompt, {tokens['warmup']} that "
        f"fill the cache, then {tokens['timed']} that are timed. {turns}",
        "The CPU computed, and experts that are not in memory came from the disk. The memory is that of the "
        "experts alone. The answer is the same with every system.",
    ]
    if find_gpus().best is not None:
        said.append("Its GPU took no part: --simulate compares the systems for it.")
    if not has_floor:
        said.append("There is too little memory for all experts, so the floor is not known.")
    return said
