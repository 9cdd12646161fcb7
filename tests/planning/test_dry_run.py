"""``moechat run --dry-run`` plans with the options of the run, and shows the plan of ``moechat plan``."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from plan_support import desktop

from moechat import planning
from moechat.cli.app import parse
from moechat.cli.options import PlaceOptions
from moechat.hardware.identity import this_machine
from moechat.hardware.measured_file import Measurement, save_measurement

MEBI = 1 << 20
# Options as they are typed, and as planning receives them.
OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "none": ([], {}),
    "bits": (["--bits", "8"], {"bits": 8}),
    "threads": (["--threads", "7"], {"threads": 7}),
    "dtype": (["--dtype", "float16"], {"dtype": "float16"}),
    "dense_bits": (["--dense-bits", "4"], {"dense_bits": 4}),
    "activation_bits": (["--activation-bits", "16"], {"activation_bits": 16}),
    "kv_bits": (["--kv-bits", "8"], {"kv_bits": 8}),
    "ram": (["--ram", "700M"], {"ram": 700 * MEBI}),
    "system": (["--system", "static"], {"system": "static"}),
    "ctx": (["--ctx", "64"], {"ctx": 64}),
    "device": (["--device", "cuda"], {"device": "cuda"}),
    "vram": (["--vram", "960M"], {"vram": 960 * MEBI}),
    "deterministic": (["--deterministic"], {"deterministic": True}),
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, measured, as if it had a GPU; its memory does not change between two plans."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    figures = desktop()
    links = {"file": figures.links["file"]}
    save_measurement(Measurement(replace(figures, links=links, key=this_machine().key, created="2026-11-21")))
    monkeypatch.setattr("moechat.planning.machine.process_bytes", lambda: 400 * MEBI)
    monkeypatch.setattr("moechat.planning.machine.available_bytes", lambda: 4096 * MEBI)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_dry_run_honours_every_option(
    option: str, machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    received = []
    real = planning.plan

    def plan(model: str, **options: Any) -> planning.Plan:
        received.append((model, options))
        return real(model, **options)

    monkeypatch.setattr(planning, "plan", plan)
    typed, parsed = OPTIONS[option]

    def shown(*arguments: str) -> Any:
        assert parse([*arguments, "--json", *typed])() == 0
        return json.loads(capsys.readouterr().out)

    dry, planned = shown("run", "demo", "--dry-run"), shown("plan", "demo")
    assert received == [("demo", {"profile": None, **parsed})] * 2
    assert dry == planned
    if option in ("bits", "dtype", "dense_bits", "kv_bits", "ram", "system", "ctx", "device", "vram"):
        typed = []
        assert shown("plan", "demo") != planned, "the option changes the plan"


def test_every_shared_option_has_a_case() -> None:
    assert {entry.name for entry in fields(PlaceOptions)} == OPTIONS.keys() - {"none"}
