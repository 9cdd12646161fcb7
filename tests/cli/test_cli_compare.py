"""``moechat compare``: real runs on the demo, simulations, an interrupt, and errors before any work."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Cli

from moechat.routing import Trace

QUICK = ("--tokens", "4", "--runs", "1")
ELSEWHERE = ("--simulate", "--profile", "rtx3060-12g", "--tokens", "4")
MIXTRAL = ("mixtral-8x7b", *ELSEWHERE, "--systems", "static,on-demand")
TINY = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}


def keys_in_help(cli: Cli) -> dict[str, set[str]]:
    """Keys of the JSON object by the help, and those of the objects in it."""
    text = " ".join(cli.call("compare", "--help").out.decode().split())
    text = text.partition("--json: ")[2].partition(". Times of")[0]
    return {
        name: set(re.findall(r"\w+", re.sub("if measured also|if simulated also", "", inner)))
        for name, inner in re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", text)
    }


def check_json(found: dict[str, Any], said: dict[str, set[str]]) -> None:
    assert set(found) == set(said)
    for name, value in found.items():
        inner = value[0] if isinstance(value, list) and name != "assumptions" else value
        if isinstance(inner, dict):
            assert set(inner) <= said[name], name
    assert set(found["cases"][0]) == said["cases"]
    assert set(found["advice"][0]) == said["advice"]


def test_the_demo_runs_with_each_system_and_the_text_says_which_to_use(cli: Cli) -> None:
    systems = "on-demand,auto,on-demand:gamma=0.5"
    file, picture = cli.directory / "found.json", cli.directory / "found.svg"
    result = cli.call(
        "compare", "demo", *QUICK, "--systems", systems, "--out", str(file), "--plot", str(picture)
    )
    text = result.out.decode()
    assert result.status == 0, result.err
    assert re.search(
        r"2 systems at 3 shares of the experts, 1 run of 4 timed tokens each: about \d+ s", result.err
    )
    tables = text.partition("\n\n")[2].partition("Use ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert tables.isascii()
    assert tables.count("= on-demand:gamma=0.5") == 2
    assert re.search(r"^a  (auto|on-demand) +[\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE)
    assert "The floor, all experts in memory:" in text
    assert re.search(r"^Use (auto, the default|on-demand|.* of the experts)\.$", text, re.MULTILINE)
    for share, size in (("1/8", "1.5"), ("1/4", "3.0"), ("1/2", "6.0")):
        assert re.search(
            rf"^With {share} of the experts \({size} MiB\), \S+ takes [\d.]+ ms", text, re.MULTILINE
        )
    assert "\x1b" not in text
    assert "all experts in memory" in picture.read_text()
    found = json.loads(file.read_text())
    check_json(found, keys_in_help(cli))
    assert found["kind"] == "measured"
    assert found["complete"] is True
    assert found["systems"][0] == {"system": "on-demand", "also": ["on-demand:gamma=0.5"]}
    assert [(case["system"], case["fraction"]) for case in found["cases"]] == [
        (system, share) for share in (0.125, 0.25, 0.5) for system in ("on-demand", "auto")
    ]
    assert all(len(case["runs"]) == 1 and case["ms"] > 0 for case in found["cases"])
    assert found["floor"]["ms"] > 0
    assert found["tokens"] == {"prompt": 64, "warmup": 4, "timed": 4, "runs": 1}


def test_a_budget_of_the_process_is_one_share_and_json_is_all_that_is_printed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process grows from test to test, and with it what a budget leaves for experts.
    monkeypatch.setattr("moechat.planning.machine.process_bytes", lambda: 300 << 20)
    needed = cli.call("compare", "demo", "--ram", "1M").err
    least = re.search(r"(\d+) MiB", needed.partition("least")[2])
    assert least, needed
    budget = f"{int(least[1]) + 1}M"
    done = cli.call("compare", "demo", *QUICK, "--ram", budget, "--systems", "static,auto", "--json", "-q")
    assert done.status == 0, done.err
    assert done.err == ""
    shares = {case["fraction"] for case in json.loads(done.out)["cases"]}
    assert len(shares) == 1
    assert 0 < shares.pop() < 1


def test_ctrl_c_shows_what_has_been_measured_so_far(cli: Cli) -> None:
    file = cli.directory / "found.json"
    process = cli.start(
        *("compare", "demo", "--systems", "on-demand,auto", "--tokens", "8", "--runs", "500"),
        *("--fractions", "1/4", "--out", str(file)),
        forked=True,
    )
    assert process.stderr is not None
    announced = process.stderr.readline().decode()
    assert "500 runs of 8 timed tokens each: about" in announced
    assert "comparing, " in process.stderr.readline().decode()  # the first line of progress
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"error" not in err
    text = out.decode()
    assert text.startswith("Interrupted: this is what was measured before.")
    assert "This rests on the runs before the interrupt." in text
    found = json.loads(file.read_text())
    assert found["complete"] is False
    assert {case["system"] for case in found["cases"]} == {"on-demand", "auto"}
    assert all(1 <= len(case["runs"]) < 500 for case in found["cases"])


def test_on_a_terminal_of_80_columns_nothing_is_wrapped_or_cut(cli: Cli) -> None:
    cli.extra |= {"COLUMNS": "80", "TERM": "xterm-256color"}
    child = cli.terminal("compare", "demo", *QUICK, "--systems", "auto,deepspeed", forked=True)
    text = child.read()
    child.close()
    assert child.exitstatus == 0, text
    assert "\x1b[38;5;" in text
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.rpartition("milliseconds a token")[2])
    lines = [line.rstrip() for line in shown.replace("\r", "").splitlines()]
    assert max(map(len, lines)) <= 80
    assert any("⠉" in line or "⠒" in line or "⣀" in line or "⠤" in line for line in lines)
    assert "…" not in shown


def test_the_simulator_answers_for_another_machine_without_weights(cli: Cli) -> None:
    path = cli.directory / "config.json"
    path.write_text(json.dumps(TINY))
    done = cli.call("compare", str(path), *ELSEWHERE, "--fractions", "1/8,1/4", "--json", "-q")
    assert done.status == 0, done.err
    assert done.err == ""
    found = json.loads(done.out)
    check_json(found, keys_in_help(cli))
    assert found["kind"] == "simulated"
    assert (found["machine"]["name"], found["machine"]["near"]) == ("rtx3060-12g", "gpu")
    assert {entry["system"] for entry in found["systems"]} >= {"auto", "fiddler", "static"}
    floor = found["floor"]["ms"]
    assert all(case["ms"] >= floor and len(case["runs"]) == 1 for case in found["cases"])


def test_simulated_text_is_labelled_and_a_share_beyond_the_gpu_is_left_out(cli: Cli) -> None:
    done = cli.call("compare", *MIXTRAL)
    text = done.out.decode()
    assert done.status == 0, done.err
    assert text.startswith("Simulated, nothing was run. mixtral-8x7b: 32 layers")
    assert "milliseconds a token, simulated" in text
    assert "Simulated, with the figures of" in text
    assert "The routing is drawn" in text
    assert "0.5 of the experts: left out" in done.err
    assert "moechat run" not in text
    assert "`--system static` selects it." in text


def test_a_recorded_trace_needs_no_model(cli: Cli, tmp_path: Path) -> None:
    experts = np.random.default_rng(0).random((30, 32, 8)).argsort(axis=-1)[..., :2].astype(np.int32)
    path = tmp_path / "some.npz"
    Trace(experts, np.array([0, 30]), 8).write(path)
    arguments = ("--simulate", "--profile", "ssd-only-16g", "--trace", str(path), "--fractions", "1/4")
    done = cli.call("compare", *arguments, "--systems", "static,on-demand")
    text = done.out.decode()
    assert done.status == 0, done.err
    assert "mixtral-8x7b: 32 layers" in text
    assert "The routing is that of some.npz." in text
    assert "come from the disk" in text


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ((), 2, "there is no model"),
        (("--simulate",), 2, "there is no model"),
        (("demo", "--systems", "wonder"), 2, "system 'wonder' is not known"),
        (("demo", "--systems", "oracle"), 2, "oracle needs the routing of later tokens"),
        (("demo", "--systems", "auto,auto"), 2, "a system is named twice"),
        (("demo", "--systems", ","), 2, "there is no system"),
        (("demo", "--fractions", "2"), 2, "a fraction is 2"),
        (("demo", "--fractions", "half"), 2, "'half' is not a fraction"),
        (("demo", "--fractions", "1/2", "--ram", "1G"), 2, "--ram and --fractions exclude each other"),
        (("demo", "--ram", "8G"), 2, "experts fit in 8G"),
        (("demo", "--ram", "1M"), 4, "MiB"),
        (("demo", "--runs", "0"), 2, "--runs is 0"),
        (("demo", "--tokens", "1"), 2, "--tokens is 1"),
        (("demo", "--tokens", "5000"), 2, "the context holds 1024"),
        (("demo", "--profile", "rtx3060-12g"), 2, "--profile is for simulations"),
        (("demo", "--trace", "x.npz"), 2, "--trace is for simulations"),
        (("demo", "--plot", "x.bmp"), 2, "x.bmp does not end in"),
        (("demo", "--out", "no/such/file"), 2, "cannot be written"),
        (("no-such-model",), 3, "no-such-model"),
        (("no-such-model", "--simulate", "--profile", "rtx3060-12g"), 3, "no-such-model"),
        (("demo", "--simulate", "--profile", "abacus"), 2, "there is no hardware profile 'abacus'"),
        (("demo", "--simulate"), 2, "this machine has not been measured"),
        (("demo", "--simulate", "--runs", "2"), 2, "--runs is for runs on this machine"),
        (("demo", "--simulate", "--ram", "2G"), 2, "--ram is for runs on this machine"),
        (("--simulate", "--trace", "nowhere.npz"), 2, "there is no trace nowhere.npz"),
    ],
)
def test_invalid_arguments_are_refused(
    cli: Cli, arguments: tuple[str, ...], status: int, reason: str
) -> None:
    result = cli.call("compare", *arguments)
    assert result.status == status, result.err
    assert reason in result.err
    assert result.out == b""


def test_a_reader_that_leaves_early_is_no_error(cli: Cli) -> None:
    done = cli.shell(f"$M compare {' '.join(MIXTRAL)} --fractions 1/4 -q | head -1", forked=True)
    assert done.status == 0, done.err
    assert done.err == ""
