"""``moechat simulate``: the real program, its results, and its errors."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cli_support import Cli

from moechat.routing import Trace

REQUIRED = ("system", "fraction", "hit_rate", "top_hit_rate", "tpot_ms", "stall_ms", "bytes_per_token")
PROFILE = ("--profile", "rtx3060-12g")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace in the shape of Mixtral."""
    experts = np.random.default_rng(0).random((300, 32, 8)).argsort(axis=-1)[..., :2].astype(np.int32)
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    Trace(experts, np.array([0, 150, 300]), 8).write(path)
    return str(path)


@pytest.fixture
def tiny(trace: str, cli: Cli) -> tuple[str, ...]:
    """Arguments for a model that is built quickly."""
    config = {
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
    path = cli.directory / "config.json"
    path.write_text(json.dumps(config))
    return (trace, "--model", str(path), *PROFILE)


def test_json_has_one_object_for_each_system_and_fraction(cli: Cli, tiny: tuple[str, ...]) -> None:
    done = cli.run(
        "simulate",
        *tiny,
        "--systems",
        "on-demand,moepic,auto:lookahead=2",
        "--fractions",
        "0.25,1/2",
        "--json",
        forked=True,
    )
    assert done.status == 0, done.err
    cases = json.loads(done.out)
    assert [(case["system"], case["fraction"]) for case in cases] == [
        (system, fraction)
        for fraction in (0.25, 0.5)
        for system in ("on-demand", "moepic", "auto:lookahead=2")
    ]
    for case in cases:
        assert set(REQUIRED) <= set(case)
        assert case["tpot_ms"] > case["stall_ms"] >= 0
        assert case["model"] == "config.json"
        assert case["profile"] == "rtx3060-12g"
        assert (case["warmup"], case["tokens"]) == (100, 200)
    assert "0.25 of the experts, on-demand:" in done.err


def test_every_key_is_described(cli: Cli, tiny: tuple[str, ...]) -> None:
    from moechat.simulate import compare

    done = cli.call("simulate", *tiny, "--systems", "auto", "--fractions", "0.5", "--json", "-q")
    assert done.status == 0, done.err
    assert done.err == ""
    (case,) = json.loads(done.out)
    for key in (*case, *case["costs"]):
        assert f"``{key}``" in str(compare.__doc__), key


def test_the_table_names_the_simulated_case_and_its_assumptions(cli: Cli, tiny: tuple[str, ...]) -> None:
    done = cli.call("simulate", *tiny, "--systems", "on-demand,auto", "--fractions", "0.5", "-q")
    text = done.out.decode()
    assert done.status == 0, done.err
    assert "config.json, 4 bits" in text
    assert "0.5 of the experts in" in text
    assert "was mapped to 2 layers" in text
    assert "200 tokens of trace.npz are timed. The 100 before them fill the cache" in text
    assert "Predictions are simulated" in text
    assert "\x1b" not in text
    tables = [line for line in text.splitlines() if line.startswith(("system", "on-demand", "auto"))]
    assert tables[0].split() == ["system", "ms/token", "speed", "tokens/s", "ready"]
    assert max(map(len, tables)) <= 80
    wide = cli.call("simulate", *tiny, "--systems", "on-demand,auto", "--fractions", "0.5", "-q", "--wide")
    head = next(line for line in wide.out.decode().splitlines() if line.startswith("system"))
    assert "full/ahead/top/miss %" in head
    assert "split" in head
    assert "--wide" not in wide.out.decode()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--systems", "nonsense"), 2, "system 'nonsense' is not known"),
        (("--systems", "auto:split=2"), 2, "split is 2"),
        (("--fractions", "1.5"), 2, "a fraction is 1.5"),
        (("--fractions", "half"), 2, "'half' is not a fraction"),
        (("--accuracy", "2"), 2, "accuracy is 2"),
        (("--tokens", "0"), 2, "tokens is 0"),
        (("--warmup", "300"), 2, "300 of which come before timing"),
        (("--near", "moon"), 2, "the near tier is 'moon'"),
        (("--model", "nobody/knows"), 2, "there is no model 'nobody/knows'"),
        (("--profile", "amiga"), 2, "amiga"),
        (("--bits", "5"), 2, "5 bits are not supported"),
        (("--link", "fast"), 2, "fast"),
        (("--plot", "/nowhere/plot.png"), 2, "/nowhere/plot.png"),
        (("--plot", "plot.bmp"), 2, "plot.bmp does not end in .png"),
    ],
)
def test_bad_requests_end_with_an_exit_status_and_a_message(
    cli: Cli, tiny: tuple[str, ...], arguments: tuple[str, ...], status: int, message: str
) -> None:
    if "/nowhere/plot.png" in arguments:
        pytest.importorskip("matplotlib")
    done = cli.call("simulate", *tiny, *arguments)
    assert done.status == status
    assert message in done.err
    assert done.out == b""
    assert "Traceback" not in done.err


