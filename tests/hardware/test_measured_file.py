"""Where measured profiles and times are kept."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from played_card import PlayedCard

from moechat.errors import MoechatError, UsageError
from moechat.hardware.card_rounds import CardRounds
from moechat.hardware.identity import this_machine
from moechat.hardware.measure_budget import Budget
from moechat.hardware.measure_gpu import measure_gpu
from moechat.hardware.measured_file import (
    Measurement,
    load_measured,
    load_measurement,
    profiles_directory,
    save_measurement,
    saved_measurements,
)
from moechat.hardware.profile import Figure, GpuFigures, HardwareProfile, LinkFigures, ModelTimes
from moechat.hardware.times_file import TimesKey, load_times, save_times


def figure(value: float) -> Figure:
    return Figure(value, "measured", "a test")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def measurement() -> Measurement:
    identity = this_machine()
    profile = HardwareProfile(
        name="machine-1",
        title="A machine",
        cpu=identity.cpu,
        cores=2,
        isa="avx2",
        ram=figure(float(32 << 30)),
        ram_bandwidth=figure(40e9),
        expert_rate={4: {1: figure(9e9), 2: figure(17e9)}},
        expert_rate_together={4: figure(12e9)},
        expert_flops={4: figure(3e11)},
        links={
            "file": LinkFigures(
                "file",
                {1 << 18: figure(2e9), 1 << 25: figure(3e9)},
                figure(1e-4),
                figure(1e9),
                {1 << 18: figure(1e-4), 1 << 25: figure(1e-2)},
            )
        },
        gpu=GpuFigures(
            "gpu", *(figure(float(value)) for value in (12 << 30, 11 << 30, 3e11, 5e13, 5e-6)), 4, 16
        ),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key=identity.key,
    )
    return Measurement(
        profile, {"link gpu": "later"}, ("A remark.",), {"cpus": 4, "disk": {"bytes": 7}}, 12.5
    )


def test_a_profile_from_before_latencies_by_size_is_still_read(measurement: Measurement) -> None:
    path = save_measurement(measurement)
    kept = json.loads(path.read_text())
    del kept["profile"]["links"]["file"]["latencies"]
    path.write_text(json.dumps(kept))
    found = load_measured()
    assert found is not None
    link = measurement.profile.links["file"]
    assert found.links["file"] == replace(link, latencies={})


def test_everything_measured_on_a_gpu_is_saved_and_loaded(measurement: Measurement) -> None:
    rounds = CardRounds(PlayedCard(), Budget(), lambda _: None)
    assert measurement.profile.gpu is not None
    gpu = measure_gpu(rounds, measurement.profile.gpu)
    by_size = {1 << 16: figure(2e9), 1 << 20: figure(3e9)}
    link = LinkFigures(
        "gpu",
        by_size,
        figure(2e-5),
        figure(1e9),
        by_depth={size: {1: rate, 16: rate} for size, rate in by_size.items()},
        back=by_size,
        back_together=figure(1e9),
        staged=by_size,
        experts={4: figure(9e9)},
        pinned=figure(1e10),
        pins_more=True,
    )
    # Every field is filled, so that none can be forgotten on the way.
    assert all(getattr(gpu, field.name) not in (None, {}) for field in fields(gpu))
    links = {**measurement.profile.links, "gpu": link}
    saved = replace(measurement, profile=replace(measurement.profile, gpu=gpu, links=links))
    path = save_measurement(saved)
    assert json.loads(path.read_text())["format"] == 2
    found = load_measurement()
    assert found == saved


def test_a_profile_of_format_1_is_read_as_one_without_measurements_of_a_gpu(measurement: Measurement) -> None:
    path = save_measurement(measurement)
    kept = json.loads(path.read_text())
    kept["format"] = 1
    old_gpu = ("name", "vram", "vram_free", "bandwidth", "flops", "launch", "pcie_generation", "pcie_lanes")
    gpu = kept["profile"]["gpu"]
    kept["profile"]["gpu"] = {name: gpu[name] for name in (*old_gpu, "capability")}
    link = kept["profile"]["links"]["file"]
    old_link = ("kind", "bandwidth", "latency", "together", "latencies")
    kept["profile"]["links"]["file"] = {name: link[name] for name in old_link}
    path.write_text(json.dumps(kept))
    assert load_measurement() == measurement


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("expert_rate", {"4": {"0": {"value": 1.0, "origin": "measured", "source": ""}}}),
        ("call", {"value": -1.0, "origin": "measured", "source": ""}),
        ("sms", 0),
        ("unheard", 1),
    ],
)
def test_a_figure_of_a_gpu_that_cannot_be_is_refused(measurement: Measurement, part: str, value: Any) -> None:
    path = save_measurement(measurement)
    kept = json.loads(path.read_text())
    kept["profile"]["gpu"][part] = value
    path.write_text(json.dumps(kept))
    said: list[str] = []
    assert load_measurement(said.append) is None
    assert "is damaged and is ignored" in said[0]


def test_what_was_saved_is_loaded(measurement: Measurement) -> None:
    assert load_measured() is None
    path = save_measurement(measurement)
    assert path.parent == profiles_directory()
    assert load_measurement() == measurement
    assert load_measured() == measurement.profile
    assert not list(path.parent.glob(".*"))
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_the_profile_of_another_machine_is_not_this_ones(measurement: Measurement) -> None:
    other = replace(measurement, profile=replace(measurement.profile, key="0" * 16, created="2020-01-01"))
    save_measurement(other)
    assert load_measured() is None
    save_measurement(measurement)
    assert [item.profile.key for item in saved_measurements()] == [measurement.profile.key, "0" * 16]


def test_a_newer_measurement_takes_the_place_of_the_older(measurement: Measurement) -> None:
    save_measurement(measurement)
    newer = replace(measurement, seconds=1.0)
    save_measurement(newer)
    assert load_measurement() == newer
    assert len(list(profiles_directory().iterdir())) == 1


def _changed(data: dict[str, Any], *path: str, value: Any) -> bytes:
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"{",
        lambda data: b"[]",
        lambda data: b"\xff\xfe",
        lambda data: b"[" * 200_000,
        lambda data: b" " * (5 << 20),
        lambda data: json.dumps(data).encode()[:-20],
        lambda data: _changed(data, "format", value=99),
        lambda data: _changed(data, "kind", value="something else"),
        lambda data: _changed(data, "profile", value=None),
        lambda data: _changed(data, "profile", "key", value="0" * 16),
        lambda data: _changed(data, "profile", "ram_bandwidth", "value", value="fast"),
        lambda data: _changed(data, "profile", "ram_bandwidth", "value", value=-1),
        lambda data: _changed(data, "profile", "ram_bandwidth", "value", value=1e-300),
        lambda data: _changed(data, "profile", "ram_bandwidth", "value", value=1e300),
        lambda data: _changed(data, "profile", "expert_rate", value={"four": {}}),
        lambda data: _changed(data, "profile", "links", "file", "bandwidth", value={}),
        lambda data: _changed(data, "profile", "unknown", value=1),
        lambda data: _changed(data, "missing", value=3),
        lambda data: _changed(data, "remarks", value=3),
        lambda data: _changed(data, "facts", value=3),
        lambda data: _changed(data, "seconds", value=None),
        lambda data: json.dumps({key: data[key] for key in data if key != "facts"}).encode(),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_named(measurement: Measurement, damage: Any) -> None:
    path = save_measurement(measurement)
    path.write_bytes(damage(json.loads(path.read_bytes())))
    said: list[str] = []
    assert load_measured(said.append) is None
    (sentence,) = said
    assert str(path) in sentence
    assert "ignored" in sentence
    assert saved_measurements() == []
    # The next measurement repairs it.
    save_measurement(measurement)
    assert load_measurement() == measurement


def test_a_file_that_is_a_directory_is_ignored_and_named(measurement: Measurement) -> None:
    (profiles_directory() / f"{measurement.profile.key}.json").mkdir(parents=True)
    said: list[str] = []
    assert load_measured(said.append) is None
    assert "cannot be read" in said[0]
    with pytest.raises(MoechatError, match="cannot be written"):
        save_measurement(measurement)
    assert len(list(profiles_directory().iterdir())) == 1


def test_other_files_in_the_directory_are_ignored(measurement: Measurement) -> None:
    save_measurement(measurement)
    (profiles_directory() / "notes.json").write_text("{")
    (profiles_directory() / ".0123456789abcdef.json.x.tmp").write_text("{")
    said: list[str] = []
    assert len(saved_measurements(said.append)) == 1
    assert not said


def test_a_directory_that_cannot_be_written_is_an_error_with_a_hint(
    home: Path, measurement: Measurement
) -> None:
    home.mkdir()
    (home / "data").write_text("a file in the way")
    assert load_measured() is None
    assert saved_measurements() == []
    with pytest.raises(MoechatError, match="cannot be written") as caught:
        save_measurement(measurement)
    assert caught.value.hint is not None
    assert "MOECHAT_HOME" in caught.value.hint


def test_a_full_disk_keeps_the_older_profile(measurement: Measurement) -> None:
    path = save_measurement(measurement)
    code = """
