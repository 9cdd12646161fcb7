"""The file that is read when the disk is measured: it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moechat.hardware.scratch import (
    Extent,
    NoRoomError,
    reads_direct,
    scratch_file,
    set_direct,
    stored_files,
)

MIB = 1 << 20
LIMITS = {"least": 8 * MIB, "keep_free": 0, "seconds": 30.0}


def test_the_scratch_file_is_random_and_has_no_name(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    with scratch_file(directory, 16 * MIB, **LIMITS) as extent:
        assert (extent.offset, extent.nbytes) == (0, 16 * MIB)
        assert not list(directory.iterdir())
        data = Path(extent.path).read_bytes()
        assert len(data) == extent.nbytes
        pieces = {data[at : at + 4096] for at in range(0, len(data), 4096)}
        assert len(pieces) == len(data) // 4096
    assert not Path(extent.path).exists()


def test_without_support_for_nameless_files_nothing_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without(path: object, flags: int, *arguments: object, **named: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *arguments, **named)  # type: ignore[arg-type,call-overload,no-any-return]

    monkeypatch.setattr(os, "open", without)
    with scratch_file(tmp_path, 8 * MIB, **LIMITS) as extent:
        assert not list(tmp_path.iterdir())
        assert os.stat(extent.path).st_size == 8 * MIB


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from moechat.hardware.scratch import scratch_file
with scratch_file(Path({str(tmp_path)!r}), 8 << 20, least=8 << 20, keep_free=0, seconds=9) as extent:
    print("written", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not list(tmp_path.iterdir())


def test_it_is_refused_where_too_little_is_free(tmp_path: Path) -> None:
    with (
        pytest.raises(NoRoomError, match=r"MiB are free at .*stay free"),
        scratch_file(tmp_path, 16 * MIB, least=8 * MIB, keep_free=1 << 60, seconds=1),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_it_is_smaller_on_a_slow_or_a_small_disk(tmp_path: Path) -> None:
    with scratch_file(tmp_path, 1 << 40, least=16 * MIB, keep_free=0, seconds=0) as extent:
        assert extent.nbytes == 16 * MIB
    free = os.statvfs(tmp_path)
    said: list[str] = []
    keep = free.f_bavail * free.f_frsize - 40 * MIB
    with scratch_file(
        tmp_path, 1 << 40, least=8 * MIB, keep_free=keep, seconds=0, report=said.append
    ) as extent:
        assert extent.nbytes == 8 * MIB
    assert "has room for" in said[0]


@pytest.mark.parametrize(("limit", "expected"), [(4 * MIB, None), (24 * MIB, 24 * MIB)])
def test_a_limit_of_file_sizes_is_a_full_disk(tmp_path: Path, limit: int, expected: int | None) -> None:
    code = f"""
import resource
from pathlib import Path
from moechat.hardware.scratch import NoRoomError, scratch_file
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    with scratch_file(Path({str(tmp_path)!r}), 64 << 20, least=8 << 20, keep_free=0, seconds=9) as extent:
        print(extent.nbytes)
except NoRoomError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if expected is None:
        assert "File too large" in done.stdout
    else:
        assert int(done.stdout) == expected
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "models", Path("/proc/models")):
        with (
            pytest.raises(NoRoomError, match="nothing can be written in"),
            scratch_file(place, 8 * MIB, **LIMITS),
        ):
            pass


def test_only_finished_stores_without_holes_are_read(tmp_path: Path) -> None:
    library = tmp_path / "models"
    for store, name, size in (
        ("one", "experts-0.safetensors", 3 * MIB + 100),
        ("two", "experts-0.safetensors", 2 * MIB),
        ("two", "tokenizer.json", 9 * MIB),
        ("two", "small.safetensors", MIB // 2),
        (".two.removed", "experts-0.safetensors", 9 * MIB),
    ):
        (library / store).mkdir(parents=True, exist_ok=True)
        (library / store / name).write_bytes(os.urandom(size))
    hollow = library / "hollow"
    hollow.mkdir()
    with (hollow / "experts-0.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    (library / "link").mkdir()
    (library / "link" / "far.safetensors").symlink_to(library / "one" / "experts-0.safetensors")
    os.sync()
    one, two = (str(library / name / "experts-0.safetensors") for name in ("one", "two"))
    assert stored_files(library, 3 * MIB, MIB) == [Extent(one, 0, 3 * MIB)]
    assert stored_files(library, 4 * MIB, MIB) == [Extent(one, 0, 3 * MIB), Extent(two, 0, 2 * MIB)]
    assert stored_files(library, 6 * MIB, MIB) == []
    assert stored_files(tmp_path / "missing", 1, 1) == []


def test_a_file_of_the_system_is_not_read_directly() -> None:
    assert not reads_direct("/proc/self/status")


def test_directness_can_be_taken_back(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        set_direct(descriptor, True)
        assert not set_direct(descriptor, False)
        assert os.write(descriptor, b"three") == 5  # no multiple of anything
    finally:
        os.close(descriptor)


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with scratch_file(tmp_path, 8 * MIB, **LIMITS):
            pass
    assert len(os.listdir("/proc/self/fd")) == before
