"""Tests of tuning in `moechat run`: when, for how long, and its messages."""

from __future__ import annotations

import io
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import moechat
from moechat import Progress
from moechat.cli.commands.run import _tune
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.main import main
from moechat.cli.terminal import load_progress as progress
from moechat.cli.terminal.answer_stats import print_replanned, print_stats, print_tuning
from moechat.engine import Stats
from moechat.errors import MoechatError, StoreDamagedError
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.trials import Gap
from moechat.tuner import Timing, Tuning, racing

MEASURED = Tuning(
    state="measured",
    winner="dp",
    title="whole experts, most hits (dynamic programming)",
    why="7.5 % faster than computed",
    measured="2026-11-21T20:00:00+00:00",
    timings=(
        Timing("computed", 24, 0.011, None),
        Timing("dp", 16, 0.010, Gap(-0.075, 0.012)),
    ),
    same_as={"uniform": "plain"},
    seconds=4.5,
    kept=True,
)


@dataclass
class Engine:
    """Records the arguments of tune()."""

    error: BaseException | None = None
    pages: int = 100
    tuning: Tuning | None = None
    asked: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def stats(self) -> Stats:
        return Stats(pages=self.pages)

    def tune(self, *, limit_s: float, again: bool, progress: Any) -> Tuning:
        self.asked.append((limit_s, again))
        if self.pages:
            progress(Progress("tune", 1, 10))
        if self.error is not None:
            raise self.error
        self.tuning = MEASURED
        return MEASURED


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tuned(engine: Engine, *, chat: bool = True, terminal: bool = True, **options: Any) -> str:
    """Tune as the command does; returns its messages."""
    stream = Terminal() if terminal else io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "dumb")
        _tune(engine, RunOptions(model="demo", **options), chat=chat)  # type: ignore[arg-type]
    return stream.getvalue()


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, [(5.0, False)]),
        ({"chat": False}, [(3.0, False)]),
        ({"terminal": False}, [(0.0, False)]),
        ({"quiet": True}, [(0.0, False)]),
        ({"json": True, "chat": False}, [(0.0, False)]),
        ({"tune": False}, []),
        ({"tune": True}, [(20.0, True)]),
        ({"tune": True, "terminal": False, "chat": False}, [(20.0, True)]),
        ({"system": "moepic"}, []),
        ({"system": "moepic", "tune": True}, [(20.0, True)]),
    ],
)
def test_plans_are_timed_only_on_a_terminal(options: dict[str, Any], asked: list[tuple[float, bool]]) -> None:
    engine = Engine()
    tuned(engine, **options)
    assert engine.asked == asked


def test_an_interrupt_in_a_chat_skips_only_the_timing() -> None:
    assert "plans were not timed; the computed one is used" in tuned(Engine(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tuned(Engine(KeyboardInterrupt()), chat=False)


def test_ctrl_c_hint_is_shown_only_if_it_skips_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_LINE_AFTER_S", 0.0)
    assert "timing plans for this machine, Ctrl-C skips it\n" in tuned(Engine())
    assert "timing plans for this machine\n" in tuned(Engine(), chat=False)


def test_tuning_tolerates_a_disk_failure_but_not_a_damaged_store() -> None:
    said = tuned(Engine(MoechatError("experts cannot be read", hint="try again")))
    assert "plans were not timed: experts cannot be read" in said
    with pytest.raises(StoreDamagedError):
        tuned(Engine(StoreDamagedError("gone")))


def test_the_reason_is_shown_with_the_statistics() -> None:
    assert "dp" not in tuned(Engine())
    said = tuned(Engine(), stats=True)
    reason = "plan: whole experts, most hits (dynamic programming) (timed in 4.5 s: 7.5 % faster than"
    assert reason in said.replace("\n", " ")
    rows = [line.split() for line in said.splitlines()]
    assert ["computed", "11.0", "24"] in rows
    assert ["*", "dp", "10.0", "-7.5", "%", "1.2", "%", "16"] in rows
    assert "the next start goes on with the timing" in said
    assert "uniform is the same as plain" in said
    assert "plan:" not in tuned(Engine(pages=0), stats=True), "all experts are in memory: nothing to say"


def test_remembered_and_skipped_tuning_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    measured = MEASURED.to_json()
    print_tuning({**measured, "state": "remembered"})
    print_tuning({**measured, "state": "skipped", "why": "it was interrupted", "candidates": []})
    said = capsys.readouterr().err.replace("\n", " ")
    assert "(remembered from 2026-11-21T20:00:00+00:00: 7.5 %" in said
    assert "(not timed: it was interrupted)" in said


def test_a_new_plan_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    replanned = {
        "tokens": 5123,
        "method": "auto",
        "layers_changed": 3,
        "before_ms": 12.344,
        "after_ms": 11.0,
        "took_ms": 21.4,
        "statistics_from": "defaults and 5,123 tokens of this model",
        "costs_from": "5,123 decoded tokens",
    }
    print_replanned(replanned)
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "(new plan after 5,123 tokens, in 21 ms: 3 layers changed; expected wait for experts: 12.34 ms a "
        "token before, 11.00 ms now; from defaults and 5,123 tokens of this model)"
    )
    print_replanned({**replanned, "before_ms": None, "after_ms": None})
    assert "expected" not in capsys.readouterr().err


def test_the_table_names_the_plan_in_pages_only(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(Stats(pages=10, plan="auto", tuned="dp", replans=2, tuning=MEASURED).to_json())
    said = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    assert "allocation method auto" in said
    assert "timed plan dp" in said
    assert "replans 2" in said
    print_stats(Stats().to_json())
    assert "plan" not in capsys.readouterr().err


def test_the_real_command_within_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = moechat.load

    def load(*arguments: Any, **named: Any) -> Any:
        offload = OffloadOptions(pages=160, link=LinkSettings(kind="sim"))
        return real(*arguments, **named, offload=offload)

    monkeypatch.setattr(moechat, "load", load, raising=False)
    monkeypatch.setattr(racing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(racing, "WITHIN", -9.0)  # nothing is ever sure
    monkeypatch.setattr(racing, "_FIRST_TOKENS", 2)
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))

    def run(*options: str) -> str:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        command = ["run", "demo", "Tell me a story.", "--max-tokens", "5", "--seed", "1", "--stats"]
        command += ["--ram", "40G", *options]  # so the store is not mapped
        try:
            assert main(command) == 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        captured = capsys.readouterr()
        assert captured.out == answers.setdefault("answer", captured.out)
        return captured.err

    answers: dict[str, str] = {}
    said = run("--no-tune")
    assert "plan:" not in said
    assert "allocation method" in said
    said = run("--tune")
    assert "(timed in" in said
    assert re.search(r"^\* \w", said, re.MULTILINE), "the winner is marked"
    assert "timed plan" in said
    assert "nothing is remembered" in " ".join(run().split()), "one round decides nothing"
    assert list(tmp_path.glob("state/routing/*.npz")), "routing statistics are saved at the end"
