"""``moechat bench``: tables for people, one JSON object for programs, errors before any work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_support import Cli

from moechat import Progress
from moechat.cli.commands.bench import _floor
from moechat.cli.output_file import require_writable
from moechat.cli.terminal.load_progress import LoadProgress

SMALL = ("--prompt-tokens", "8", "--warmup-tokens", "4", "--tokens", "4", "--runs", "1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.bench.speeds._COMPUTE_SECONDS", 0.01)
    monkeypatch.setattr("moechat.bench.speeds._LINK_SECONDS", 0.01)


def test_the_demo_is_measured_with_its_own_routers(cli: Cli) -> None:
    result = cli.call(
        "bench", "demo", *SMALL, "--fractions", "1/4,1/2", "--systems", "on-demand,auto:split=0.5"
    )
    text = result.out.decode()
    assert result.status == 0, result.err
    assert "0.25 of the experts in 3.0 MiB" in text
    assert "0.5 of the experts in 6.0 MiB" in text
    assert text.count("on-demand") == 2
    assert text.count("auto:split=0.5") == 2
    assert "correct predictions of 2, by layer:" in text
    assert "Tokens are given, not sampled: 8 of a prompt, 4 that fill the cache" in text
    assert "0.25 of the experts, run 1 of 1, on-demand:" in result.err
    assert "\x1b" not in text
    tables = [line for line in text.splitlines() if line.startswith(("system", "on-demand", "auto"))]
    assert tables[0].split() == ["system", "first", "token", "ms/token", "speed", "ready"]
    assert max(map(len, tables)) <= 80
    assert re.search(r"^on-demand .* 1\.00x +\d+%$", text, re.MULTILINE)
    assert "--wide shows all columns" in text


def test_json_prints_one_object_and_out_saves_it(cli: Cli) -> None:
    file = cli.directory / "result.json"
    result = cli.call(
        "bench", "demo", *SMALL, "--fractions", "1/2", "--systems", "auto", "--json", "-q", "--out", str(file)
    )
    assert result.status == 0, result.err
    assert result.err == ""
    measured = json.loads(result.out)
    assert measured == json.loads(file.read_text())
    assert measured["model"]["name"] == "demo"
    assert [case["system"] for case in measured["cases"]] == ["auto"]
    assert measured["prediction"]["source"] == "next-router"
    assert len(measured["prediction"]["right_of_top_k"]) == 8
    assert measured["assumptions"]


def keys_in_help(cli: Cli) -> dict[str, set[str]]:
    """Keys that the help says the JSON object has, and those of the objects in it."""
    text = " ".join(cli.run("bench", "--help").out.decode().split())
    text = text.partition("--json: ")[2].partition(". Times have")[0]
    found = {}
    for name, inner in re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", text):
        always = inner.partition(";")[0] if inner else ""
        found[name] = {key.strip() for key in always.split(",") if key.strip()}
        found[f"{name}, all"] = set(re.findall(r"\w+", inner))
    return found


def test_the_help_documents_every_key_of_the_json_object(cli: Cli) -> None:
    said = keys_in_help(cli)
    result = cli.call("bench", "demo", *SMALL, "--fractions", "1/2", "--systems", "auto", "--json", "-q")
    measured = json.loads(result.out)
    assert set(measured) == {name for name in said if not name.endswith(", all")}
    for name, value in measured.items():
        inner = value[0] if name == "cases" else value
        keys = set(inner) if isinstance(inner, dict) else set()
        assert said[name] <= keys, name
        assert keys <= said[f"{name}, all"], name


def test_ram_sets_the_number_of_pages(cli: Cli) -> None:
    result = cli.call("bench", "demo", *SMALL, "--ram", "2M", "--systems", "auto", "--json", "-q")
    assert result.status == 0, result.err
    (case,) = json.loads(result.out)["cases"]
    assert 2 * 2**20 - 25_000 < case["pages_bytes"] <= 2 * 2**20


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name either a model or, with --synthetic, a shape"),
        (("demo", "--synthetic", "olmoe-1b-7b"), "name either a model"),
        (("demo", "--layers", "2"), "they need --synthetic"),
        (("demo", "--ram", "1G", "--fractions", "1/2"), "--ram and --fractions exclude each other"),
        (("demo", "--systems", "wonder"), "system 'wonder' is not known"),
        (("demo", "--link", "carrier-pigeon"), "is not a link"),
        (("demo", "--fractions", "2"), "it must be above 0 and at most 1"),
        (("demo", "--tokens", "1"), "tokens is 1"),
        (("demo", "--routing", "nowhere.npz"), "there is no trace nowhere.npz"),
        (("demo", "--tokens", "5000"), "the context holds 1024"),
        (("--synthetic", "gpt-5"), "there is no shape 'gpt-5'"),
        (("demo", "--out", "no/such/directory/file"), "cannot be written"),
        (("demo", "--out", "."), "cannot be written"),
        (("demo", "--out", "/proc/nope"), "cannot be written"),
        (("demo", "--dtype", "int3"), "--dtype"),
        (("demo", "--dense-bits", "3"), "--dense-bits"),
        (("demo", "--activation-bits", "4"), "--activation-bits"),
        (("demo", "--threads", "0"), "--threads"),
        (("demo", "--bits", "0"), "--bits"),
    ],
)
def test_invalid_arguments_are_refused(cli: Cli, arguments: tuple[str, ...], reason: str) -> None:
    result = cli.call("bench", *arguments)
    assert result.status == 2
    assert reason in result.err
    assert result.out == b""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dtype", "int3"), "--dtype"),
        (("--dense-bits", "3"), "--dense-bits"),
        (("--threads", "0"), "--threads"),
        (("--bits", "0"), "--bits"),
        (("--routing", "nowhere.npz"), "there is no trace nowhere.npz"),
        (("--tokens", "9999999"), "the context holds 4096"),
    ],
)
def test_invalid_arguments_write_no_file(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.delattr("moechat.bench.synthetic_models.synthetic_store")
    result = cli.call("bench", "--synthetic", "olmoe-1b-7b", *arguments)
    assert result.status == 2, result.err
    assert reason in result.err


def test_a_result_that_cannot_be_saved_is_still_printed(cli: Cli) -> None:
    arguments = ("bench", "demo", *SMALL, "--fractions", "1/2", "--systems", "auto", "--json", "-q")
    result = cli.call(*arguments, "--out", "/dev/full")
    assert result.status == 1
    assert "/dev/full cannot be written: No space left on device" in result.err
    assert json.loads(result.out)["cases"]


def test_checking_that_the_output_file_is_writable_does_not_change_it(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    assert require_writable(new) == new
    assert not new.exists()
    assert require_writable(old) == old
    assert old.read_text() == "kept"


def test_progress_names_the_writing_of_random_weights() -> None:
    report = Progress("synthetic", 1 << 20, 1 << 30, "layer 0")
    assert LoadProgress()._line(report, 0.0).startswith("writing random weights, 1.0 MiB of")


def test_a_floor_that_a_system_beats_is_not_reported_as_a_floor() -> None:
    def floor(link: float, compute: float | None) -> str:
        return _floor({"floor_s": {"link": link, "compute": compute}, "tpot_s": {"median": 0.05}}, 0.04)

    assert floor(0.01, 0.03) == "30.0"
    assert floor(0.045, 0.03) == "45.0"
    assert floor(0.01, 0.045) == "10.0"
    assert floor(0.06, 0.03) == "30.0"
    assert floor(0.06, 0.045) == "-"
    assert floor(0.0, None) == "-"


def test_more_memory_than_the_machine_has_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.bench.measure.available_bytes", lambda: 1 << 20)
    result = cli.call("bench", "demo", *SMALL, "--ram", "1T", "--systems", "auto")
    assert result.status == 4, result.err
    assert "1 MiB of memory are free" in result.err


def test_an_unknown_model_is_refused(cli: Cli) -> None:
    assert cli.call("bench", "no-such-model").status == 3


def test_a_synthetic_model_is_written_kept_and_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import moechat.bench.synthetic_models as models

    real = models.load_shape

    def small(name: str, **cuts: int | None) -> models.Shape:
        shape = real(name, **cuts)
        for key, value in {"intermediate_size": 64, "hidden_size": 64, "num_experts": 8}.items():
            setattr(shape.config, key, value)
        return shape

    monkeypatch.setattr(models, "load_shape", small)
    arguments = ("--synthetic", "olmoe-1b-7b", "--layers", "2", "--vocabulary", "300", "--link", "sim:2x")
    result = cli.call("bench", *arguments, *SMALL, "--systems", "auto", "--fractions", "1/2")
    assert result.status == 0, result.err
    kept = cli.home / "cache" / "synthetic" / "olmoe-1b-7b-2l-300v-4bit-r1"
    assert (kept / "manifest.json").is_file()
    text = result.out.decode()
    assert "2 of 16 decoder layers" in text
    assert "300 instead of 50304 tokens" in text
    assert "Weights are random" in text
    assert "there is no locality" in text
    written = (kept / "manifest.json").stat().st_mtime_ns
    elsewhere = cli.directory / "stores"
    assert cli.call("bench", *arguments, *SMALL, "--systems", "auto", "-q").status == 0
    assert (kept / "manifest.json").stat().st_mtime_ns == written
    assert (
        cli.call("bench", *arguments, *SMALL, "--systems", "auto", "-q", "--directory", str(elsewhere)).status
        == 0
    )
    assert Path(elsewhere, kept.name, "manifest.json").is_file()
