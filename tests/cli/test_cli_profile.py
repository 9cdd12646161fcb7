"""``moechat profile``: measured once, kept, shown; interrupted without a trace."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import PATIENCE_S, Cli
from fake_nvml import one_gpu_here
from played_card import PlayedCard

from moechat.bench import model_times
from moechat.cli.commands import profile as command
from moechat.hardware import measure as room
from moechat.hardware.measure_budget import LARGE_BYTES, Budget

SHORT = Budget(
    scratch_bytes=2 * LARGE_BYTES,
    link_seconds=0.05,
    latency_seconds=0.01,
    memory_bytes=64 << 20,
    stream_seconds=0.02,
    compute_seconds=0.02,
    many_seconds=0.0,
    together_seconds=0.05,
    bits=(2, 4),
)


@pytest.fixture
def own(tmp_path: Path, cli: Cli) -> Cli:
    """The program with a library that nobody has measured yet."""
    return replace(cli, home=tmp_path / "home")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Path:
    """A library of a machine that was measured."""
    home = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "Budget", lambda: SHORT)
        assert replace(cli, home=home).call("profile", "-q").status == 0
    return home


@pytest.fixture
def known(own: Cli, measured: Path) -> Cli:
    """The program with a copy of that library."""
    shutil.copytree(measured, own.home)
    return own


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls inside this process measure for a second; the real program does for many."""
    monkeypatch.setattr(room, "Budget", lambda: SHORT)


def test_a_machine_is_measured_once_and_then_shown_from_the_file(own: Cli) -> None:
    first = own.call("profile")
    assert first.status == 0, first.err
    assert "measuring this machine" in first.err
    assert "saved in" in first.err
    second = own.call("profile")
    assert second.err == ""
    assert b"measured just now" in second.out
    text = second.out.decode()
    for word in ("processor", "memory", "disk", "GPU", "256 KiB", "latency", "GB/s", "GFLOP/s", "1 thread"):
        assert word in text, word
    assert "\x1b" not in text
    assert (
        first.out.decode().partition("\n")[2].partition("\n")[2] == text.partition("\n")[2].partition("\n")[2]
    )


def test_figures_are_aligned_at_the_right(known: Cli) -> None:
    lines = known.call("profile", "-q").out.decode().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("bits"))
    ends = {
        tuple(match.end() for match in re.finditer(r"GB/s|GFLOP/s", line)) for line in lines[at + 1 : at + 3]
    }
    assert len(ends) == 1


def test_latency_is_shown_for_every_transfer_size(known: Cli) -> None:
    link = json.loads(known.call("profile", "--json").out)["profile"]["links"]["file"]
    assert list(link["latencies"]) == list(link["bandwidth"]) == ["262144", "4194304", "33554432"]
    assert link["latency"] == link["latencies"]["262144"]
    (file,) = (known.home / "data" / "profiles").glob("*.json")
    kept = json.loads(file.read_text())
    waits = {"262144": 0.000_41, "4194304": 0.002_34, "33554432": 0.019_87}
    figures = kept["profile"]["links"]["file"]["latencies"]
    for size, seconds in waits.items():
        figures[size]["value"] = seconds
    file.write_text(json.dumps(kept))
    assert _latency_row(known) == "0.41 ms 2.34 ms 19.87 ms"
    del kept["profile"]["links"]["file"]["latencies"]  # as earlier versions kept it
    kept["profile"]["links"]["file"]["latency"]["value"] = 0.000_52
    file.write_text(json.dumps(kept))
    assert _latency_row(known) == "0.52 ms - -"


def _latency_row(cli: Cli) -> str:
    lines = cli.call("profile", "-q").out.decode().splitlines()
    (row,) = (line for line in lines if line.lstrip().startswith("latency, idle"))
    return " ".join(row.split()[2:])


def test_json_has_the_documented_keys_and_says_whether_it_is_fresh(own: Cli) -> None:
    first = json.loads(own.call("profile", "--json", "-q").out)
    second = json.loads(own.call("profile", "--json").out)
    assert (first["fresh"], second["fresh"]) == (True, False)
    assert set(first) == {
        "format",
        "kind",
        "key",
        "profile",
        "missing",
        "remarks",
        "facts",
        "seconds",
        "age_s",
        "fresh",
        "model_times",
    }
    assert first["profile"] == second["profile"]
    assert first["profile"]["links"]["file"]["bandwidth"]["262144"]["value"] > 0
    assert first["model_times"] is None
    if first["profile"]["gpu"] is None:
        assert first["missing"]["gpu"]
    else:
        assert first["missing"]["link gpu"]


