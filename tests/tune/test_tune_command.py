"""``moechat tune`` as a program: its results, Ctrl-C, and errors before any work."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from cli_support import PATIENCE_S, PROGRAM, Cli
from terminal_support import Terminal
from tune_support import SMALL, write_data, write_model

from moechat.cli.commands.tune import render
from moechat.tune.measure import Measurement
from moechat.tune.run import TuneResult

FAST = ["--batch", "3", "--max-tokens", "40", "--lora-rank", "2", "--preload-hidden", "8", "--cpu"]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    found = Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))
    write_model(found.directory / "model")
    write_data(found.directory / "data.jsonl")
    return found


def test_a_model_is_tuned_and_then_runs(cli: Cli) -> None:
    done = cli.run("tune", "./model", "--data", "data.jsonl", "--epochs", "1", "--json", *FAST, forked=True)
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert facts["out"] == str(cli.directory / "model-tuned")
    assert facts["settings"]["learning_rate"] == 1e-5
    assert facts["settings"]["preload_hidden"] == 8
    assert facts["before"]["misses"].keys() == facts["after"]["misses"].keys()
    assert "moechat run" in done.err
    again = cli.run("tune", "./model", "--data", "data.jsonl", forked=True)
    assert again.status == 2
    assert "model-tuned already exists" in again.err
    answer = cli.run("run", "./model-tuned", "hello", "--max-tokens", "2", "-q", forked=True)
    assert answer.status == 0, answer.err


def test_ctrl_c_exits_with_130_and_the_same_command_goes_on(cli: Cli) -> None:
    command = ["tune", "./model", "--data", "data.jsonl", "--out", "stopped", "--epochs", "400"]
    process = cli.start(*command, "--no-preload", "--save-every", "0", *FAST, forked=True)
    state = cli.directory / ".stopped.tuning" / "state.pt"
    assert process.stderr is not None
    # The first notice of a step comes after ten seconds; the state shows earlier that steps are under way.

    began = time.monotonic()
    while not state.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() - began < 120
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert "stopped; the same command goes on" in err.decode()
    assert "Traceback" not in err.decode()
    assert not (cli.directory / "stopped").exists()
    other = cli.run(*command, "--gamma", "0.5", *FAST, "--no-preload", forked=True)
    assert other.status == 2
    assert "gamma was 0.9, is 0.5" in other.err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["./model"], 2, "Missing option '--data'"),
        (["./none", "--data", "data.jsonl"], 3, "there is no directory"),
        (["./model", "--data", "none.jsonl"], 2, "there is no file none.jsonl"),
        (["./model", "--data", "data.jsonl", "--gamma", "2"], 2, "--gamma is 2.0"),
        (["./model", "--data", "data.jsonl", "--learning-rate", "0"], 2, "--learning-rate is 0.0"),
        (["./model", "--data", "data.jsonl", "--initial", "warm"], 2, "choose one of: fill, uniform"),
        (["./model", "--data", "data.jsonl", "--base-router", "x"], 2, "choose one of: model, router"),
        (["./model", "--data", "data.jsonl", "--micro-batch", "0"], 2, "--micro-batch is 0"),
        (["./model", "--data", "data.jsonl", "--out", "none/out"], 2, "there is no directory"),
    ],
)
def test_wrong_arguments_are_named(cli: Cli, arguments: list[str], status: int, said: str) -> None:
    done = cli.run("tune", *arguments, forked=True)
    assert (done.status, done.out) == (status, b"")
    assert said in done.err
    assert "Traceback" not in done.err


def test_bad_data_is_named_by_line(cli: Cli) -> None:
    (cli.directory / "bad.jsonl").write_text('{"text": "good"}\n{"prompt": "x"}\n')
    done = cli.run("tune", "./model", "--data", "bad.jsonl", "--out", "bad", *FAST, forked=True)
    assert done.status == 2
    assert "bad.jsonl, line 2: it has prompt but none of answer" in done.err
    assert 'hint: write one JSON object per line: {"messages":' in done.err


def test_the_result_is_shown_as_lines() -> None:
    before, after = Measurement(4, {4: 1.2, 8: 0.6}, 3, 3.5), Measurement(4.04, {4: 0.6, 8: 0.3}, 2, 3.25)
    result = TuneResult("m", Path("/out"), SMALL, 90, 10, before, after, 0.5, 0.4, 61.0, 1, True)
    text = render(result)
    assert "perplexity" in text
    assert "1.200 -> 0.600" in text
    assert "-50.0%" in text
    assert "first by the prompt: 50.0%, by popularity: 40.0%" in text


def test_a_terminal_shows_a_bar_with_the_losses_that_leaves_nothing_behind(cli: Cli) -> None:
    command = [*PROGRAM, "tune", "./model", "--data", "data.jsonl", "--out", "shown", "--epochs", "30", *FAST]
    terminal = Terminal(
        command,
        cwd=cli.directory,
        environment=cli.environment,
        columns=120,
        rows=50,
        patience_s=PATIENCE_S,
    )
    try:
        terminal.until(lambda: "tuning" in terminal.shown and ", order " in terminal.shown)
        assert " of 120, loss " in terminal.shown
        assert terminal.end() == 0
        assert ", order " not in terminal.shown
        assert "perplexity" in terminal.shown
    finally:
        terminal.close()
