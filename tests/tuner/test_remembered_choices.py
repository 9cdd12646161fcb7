"""Tests of the file of saved times: budgets, damage, versions, unwritable directories."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moechat.trials import Comparison
from moechat.tuner import Remembered, TuningKey, recall, remember, remembered

KEY = TuningKey("machine", "weights", 4, 2, "float32", "auto", "0.1.0", 16, 1000, 8, 16, "ram")


def session(seed: int) -> Comparison:
    times = Comparison()
    for number in range(10):
        times.add("computed", 0.02 + 0.001 * (number + seed), number % 3)
        times.add("dp", 0.01 + 0.002 * (number % 4), number % 5)
    return times


ENTRY = Remembered(
    pages=1000,
    may_map=False,
    measured="2026-11-21T20:00:00+00:00",
    sessions=(session(0), session(5)),
)


def plain(entry: Remembered | None) -> object:
    """Values that compare."""
    return entry and (entry.pages, entry.may_map, entry.measured, [each.sums() for each in entry.sessions])


def recalled(
    directory: Path, *, pages: int = 1000, may_map: bool = False, key: TuningKey = KEY
) -> Remembered | None:
    return recall(directory, key, pages=pages, may_map=may_map)


def test_a_saved_choice_is_found_again(tmp_path: Path) -> None:
    assert recalled(tmp_path / "tuning") is None
    remember(tmp_path / "tuning", KEY, ENTRY)
    found = recalled(tmp_path / "tuning")
    assert plain(found) == plain(ENTRY)
    assert found is not None
    assert found.sessions[0].gap("dp", "computed") == ENTRY.sessions[0].gap("dp", "computed")
    assert [path.suffix for path in (tmp_path / "tuning").iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("pages", "found"), [(1000, True), (960, True), (1050, True), (900, False), (1100, False)]
)
def test_a_choice_holds_for_slightly_different_budgets(tmp_path: Path, pages: int, found: bool) -> None:
    remember(tmp_path, KEY, ENTRY)
    assert (recalled(tmp_path, pages=pages) is not None) == found
    assert recalled(tmp_path, pages=pages, may_map=True) is None


def test_each_budget_has_its_own_choice_and_the_newest_replaces_it(tmp_path: Path) -> None:
    for pages in (1000, 2000, 4000):
        remember(tmp_path, KEY, replace(ENTRY, pages=pages, measured=str(pages)))
    remember(tmp_path, KEY, replace(ENTRY, pages=2010, measured="newer"))
    assert [getattr(recalled(tmp_path, pages=pages), "measured", None) for pages in (1000, 2000, 4000)] == [
        "1000",
        "newer",
        "4000",
    ]
    for pages in range(1, 60):
        remember(tmp_path, KEY, replace(ENTRY, pages=pages * 10_000))
    (path,) = tmp_path.iterdir()
    assert len(json.loads(path.read_text())["entries"]) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another"},
        {"model": "another"},
        {"bits": 8},
        {"threads": 4},
        {"dtype": "bfloat16"},
        {"settings": "moepic"},
        {"version": "0.2.0"},
    ],
)
def test_a_choice_does_not_hold_for_other_keys(tmp_path: Path, change: dict[str, object]) -> None:
    remember(tmp_path, KEY, ENTRY)
    assert recalled(tmp_path, key=replace(KEY, **change)) is None  # type: ignore[arg-type]


def test_files_of_earlier_versions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MAX_FILES", 3)
    for version in range(6):
        remember(tmp_path, replace(KEY, version=str(version)), ENTRY)
        for path in tmp_path.iterdir():
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    dead, writing = tmp_path / "x1.tmp", tmp_path / "x2.tmp"
    for path in (dead, writing):
        path.write_text("{")
    os.utime(dead, (1.0, 1.0))
    remember(tmp_path, replace(KEY, version="6"), ENTRY)
    kept = [version for version in range(7) if recalled(tmp_path, key=replace(KEY, version=str(version)))]
    assert kept == [4, 5, 6]
    assert not dead.exists()
    assert writing.exists(), "another process may be about to put it in its place"


def damaged(text: str) -> list[bytes]:
    content = json.loads(text)

    def changed(**values: object) -> bytes:
        return json.dumps({**content, **values}).encode()

    def entry(**values: object) -> bytes:
        return changed(entries=[{**content["entries"][0], **values}])

    return [
        b"",
        b"\xff\xfe",
        text.encode()[:-20],
        b"null",
        b"[]",
        b"[" * 100_000,
        changed(format=1),
        changed(key="another"),
        changed(entries=None),
        changed(entries=[None]),
        changed(entries=[{}]),
        entry(pages="many"),
        entry(pages=True),
        entry(measured=1),
        entry(unknown=1),
        entry(sessions=[{"dp": [1, 2]}]),
        entry(sessions=[{"dp": [3, -1.0, 0, 1, 1, 1, 1]}]),
        entry(sessions=[{"dp": [0, 1.0, 0, 1, 1, 1, 1]}]),
        entry(sessions=[{"dp": [2.5, 1.0, 0, 1, 1, 1, 1]}]),
        entry(sessions=[{"dp": [3, "x", 0, 1, 1, 1, 1]}]),
        entry(sessions={"dp": []}),
        entry(sessions=[{"dp": [3, 10**400, 0, 1, 1, 1, 1]}]),
        entry(sessions=[{"dp": [3, float("nan"), 0, 1, 1, 1, 1]}]),
    ]


def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path) -> None:
    remember(tmp_path, KEY, ENTRY)
    (path,) = tmp_path.iterdir()
    for data in damaged(path.read_text()):
        path.write_bytes(data)
        assert recalled(tmp_path) is None, data[:80]
        remember(tmp_path, KEY, ENTRY)
        assert plain(recalled(tmp_path)) == plain(ENTRY)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.data())
def test_changing_any_byte_raises_no_error(tmp_path: Path, data: st.DataObject) -> None:
    remember(tmp_path, KEY, ENTRY)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    found = recalled(tmp_path)
    for each in () if found is None else found.sessions:
        gap = each.gap("dp", "computed")
        assert gap is None or gap.error >= 0


def test_a_file_in_place_of_the_directory_raises_oserror(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("a file")
    assert recalled(tmp_path / "tuning") is None
    with pytest.raises(OSError, match="tuning"):
        remember(tmp_path / "tuning", KEY, ENTRY)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path, KEY, ENTRY)

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        remember(tmp_path, KEY, replace(ENTRY, measured="lost"))
    assert plain(recalled(tmp_path)) == plain(ENTRY)
    assert len(list(tmp_path.iterdir())) == 1