@pytest.fixture
def with_gpu(own: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The program on a machine with a GPU whose speeds are known."""
    small = {"gpu_cell_seconds": 0.01, "gpu_together_seconds": 0.02, "gpu_link_bytes": 8 << 20}
    sizes = {"gpu_transfers": (64 << 10, 1 << 20), "pin_chunk": 8 << 20, "pin_most": 16 << 20}
    monkeypatch.setattr(room, "Budget", lambda: replace(SHORT, **small, **sizes))
    with one_gpu_here(monkeypatch):
        yield own


def test_the_figures_of_a_gpu_are_shown(with_gpu: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_open_card", lambda device: PlayedCard(fails=("graph",)))
    done = with_gpu.call("profile", "-q")
    assert done.status == 0, done.err
    text = " ".join(done.out.decode().split())
    for words in (
        "memory to GPU 1 in flight 4 in flight",
        "compute capability 8.6, 28 SMs, 3.0 MiB of L2",
        "experts of a layer 35.0 µs",
        "dense, 4 bits 2",
        "GPU, expert kernels bits 1 token 2 tokens",
        "pinned memory at least 16.0 MiB",
        "CUDA context 300 MiB",
        "gpu graphs: not measured: graph does not work on this GPU",
    ):
        assert words in text, words
    assert "GPU estimates" not in text
    gpu = json.loads(with_gpu.call("profile", "--json").out)["profile"]["gpu"]
    assert gpu["expert_rate"]["4"]["512"]["origin"] == "measured"
    assert gpu["graph_node"] is None
    help_text = with_gpu.call("profile", "--help").out.decode()
    link = json.loads(with_gpu.call("profile", "--json").out)["profile"]["links"]["gpu"]
    for key in (*gpu, *link):
        assert re.search(rf"\b{key}\b", help_text), key


def test_a_gpu_that_cannot_be_used_is_shown_as_estimated(with_gpu: Cli) -> None:
    done = with_gpu.call("profile", "-q")  # torch finds no GPU here
    assert done.status == 0, done.err
    assert b"memory to GPU: not measured: " in done.out
    assert b"GPU estimates" in done.out


def test_refresh_measures_again(known: Cli) -> None:
    (file,) = (known.home / "data" / "profiles").glob("*.json")
    kept = json.loads(file.read_text())
    kept["seconds"] = 12345.0
    file.write_text(json.dumps(kept))
    assert b"in 3:25:45 h" in known.call("profile").out
    assert known.call("profile", "--refresh", "-q").status == 0
    assert json.loads(file.read_text())["seconds"] < 12345


def test_a_damaged_file_is_measured_again_with_a_notice(known: Cli) -> None:
    (file,) = (known.home / "data" / "profiles").glob("*.json")
    file.write_text("{")
    done = known.call("profile")
    assert done.status == 0
    assert "is damaged and is ignored" in done.err
    assert json.loads(file.read_text())["profile"]


def test_the_list_names_saved_and_reference_profiles(own: Cli, measured: Path) -> None:
    empty = own.call("profile", "--list")
    assert empty.status == 0
    assert b"no machine has been measured yet" in empty.out
    assert b"rtx3060-12g" in empty.out
    shutil.copytree(measured, own.home)
    assert b"this machine" in own.call("profile", "--list").out
    found = json.loads(own.call("profile", "--list", "--json").out)
    (saved,) = found["saved"]
    assert saved["current"] is True
    assert saved["age_s"] < 600
    assert all(item["title"] for item in found["reference"])


def test_a_profile_of_other_hardware_is_listed_but_not_used(known: Cli) -> None:
    (file,) = (known.home / "data" / "profiles").glob("*.json")
    text = file.read_text().replace(file.stem, "0" * 16)
    file.with_name("0" * 16 + ".json").write_text(text)
    file.unlink()
    found = json.loads(known.call("profile", "--list", "--json").out)
    assert [item["current"] for item in found["saved"]] == [False]
    assert "measuring this machine" in known.call("profile").err


def test_figures_that_cannot_be_saved_are_still_printed(own: Cli) -> None:
    (own.home / "data").mkdir(parents=True)
    (own.home / "data" / "profiles").write_text("a file in the way")
    done = own.call("profile")
    assert done.status == 0
    assert "the profile was not saved" in done.err
    assert "MOECHAT_HOME" in done.err
    assert b"GB/s" in done.out


def test_a_part_that_was_not_measured_says_why(own: Cli) -> None:
    own.home.mkdir()
    (own.home / "data").write_text("a file in the way")
    done = own.call("profile")
    assert done.status == 0
    assert b"disk to memory: not measured: nothing can be written in" in done.out
    assert b"expert kernels" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--list", "--refresh"), "--list measures nothing"),
        (("--list", "--model", "demo"), "--list measures nothing"),
        (("--bits", "4"), "need --model"),
        (("--model", "demo", "--bits", "5"), "--bits is 5"),
        (("--model", "demo", "--threads", "0"), "--threads is 0"),
    ],
)
def test_conflicting_options_are_refused(own: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = own.call("profile", *arguments)
    assert done.status == 2
    assert said in done.err
    assert not own.home.exists()


def test_a_missing_model_is_refused_before_measuring(own: Cli) -> None:
    done = own.call("profile", "--model", "./nowhere")
    assert done.status == 3
    assert not (own.home / "data" / "profiles").exists()


def test_a_home_that_is_not_a_directory_is_refused(own: Cli) -> None:
    own.home.write_text("a file")
    done = own.call("profile")
    assert done.status == 2
    assert "not a directory" in done.err


def test_the_times_of_a_model_are_shown_and_saved(
    model: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = functools.partial(model_times.measure_model_times, seconds=0.2)
    monkeypatch.setattr(model_times, "measure_model_times", short)
    done = cli.call("profile", "--model", model, "--json", "-q")
    assert done.status == 0, done.err
    times = json.loads(done.out)["model_times"]
    assert times["moe"]["origin"] == "measured"
    assert times["moe"]["value"] > 0
    assert times["expert_layers"] >= 1
    assert list((cli.home / "data" / "profiles").glob("*.times/*.json"))
    table = cli.call("profile", "--model", model).out.decode()
    assert "T_moe" in table
    assert "a token with all experts in memory" in table


def test_without_a_model_torch_is_not_loaded(own: Cli) -> None:
    code = (
        "import sys; from moechat.hardware import measure as room; from tests_budget import SHORT; "
        "room.Budget = lambda: SHORT; from moechat.cli.main import main; "
        "status = [main(['profile', '-q']), main(['profile', '--list'])]; "
        "sys.exit('torch' in sys.modules or any(status))"
    )
    budget = own.home.parent / "tests_budget.py"
    budget.write_text(f"from moechat.hardware.measure_budget import Budget\nSHORT = {SHORT!r}\n")
    environment = {**own.environment, "PYTHONPATH": str(budget.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=own.directory,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("number", "status", "wait_s"),
    [(signal.SIGINT, 130, 0.2), (signal.SIGINT, 130, 2.0), (signal.SIGTERM, 143, 1.0)],
)
def test_an_interrupt_leaves_no_file(own: Cli, number: int, status: int, wait_s: float) -> None:
    process = own.start("profile")
    assert process.stderr is not None
    assert b"measuring this machine" in process.stderr.readline()
    time.sleep(wait_s)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, err
    assert (out, err) == (b"", b"")
    files = [entry for _, _, names in os.walk(own.home) for entry in names]
    assert files == []


def test_a_terminal_shows_the_measured_parts_and_gets_its_cursor_back(own: Cli) -> None:
    child = own.terminal("profile")
    child.expect("measuring this machine, about 20 seconds: ")
    child.expect("disk: |memory: |CPU: ")
    child.sendintr()
    child.expect("\x1b\\[\\?25h")
    child.wait()
    assert child.exitstatus == 130


def test_a_list_to_a_closed_pipe_ends_quietly(own: Cli) -> None:
    done = own.shell("$M profile --list | true")
    assert done.status == 0
    assert done.err == ""


def test_a_narrow_terminal_truncates_no_figure(known: Cli) -> None:
    page = known.terminal_shell("stty cols 40; $M profile")
    page.expect("expert kernels")
    text = page.read()
    page.wait()
    assert page.exitstatus == 0
    profile = json.loads(known.call("profile", "--json").out)["profile"]
    rates = [rate for by_threads in profile["expert_rate"].values() for rate in by_threads.values()]
    rates += profile["expert_rate_together"].values()
    for rate in rates:
        assert f"{rate['value'] / 1e9:.2f}" in text
    assert text.count("GB/s") == len(rates)


def test_help_documents_the_keys(known: Cli) -> None:
    text = " ".join(known.call("profile", "--help").out.decode().split())
    shown = json.loads(known.call("profile", "--json").out)
    listed = json.loads(known.call("profile", "--list", "--json").out)
    link = shown["profile"]["links"]["file"]
    for key in (*shown, *shown["profile"], *listed, *shown["profile"]["ram"], *link):
        assert re.search(rf"\b{key}\b", text), key