import resource, sys
from dataclasses import fields, replace
from moechat.errors import MoechatError
from moechat.hardware.measured_file import load_measurement, save_measurement
old = load_measurement()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    save_measurement(replace(old, seconds=1.0))
except MoechatError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert "cannot be written: File too large" in done.stdout
    assert load_measurement() == measurement
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_home_that_is_no_directory_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="not a directory"):
        load_measured()


def test_age_is_counted_from_the_measurement(measurement: Measurement) -> None:
    def age(created: str) -> float | None:
        return replace(measurement, profile=replace(measurement.profile, created=created)).age

    # The present is asked for here, not when tests are collected: that may be long ago.
    now = datetime.now(UTC)
    assert age((now - timedelta(hours=2)).isoformat()) == pytest.approx(7200.0, abs=60)
    assert age((now + timedelta(hours=2)).isoformat()) == 0.0
    old = age("2020-01-01")
    assert old is not None
    assert old > 86400 * 365
    assert age("whenever") is None


# ---- times of models

TIMES = ModelTimes(figure(1e-3), figure(2e-3), figure(3e-4))
KEY = TimesKey(
    profile="0" * 16,
    model="f" * 64,
    dtype="bfloat16",
    threads=2,
    bits=4,
    dense_bits=16,
    dense_bytes=1000,
    activation_bits=8,
    kv_bits=16,
)


