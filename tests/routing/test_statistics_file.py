"""Statistics survive across runs, killed processes and damaged files."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import SUPPORT

from moechat.routing import RoutingStatistics, statistics_file
from moechat.routing.statistics_file import add_statistics, load_statistics, model_key

NAMES = ("tokens", "predicted", "activations", "ranks", "hits_of_prediction", "ranks_of_prediction")
FILE = "model-blend.npz"


def some(seed: int = 0, *, tokens: int = 100, layers: int = 3, policy: str = "blend") -> RoutingStatistics:
    generator = np.random.default_rng(seed)
    zero = RoutingStatistics.zero(policy, layers, 20, 2)
    drawn: dict[str, Any] = {
        name: generator.integers(0, 70_000, getattr(zero, name).shape) for name in NAMES if name != "tokens"
    }
    return replace(zero, tokens=tokens, **drawn)


def assert_same(one: RoutingStatistics | None, other: RoutingStatistics) -> None:
    assert one is not None
    assert (one.policy, one.top_k) == (other.policy, other.top_k)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


class Warnings(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


def test_added_statistics_are_loaded(tmp_path: Path) -> None:
    warn = Warnings()
    place = tmp_path / "not" / "there yet"
    assert load_statistics("model", "blend", directory=place, warn=warn) is None
    assert not place.exists()
    assert add_statistics("model", some(1), directory=place, warn=warn)
    assert_same(load_statistics("model", "blend", directory=place, warn=warn), some(1))
    assert add_statistics("model", some(2), directory=place, warn=warn)
    assert_same(load_statistics("model", "blend", directory=place, warn=warn), some(1).merge(some(2)))
    # Another model, another policy: other files.
    assert load_statistics("other", "blend", directory=place, warn=warn) is None
    assert add_statistics("model", some(3, policy="lru"), directory=place, warn=warn)
    assert_same(load_statistics("model", "lru", directory=place, warn=warn), some(3, policy="lru"))
    assert warn == []
    assert sorted(path.name for path in place.iterdir()) == ["lock", FILE, "model-lru.npz"]


def test_statistics_are_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    assert add_statistics("model", some())
    assert (tmp_path / "state" / "routing" / FILE).is_file()
    assert_same(load_statistics("model", "blend"), some())


def test_nothing_counted_writes_nothing(tmp_path: Path) -> None:
    assert add_statistics("model", RoutingStatistics.zero("blend", 2, 4, 2), directory=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_old_counts_fade(tmp_path: Path) -> None:
    for seed in range(6):
        assert add_statistics("model", some(seed, tokens=400), directory=tmp_path, max_tokens=1000)
        kept = load_statistics("model", "blend", directory=tmp_path)
        assert kept is not None
        assert kept.tokens <= 1000
    assert kept.tokens >= 500
    expected = some(0, tokens=400)
    for seed in range(1, 6):
        expected = expected.merge(some(seed, tokens=400))
        if expected.tokens > 1000:
            expected = expected.faded()
    assert_same(kept, expected)


def test_halves_keep_their_sums() -> None:
    whole = some(4, tokens=7)
    half = whole.faded()
    assert half.tokens == 3
    for name in ("activations", "ranks", "ranks_of_prediction"):
        counts, halved = getattr(whole, name), getattr(half, name)
        np.testing.assert_array_equal(halved.sum(axis=-1), counts.sum(axis=-1) // 2)
        assert (np.abs(2 * halved - counts) <= 2).all()
    ones = replace(whole, ranks=np.ones_like(whole.ranks))
    assert ones.faded().ranks.sum() == 3 * 10


def test_statistics_of_different_shapes_are_not_merged() -> None:
    for other in (some(policy="lru"), some(layers=2), replace(some(), top_k=3)):
        assert not some().fits(other)
        with pytest.raises(ValueError, match="cannot be added"):
            some().merge(other)


def start_children(directory: Path, count: int, times: int) -> list[subprocess.Popen[str]]:
    script = SUPPORT / "statistics_child.py"
    children = [
        subprocess.Popen(
            [sys.executable, str(script), str(directory), str(number), str(times)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    return children


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def test_two_concurrent_processes_lose_no_counts(tmp_path: Path) -> None:
    children = start_children(tmp_path, 2, 12)
    for child in children:
        go(child)
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0, out
        assert out.split() == ["added"] * 12
    kept = load_statistics("model", "blend", directory=tmp_path)
    assert kept is not None
    assert kept.tokens == 24
    assert kept.activations[:, :3].tolist() == [[12, 12, 0]] * 4


def test_a_process_killed_in_the_middle_damages_nothing(tmp_path: Path) -> None:
    warn = Warnings()
    confirmed = 0
    for delay in (0.0, 0.004, 0.011, 0.017):
        (child,) = start_children(tmp_path, 1, 100_000)
        go(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "added\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        confirmed += 1 + child.communicate(timeout=60)[0].count("added\n")
        kept = load_statistics("model", "blend", directory=tmp_path, warn=warn)
        assert kept is not None
        # The write during which it was killed may count as well.
        assert confirmed <= kept.tokens <= confirmed + 1
        confirmed = kept.tokens
    assert add_statistics("model", replace(kept, tokens=1), directory=tmp_path, warn=warn)
    assert warn == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", FILE]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with np.load(path) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
        arrays |= changes
        np.savez(path, **{name: value for name, value in arrays.items() if value is not None})

    return change


def pickled(path: Path) -> None:
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    np.savez(path, allow_pickle=True, **{**arrays, "ranks": np.array([{"a": 1}], dtype=object)})


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("more.npy", bytes(50_000_000))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "not an .npz file"),
        (empty, "not an .npz file"),
        (rewrite(format=np.int64(2)), "their format is 2; this version of moechat reads 1"),
        (rewrite(format=None), "format"),
        (rewrite(ranks=None), "ranks"),
        (rewrite(ranks=np.zeros((3, 5), np.int64)), r"ranks has shape \[3, 5\], not \[3, 20\]"),
        (rewrite(ranks=np.zeros((3, 20))), "ranks has type float64"),
        (rewrite(ranks=np.full((3, 20), -1)), "negative"),
        (rewrite(ranks=np.full((3, 20), 1 << 63, np.uint64)), "ranks holds"),
        (rewrite(activations=np.zeros(3, np.int64)), "activations has type int64 and 1 dimensions"),
        (rewrite(model_key=np.str_("other")), "another model or policy"),
        (rewrite(policy=np.array(["blend", "lru"])), "policy is not one string"),
        (rewrite(tokens=np.int64(-5)), "-5 tokens"),
        (pickled, "pickle"),
        (bomb, "would unpack to 50000000 bytes"),
    ],
)
def test_a_damaged_file_is_left_out_and_set_aside(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    assert add_statistics("model", some(1), directory=tmp_path)
    damage(tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    warn = Warnings()
    assert load_statistics("model", "blend", directory=tmp_path, warn=warn) is None
    assert len(warn) == 1
    assert re.search(reason, warn[0])
    assert (tmp_path / FILE).read_bytes() == content
    assert add_statistics("model", some(2), directory=tmp_path, warn=warn)
    assert "set aside as model-blend.npz.damaged" in warn[1]
    assert (tmp_path / f"{FILE}.damaged").read_bytes() == content
    assert_same(load_statistics("model", "blend", directory=tmp_path, warn=warn), some(2))
    assert len(warn) == 2


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(0, 4000),
)
@example([(10530, 1)], 0)  # an offset that is before the file
def test_arbitrary_bytes_raise_no_error(tmp_path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    good = tmp_path / "good"
    if not good.exists():
        assert add_statistics("model", some(1), directory=good)
    data = bytearray((good / FILE).read_bytes())
    for where, value in changes:
        data[where % len(data)] = value
    bad = tmp_path / "bad"
    bad.mkdir(exist_ok=True)
    (bad / FILE).write_bytes(data[: len(data) - cut] if cut % 3 == 0 else data)
    warn = Warnings()
    kept = load_statistics("model", "blend", directory=bad, warn=warn)
    assert (kept is None) == (len(warn) == 1)
    assert add_statistics("model", some(2), directory=bad, warn=warn)
    assert load_statistics("model", "blend", directory=bad) is not None


def test_statistics_of_another_shape_are_set_aside(tmp_path: Path) -> None:
    warn = Warnings()
    assert add_statistics("model", some(1), directory=tmp_path, warn=warn)
    assert add_statistics("model", some(2, layers=5), directory=tmp_path, warn=warn)
    assert len(warn) == 1
    assert "3 layers of 20 experts" in warn[0]
    assert_same(load_statistics("model", "blend", directory=tmp_path), some(2, layers=5))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    assert add_statistics("model", some(1), directory=tmp_path)
    tmp_path.chmod(0o500)
    try:
        warn = Warnings()
        assert_same(load_statistics("model", "blend", directory=tmp_path, warn=warn), some(1))
        assert not add_statistics("model", some(2), directory=tmp_path, warn=warn)
        assert "cannot be kept: Permission denied" in warn[0]
    finally:
        tmp_path.chmod(0o700)


def test_a_file_in_place_of_the_directory_is_a_warning(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("not a directory")
    warn = Warnings()
    assert load_statistics("model", "blend", directory=place, warn=warn) is None
    assert not add_statistics("model", some(), directory=place, warn=warn)
    assert len(warn) == 2
    assert place.read_text() == "not a directory"


def test_a_directory_on_which_nothing_can_be_written_is_a_warning() -> None:
    warn = Warnings()
    assert not add_statistics("model", some(), directory=Path("/proc/self/nothing"), warn=warn)
    assert "cannot be kept" in warn[0]


def test_a_full_disk_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    assert add_statistics("model", some(1), directory=tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    warn = Warnings()
    with monkeypatch.context() as patch:
        patch.setattr(statistics_file.os, "fsync", full)
        assert not add_statistics("model", some(2), directory=tmp_path, warn=warn)
    assert "No space left on device" in warn[0]
    assert_same(load_statistics("model", "blend", directory=tmp_path), some(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", FILE]


def test_a_lock_held_by_another_process_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_file, "_LOCK_SECONDS", 0.1)
    warn = Warnings()
    with open(tmp_path / "lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not add_statistics("model", some(), directory=tmp_path, warn=warn)
        assert "locked by another process" in warn[0]
        assert load_statistics("model", "blend", directory=tmp_path) is None
    assert add_statistics("model", some(), directory=tmp_path, warn=warn)
    assert len(warn) == 1


def test_the_directory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_file, "MAX_FILES", 3)
    for number in range(6):
        assert add_statistics(f"model{number}", some(), directory=tmp_path)
        for path in tmp_path.glob("*.npz"):  # clocks of file systems are coarse
            age = 10 * (number - int(path.name[5]))
            os.utime(path, (1e9 - age, 1e9 - age))
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == [f"model{n}-blend.npz" for n in (3, 4, 5)]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f".{FILE}.12345.tmp"
    leftover.write_bytes(b"half")
    assert add_statistics("model", some(), directory=tmp_path)
    assert not leftover.exists()


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "x" * 101, "a\nb", "ü"])
def test_names_stay_inside_the_directory(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a file name"):
        load_statistics(key, "blend", directory=tmp_path)
    with pytest.raises(ValueError, match="cannot be part of a file name"):
        add_statistics(key, some(), directory=tmp_path)


def test_keys_differ_between_models() -> None:
    keys = {
        model_key("abc", layers=26, experts=64, top_k=6),
        model_key("abd", layers=26, experts=64, top_k=6),
        model_key("abc", layers=27, experts=64, top_k=6),
        model_key("abc", layers=26, experts=6, top_k=64),
        model_key('a",2', layers=26, experts=64, top_k=6),
    }
    assert len(keys) == 5
    assert model_key("abc", layers=26, experts=64, top_k=6) in keys
    assert all(len(key) == 32 for key in keys)
