"""``moechat doctor``: one report, whatever is broken, and nothing in it that a stranger need not know."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import Cli
from hypothesis import given
from hypothesis import strategies as st

from moechat.cli import doctor
from moechat.cli.doctor import Redaction

TOKEN = "hf_AbCdEfGhIjKlMn"


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """With a home of its own."""
    return replace(cli, home=tmp_path / "home")


def report_of(cli: Cli, **environment: str) -> dict:
    result = replace(cli, extra={**cli.extra, **environment}).run("doctor", "--json")
    assert result.status == 0
    assert TOKEN not in result.out.decode()
    return json.loads(result.out)


def test_the_report_has_every_section_and_hides_home_and_token(cli: Cli, tmp_path: Path) -> None:
    result = replace(cli, extra={"HF_TOKEN": TOKEN, "HOME": str(tmp_path)}).run("doctor")
    text = result.out.decode()
    assert result.status == 0
    for title in (
        "moechat",
        "processor",
        "memory",
        "graphics card",
        "files",
        "library",
        "hub",
        "environment",
    ):
        assert f"\n{title}\n" in f"\n{text}"
    assert TOKEN not in text
    assert "(hidden)" in text
    assert str(tmp_path) not in text
    assert "\x1b" not in text, "plain under a pipe"


def test_what_is_broken_is_a_finding_and_keeps_nothing_from_being_told(cli: Cli, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    found = report_of(
        cli, MOECHAT_HOME=str(in_the_way), MOECHAT_ISA="nothing", HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN
    )
    facts = {finding["fact"]: finding for finding in found["findings"]}
    assert any(fact.startswith("files: ") and "not a directory" in fact for fact in facts)
    assert any(fact.startswith("processor: ") and "MOECHAT_ISA" in fact for fact in facts)
    assert any("HF_HUB_OFFLINE" in fact for fact in facts)
    assert all(finding["hint"] for finding in found["findings"])
    assert found["sections"]["moechat"]["python"]
    assert found["sections"]["memory"]["in all"]


def test_damaged_stores_and_leftovers_are_found(cli: Cli) -> None:
    models = Path(cli.environment["MOECHAT_HOME"]) / "data" / "models"
    (models / "org--name-4bit").mkdir(parents=True)
    (models / "org--name-4bit" / "manifest.json").write_text("{")
    (models / ".org--other-4bit.partial").mkdir()
    (models / ".org--other-4bit.partial" / "layer").write_bytes(bytes(3 << 20))
    found = report_of(cli)
    facts = [finding["fact"] for finding in found["findings"]]
    assert "the store org--name-4bit is damaged" in facts
    assert any("unfinished downloads and conversions take 3.0 MiB" in fact for fact in facts)


def test_a_slower_instruction_set_than_there_could_be_is_told(cli: Cli) -> None:
    found = report_of(cli, MOECHAT_ISA="portable")
    if found["sections"]["processor"]["kernels"] == "can run portable":
        pytest.skip("there is no other one")
    assert any("MOECHAT_ISA chooses portable" in finding["fact"] for finding in found["findings"])


def test_a_card_without_what_it_needs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.hardware import gpu

    device = gpu.GpuDevice(
        0, "NVIDIA GeForce GTX 1080", "x", 8 << 30, 7 << 30, capability=(6, 1), lanes=8, lanes_most=16
    )
    monkeypatch.setattr(gpu, "find_gpus", lambda: gpu.GpuReport((device,), "550.1"))
    report = doctor.Report()
    rows: dict[str, str] = {}
    doctor._card(report, rows)
    said = " ".join(finding.fact for finding in report.findings)
    assert "compute capability 6.1" in said
    assert "8 of 16 PCIe lanes" in said
    assert "7.0 GiB of 8.0 GiB free" in rows["card 0"]


def test_numbers_of_ours_are_no_secrets_and_the_same_error_is_told_once(cli: Cli, tmp_path: Path) -> None:
    found = report_of(cli, MOECHAT_MAX_TOKENS="77")
    assert found["sections"]["environment"]["MOECHAT_MAX_TOKENS"] == "77"
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    found = report_of(cli, MOECHAT_HOME=str(in_the_way))
    assert sum("not a directory" in finding["fact"] for finding in found["findings"]) == 1


def test_a_secret_that_json_would_write_otherwise_is_hidden_there_too(cli: Cli) -> None:
    secret = 'quote" and back\\slash'
    result = replace(cli, extra={"OMP_KEY": secret, "HF_NAME": f"with {secret}"}).run("doctor", "--json")
    environment = json.loads(result.out)["sections"]["environment"]
    assert (environment["OMP_KEY"], environment["HF_NAME"]) == ("(hidden)", "with (hidden)")


@given(st.text(alphabet="abcdefgh0123", min_size=8, max_size=20), st.text(max_size=30), st.text(max_size=30))
def test_no_secret_of_the_environment_is_left_in_a_text(secret: str, before: str, after: str) -> None:
    redact = Redaction({"SOME_TOKEN": secret})
    assert secret not in redact(f"{before}{secret}{after}")


def test_names_in_addresses_and_the_home_directory_are_hidden() -> None:
    redact = Redaction({})
    home = os.path.expanduser("~")
    assert redact("http://me:word@proxy.example:8080/x") == "http://(hidden)@proxy.example:8080/x"
    assert redact(f"{home}/models, {home}") == "~/models, ~"
    assert redact(f"{home}other/models") == f"{home}other/models"