def test_times_are_kept_by_all_that_they_depend_on() -> None:
    assert load_times(KEY) is None
    save_times(KEY, TIMES)
    assert load_times(KEY) == TIMES
    others = [
        replace(KEY, profile="1" * 16),
        replace(KEY, model="e" * 64),
        replace(KEY, dtype="float32"),
        replace(KEY, threads=1),
        replace(KEY, bits=2),
        replace(KEY, dense_bytes=999),
    ]
    assert [load_times(other) for other in others] == [None] * 6
    for at, other in enumerate(others):
        save_times(other, replace(TIMES, head=figure(at)))
    assert load_times(KEY) == TIMES
    assert [found.head.value for other in others if (found := load_times(other))] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"{",
        lambda data: _changed(data, "format", value=99),
        lambda data: _changed(data, "key", "bits", value=8),
        lambda data: _changed(data, "times", "moe", "value", value=-1),
        lambda data: _changed(data, "times", "moe", "value", value=True),
        lambda data: _changed(data, "times", "moe", "origin", value="rumour"),
        lambda data: _changed(data, "times", "tail", value=None),
        lambda data: _changed(data, "times", "moe", value=3),
        lambda data: _changed(data, "times", value=None),
    ],
)
def test_damaged_times_are_ignored_and_named(damage: Any) -> None:
    save_times(KEY, TIMES)
    KEY.path.write_bytes(damage(json.loads(KEY.path.read_bytes())))
    said: list[str] = []
    assert load_times(KEY, said.append) is None
    assert str(KEY.path) in said[0]


def test_times_are_not_listed_as_profiles(measurement: Measurement) -> None:
    save_measurement(measurement)
    save_times(replace(KEY, profile=measurement.profile.key), TIMES)
    assert len(saved_measurements()) == 1
