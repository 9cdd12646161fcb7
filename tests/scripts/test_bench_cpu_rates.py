"""Measuring one core's kernels, and deriving the rates of machines from them."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import profile_rates
import pytest
from places import ROOT, SCRIPTS
from profile_rates import BITS, CLOCK, READ, SHARE, Core, Machine, rewritten

from moechat import _native

SCRIPT = SCRIPTS / "bench" / "cpu_rates"
SAMPLE = (ROOT / "profiles" / "rtx3060-12g.toml").read_text(encoding="utf-8")
# 6 cores, 40.96 GB/s, a link of 23.04 GB/s, 3.5 to 4.4 GHz.
CORE = Core(streamed=5.0, cached=9.0, many=100.0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--mib", "64", "--seconds", "0.01", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_every_kind_of_figure_is_measured_and_rounds_are_added_to_the_file(tmp_path: Path) -> None:
    isa = _native.available_isas()[-1]
    for rounds in (1, 2):
        done = run("--isas", isa, "--json", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "out").read_text())
        assert len(found) == rounds
        assert done.stdout.startswith(f"{rounds} rounds")
    rows = {(row["kind"], row["bits"], row["threads"]): row for row in found[0]}
    counts = {1, _native.num_threads()}
    expected = {("clock", 0, 1)} | {("memory", 0, threads) for threads in counts}
    for bits in BITS:
        expected |= {(kind, bits, threads) for kind in ("streamed", "many") for threads in counts}
        expected.add(("cached", bits, 1))
    assert set(rows) == expected
    assert all(row["isa"] == isa and row["value"] > 0 and row["others"] >= 0 for row in rows.values())
    assert 0.5 < rows["clock", 0, 1]["value"] < 8


def test_an_instruction_set_that_is_not_there_is_an_error() -> None:
    done = run("--isas", "avx9000")
    assert done.returncode != 0
    assert "avx9000" in done.stderr


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(profile_rates, "MEASURED", {"avx2": dict.fromkeys(BITS, CORE)})
    return Machine("rtx3060-12g", tomllib.loads(SAMPLE))


def test_few_threads_are_limited_by_a_core(machine: Machine) -> None:
    found = machine.alone(4, 2)
    assert found.value == 2 * 5.0
    unhidden = 1 / 5 - 1 / READ
    slower = 1 / (1 / READ + unhidden / (2 / 3 * 3.5 / CLOCK))
    assert found.low == pytest.approx(2 * min(slower, 9 * 2 / 3 * 3.5 / CLOCK))
    assert found.high == pytest.approx(2 / (1 / (2 * READ) + unhidden / (4.4 / CLOCK)))
    assert "2 × 5 GB/s of a core" in found.rule


def test_more_threads_than_the_memory_feeds_are_limited_by_its_share(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = dict.fromkeys(BITS, replace(CORE, streamed=9.0, cached=20.0))
    monkeypatch.setattr(profile_rates, "MEASURED", {"avx2": faster})
    found = machine.alone(4, 6)
    assert found.value == pytest.approx(SHARE * 40.96)
    assert found.low == pytest.approx(0.6 * 40.96)
    assert found.high == pytest.approx(0.95 * 40.96)
    assert f"{SHARE} × 40.96 GB/s of the memory" in found.rule


def test_a_busy_link_leaves_less_memory_but_never_more_than_alone(machine: Machine) -> None:
    assert machine.together(4).value == pytest.approx(SHARE * (40.96 - 23.04))
    machine.link = 0.1
    alone, together = machine.alone(4, 6), machine.together(4)
    assert (together.low, together.value, together.high) == pytest.approx(
        (alone.low, 30.0, alone.high), rel=0.01
    )
    assert "as alone" in together.rule


def test_many_tokens_scale_with_cores_and_clock(machine: Machine) -> None:
    found = machine.many(4)
    assert found.value == pytest.approx(6 * 100 * 3.95 / CLOCK, rel=1e-3)
    assert found.low == pytest.approx(6 * 100 * (2 / 3) * 3.5 / CLOCK)
    assert found.high == pytest.approx(6 * 100 * 4.4 / CLOCK)


def test_efficient_cores_count_half_and_half_vectors_as_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(CORE, streamed=6.0, cached=15.0, many=180.0)
    sets = {"avx2-vnni": dict.fromkeys(BITS, CORE), "avx512-vnni": dict.fromkeys(BITS, wide)}
    monkeypatch.setattr(profile_rates, "MEASURED", sets)
    values = tomllib.loads((ROOT / "profiles" / "rtx4070-12g.toml").read_text(encoding="utf-8"))
    hybrid = Machine("rtx4070-12g", values)
    assert hybrid.alone(4, 14).value == 10 * 5.0
    values = tomllib.loads((ROOT / "profiles" / "rtx4090-24g.toml").read_text(encoding="utf-8"))
    halves, whole = Machine("rtx4090-24g", values), Machine("rtx5080-16g", values)
    assert (halves.alone(4, 1).value, whole.alone(4, 1).value) == (5.0, 6.0)
    # Where it is not known to be halved, that is the low end.
    assert halves.many(4).low == whole.many(4).low == pytest.approx(16 * 100 * 4.5 / CLOCK)
    assert halves.many(4).high == whole.many(4).high == pytest.approx(16 * 180 * 5.7 / CLOCK)


def test_a_profile_of_another_order_is_refused() -> None:
    with pytest.raises(ValueError, match="no source kernels"):
        rewritten("rtx3060-12g", SAMPLE.replace('kernels = "', 'kernel = "'))


def test_rates_that_were_edited_are_derived_again() -> None:
    value = Machine("rtx3060-12g", tomllib.loads(SAMPLE)).alone(4, 6).text()
    assert value in SAMPLE
    edited = SAMPLE.replace(value, '{ value = 1, origin = "estimate", source = "a guess" }')
    assert rewritten("rtx3060-12g", edited) == SAMPLE