def test_a_damaged_trace_is_refused(cli: Cli, tiny: tuple[str, ...]) -> None:
    damaged = cli.directory / "damaged.npz"
    damaged.write_bytes(Path(tiny[0]).read_bytes()[:-300])
    for name in (str(damaged), "missing.npz"):
        done = cli.call("simulate", name, *tiny[1:])
        assert done.status == 2
        assert name in done.err


def test_a_missing_trace_is_reported_before_the_machine_is_examined(cli: Cli) -> None:
    done = cli.call("simulate", "missing.npz")
    assert done.status == 2
    assert "there is no trace missing.npz" in done.err
    assert "measured" not in done.err


def test_without_a_profile_this_machine_must_have_been_measured(cli: Cli, trace: str) -> None:
    done = cli.call("simulate", trace)
    assert done.status == 2
    assert "this machine has not been measured" in done.err
    assert "rtx3060-12g" in done.err


def test_a_plot_of_one_budget_has_a_bar_for_each_system(cli: Cli, tiny: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    drawn = {}
    for fractions in ("0.5", "0.5,0.25"):
        picture = cli.directory / "plot.svg"
        done = cli.call(
            "simulate", *tiny, "--systems", "on-demand,auto", "--fractions", fractions, "-q",
            "--json", "--plot", str(picture),
        )  # fmt: skip
        assert done.status == 0, done.err
        drawn[fractions] = picture.read_text()
    ways = [case["tpot_ms"] for case in json.loads(done.out) if case["fraction"] == 0.5]
    # Text in an svg is drawn as paths, with the text beside it as a comment.
    comments = {name: re.findall(r"<!-- (.*?) -->", text) for name, text in drawn.items()}
    assert {"on-demand", "auto", *(f"{value:.4g}" for value in ways)} <= set(comments["0.5"])
    assert any(text.startswith("milliseconds per token, with") for text in comments["0.5"])
    assert "milliseconds per token" in comments["0.5,0.25"]


def test_a_plot_is_drawn(cli: Cli, tiny: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    picture = cli.directory / "plot.png"
    done = cli.call("simulate", *tiny, "--json", "-q", "--plot", str(picture))
    assert done.status == 0, done.err
    assert json.loads(done.out)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 800
    assert height > 500


def test_without_matplotlib_a_plot_is_refused_before_anything_is_simulated(
    cli: Cli, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    done = cli.call("simulate", *tiny, "--plot", "plot.png")
    assert done.status == 2
    assert "matplotlib" in done.err
    assert 'pip install "moechat[plot]"' in done.err
    assert not (cli.directory / "plot.png").exists()


def test_ctrl_c_ends_the_command_without_a_traceback(cli: Cli, tiny: tuple[str, ...]) -> None:
    # Long enough that the signal comes while the native code is at work.
    experts = np.random.default_rng(0).random((30_000, 2, 8)).argsort(axis=-1)[..., :2].astype(np.int32)
    experts = np.tile(experts, (5, 1, 1))
    Trace(experts, np.array([0, len(experts)]), 8).write(cli.directory / "long.npz")
    process = cli.start(
        "simulate",
        "long.npz",
        *tiny[1:],
        *("--systems", "on-demand,deepspeed", "--tokens", "140000", "--warmup", "10"),
        *("--fractions", "0.25,0.5"),
        forked=True,
    )
    assert process.stderr is not None
    assert b"on-demand:" in process.stderr.readline()
    time.sleep(0.1)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 20
    assert out == b""
    assert b"Traceback" not in err
