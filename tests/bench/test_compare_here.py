"""A comparison on this machine: its length, which systems run again, and what an interrupt leaves."""

from __future__ import annotations

from typing import Any

import pytest

from moechat.bench import compare_here
from moechat.bench.advice import Cell
from moechat.bench.compare_here import CompareOptions, ComparisonHere
from moechat.bench.decode import Bench
from moechat.bench.entries import entries_of
from moechat.bench.measure import Measurement, Trial
from moechat.bench.options import BenchOptions, parse_systems
from moechat.engine import Engine
from moechat.errors import UsageError
from moechat.offload.tier import ExpertTier


def options(**changes: int | None) -> CompareOptions:
    entries = entries_of(("auto", "on-demand", "moepic"), far_computes=False)
    return CompareOptions(entries, (0.25, 0.5), **{"tokens": 4, "prompt_tokens": 8, "runs": 2, **changes})


def test_slow_systems_run_once_and_close_ones_in_more_turns(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def but_the_last(cells: list[Cell]) -> tuple[str, ...]:
        seen.append({cell.system for cell in cells})
        return ("auto", "on-demand")

    monkeypatch.setattr(compare_here, "hopeful", but_the_last)
    monkeypatch.setattr(compare_here, "contenders", lambda cells: ("on-demand",) * (cells[0].fraction < 0.3))
    told: list[tuple[float, float, str]] = []
    comparison = ComparisonHere(engine, options(), None)
    comparison.run(lambda done, total, text: told.append((done, total, text)))
    found = comparison.result(complete=True)
    assert found is not None
    assert {(cell.fraction, cell.system): len(cell.runs) for cell in found.cells} == {
        (0.25, "auto"): 2,
        (0.25, "on-demand"): 4,
        (0.25, "moepic"): 1,
        (0.5, "auto"): 2,
        (0.5, "on-demand"): 2,
        (0.5, "moepic"): 1,
    }
    assert seen == [{"auto", "on-demand", "moepic"}] * 2
    assert len(found.floor) == 2
    assert all(0 < done <= total for done, total, _ in told)
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    text = [each[2] for each in told]
    assert "0.25 of the experts, run 1 of 2, auto:" in text[1]
    assert sum("run 2 of 2, on-demand:" in line for line in text) == 2
    assert sum("once more, as others are close, on-demand:" in line for line in text) == 2


def test_an_interrupt_leaves_the_runs_before_it(engine: Engine) -> None:
    comparison = ComparisonHere(engine, options(), None)
    assert comparison.result(complete=False) is None

    def interrupt(done: float, total: float, text: str) -> None:
        if "on-demand" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comparison.run(interrupt)
    found = comparison.result(complete=False)
    assert found is not None
    assert not found.complete
    assert [(cell.fraction, cell.system) for cell in found.cells] == [(0.25, "auto"), (0.25, "on-demand")]
    assert found.advice()[0].fraction == 0.25


@pytest.mark.parametrize(
    ("tpot", "tokens"), [(1e-4, 128), (0.02, 32), (1.0, 16)], ids=["fast", "middling", "slow"]
)
def test_fewer_tokens_are_timed_where_a_token_takes_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tpot: float, tokens: int
) -> None:
    monkeypatch.setattr(Measurement, "try_out", lambda _: Trial(0.5, 0.1, tpot))
    found = ComparisonHere(engine, options(tokens=None, runs=20), None)
    assert found.tokens == tokens
    # Every run has a prompt, tokens that fill the cache, half as many as are timed, and these.
    assert found.seconds > 2 * (1 + 3) * (0.5 + 0.1 + 1.5 * tokens * tpot)


def test_more_tokens_than_the_context_holds_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="the context holds 256"):
        ComparisonHere(engine, options(tokens=200), None)


def test_without_a_number_the_tokens_fit_into_the_context(engine: Engine) -> None:
    assert ComparisonHere(engine, options(tokens=None, runs=1, prompt_tokens=200), None).tokens == 32


def test_systems_that_learn_from_requests_are_given_requests_and_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("begin_request", "begin_pass", "end_request"):
        real = getattr(ExpertTier, name)

        def told(tier: ExpertTier, *arguments: object, name: str = name, real: Any = real) -> None:
            if tier.settings.prefetch == "expert-map":
                seen.append(name)
            real(tier, *arguments)

        monkeypatch.setattr(ExpertTier, name, told)
    systems = parse_systems("finemoe,expertflow")
    wanted = BenchOptions(systems, (0.25,), prompt_tokens=4, warmup_tokens=8, tokens=16, runs=1, expect=False)
    measurement = Measurement(Bench(engine), wanted, None, lambda _: None)
    measurement.run()
    assert seen == ["begin_request", *["begin_pass"] * 24, "end_request"]
    learned, adaptive = measurement.result()["cases"]
    assert learned["bytes_per_token"]["prefetch"] > 0
    assert adaptive["bytes_per_token"]["prefetch"] > 0
    assert adaptive["us_per_layer"]["predict"] > 0
