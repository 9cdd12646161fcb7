"""Conversions that are killed, interrupted, run twice or out of disk space leave a whole library."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import SUPPORT
from store_support import beside, mixtral_plan, tree, write_mixtral

from moechat.errors import (
    CheckpointError,
    DoesNotFitError,
    MoechatError,
    StorageError,
    StoreDamagedError,
    UsageError,
)
from moechat.store import files, workspace
from moechat.store.checkpoint import Checkpoint
from moechat.store.conversion import Conversion
from moechat.store.convert import ConvertProgress, convert
from moechat.store.lock import exclusive_lock
from moechat.store.store import Store, removal_path
from moechat.store.workspace import lock_path, remove_stale_leftovers, workspace_path

CHILD = [sys.executable, str(SUPPORT / "convert_child.py")]
BITS = 4


def run(source: Path, destination: Path, **options: Any) -> Store:
    checkpoint = Checkpoint.open(source)
    return convert(checkpoint, mixtral_plan(checkpoint), destination, bits=BITS, source_name="x", **options)


def interrupt_at(place: str) -> Callable[[ConvertProgress], None]:
    """Progress of a conversion that ends it, as Ctrl-C does, at a stage or a detail such as ``layer 2``."""

    def report(event: ConvertProgress) -> None:
        if event.stage == place or event.detail.startswith(place):
            raise KeyboardInterrupt

    return report


def child(source: Path, destination: Path, *options: str, check: bool = True) -> dict[str, Any]:
    command = [*CHILD, str(source), str(destination), str(BITS), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if not check:
        return {"returncode": done.returncode}
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def assert_nothing_or_complete(destination: Path) -> bool:
    """Whether there is a store; asserts that it is not incomplete."""
    if not destination.exists():
        return False
    Store.open(destination).verify()
    return True


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "library").mkdir()
    return tmp_path / "library"


@pytest.fixture
def reference(mixtral: Path, tmp_path: Path) -> dict[str, str]:
    """The files of an undisturbed conversion."""
    run(mixtral, tmp_path / "reference" / "m")
    return tree(tmp_path / "reference" / "m")


@pytest.mark.slow
def test_a_kill_at_any_file_system_change_is_recovered_to_the_same_bytes(
    real_mixtral: Path, tmp_path: Path
) -> None:
    counted = child(real_mixtral, tmp_path / "counted" / "m", "--count")
    expected = tree(tmp_path / "counted" / "m")
    total = len(counted["changes"])
    assert total > 100
    # Evenly over the whole run, and every single step of the end, where the store appears.
    points = sorted({*np.linspace(1, total, 16, dtype=int).tolist(), *range(total - 11, total + 1)})
    resumed = 0
    for point in points:
        library = tmp_path / f"library-{point}"
        destination = library / "m"
        died = child(real_mixtral, destination, "--kill-at", str(point), check=False)
        assert died["returncode"] == -signal.SIGKILL
        assert_nothing_or_complete(destination)
        events: list[ConvertProgress] = []
        run(real_mixtral, destination, progress=events.append)
        resumed += "checking" in {event.stage for event in events}
        assert tree(destination) == expected, f"killed at {point} of {total}"
        assert beside(destination) == []
        shutil.rmtree(library)
    assert resumed >= len(points) // 2


@pytest.mark.slow
def test_repeated_kills_at_random_times_end_in_the_same_store(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    destination = library / "m"
    generator = random.Random(0)
    command = [*CHILD, str(mixtral), str(destination), str(BITS), "--slow", "0.01"]
    killed = 0
    while killed < 20:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun to work, or it is done
        time.sleep(generator.uniform(0, 0.15))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if assert_nothing_or_complete(destination):
            assert tree(destination) == reference
            shutil.rmtree(destination)
    run(mixtral, destination)
    assert tree(destination) == reference
    assert beside(destination) == []


def test_a_resumed_run_does_not_repeat_finished_layers(mixtral: Path, library: Path) -> None:
    destination = library / "m"

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, destination, progress=interrupt_at("layer 2"))
    assert not destination.exists()
    assert not lock_path(destination).exists()
    assert not list(workspace_path(destination).rglob("*.tmp"))
    events: list[ConvertProgress] = []
    store = run(mixtral, destination, progress=events.append)
    worked = {event.detail.split(",")[0] for event in events if event.stage == "experts"}
    assert worked == {"layer 2"}
    assert {event.stage for event in events} == {"checking", "experts", "finishing"}
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes == store.total_bytes


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_finished_file_that_was_damaged_is_written_again(
    mixtral: Path, library: Path, reference: dict[str, str], damage: str
) -> None:
    destination = library / "m"

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, destination, progress=interrupt_at("layer 1"))
    victim = workspace_path(destination) / "store" / "experts-00000.safetensors"
    if damage == "flip":
        content = bytearray(victim.read_bytes())
        content[-9000] ^= 1
        victim.write_bytes(content)
    elif damage == "truncate":
        os.truncate(victim, 100)
    else:
        victim.unlink()
    run(mixtral, destination)
    assert tree(destination) == reference


@pytest.mark.parametrize("journal", [b"", b"{", b"[]", b'{"key": 1, "files": {}}', b"\xff" * 9, None])
def test_an_unreadable_journal_restarts_the_conversion(
    mixtral: Path, library: Path, reference: dict[str, str], journal: bytes | None
) -> None:
    destination = library / "m"

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, destination, progress=interrupt_at("experts"))
    path = workspace_path(destination) / "journal.json"
    path.unlink()
    if journal is not None:
        path.write_bytes(journal)
    (workspace_path(destination) / "store" / "stray.safetensors").write_bytes(b"x")
    run(mixtral, destination)
    assert tree(destination) == reference


def test_unlisted_files_in_the_work_directory_are_not_published(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    destination = library / "m"

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, destination, progress=interrupt_at("layer 1"))
    inside = workspace_path(destination) / "store"
    (inside / "experts-00001.safetensors.tmp").write_bytes(b"half")
    (inside / "experts-00001.safetensors").write_bytes(b"not recorded")
    (inside / "additional_chat_templates").mkdir()
    (inside / "additional_chat_templates" / "stray.jinja").write_bytes(b"x")
    run(mixtral, destination)
    assert tree(destination) == reference
    assert not (destination / "additional_chat_templates").exists()


def test_another_quantizer_does_not_continue_the_work_of_the_first(mixtral: Path, library: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(mixtral, library / "m", quantizer="hqq", progress=interrupt_at("layer 1"))
    run(mixtral, library / "m", quantizer="native")
    run(mixtral, library / "fresh", quantizer="native")
    assert tree(library / "m") == tree(library / "fresh")


def test_a_source_that_changed_between_two_runs_restarts_the_conversion(mixtral: Path, library: Path) -> None:
    destination = library / "m"

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, destination, progress=interrupt_at("layer 2"))
    write_mixtral(mixtral, shards=3, layers=3, experts=3, hidden=64, intermediate=128, dtype="F32", seed=1)
    events: list[ConvertProgress] = []
    run(mixtral, destination, progress=events.append)
    assert "checking" not in {event.stage for event in events}
    run(mixtral, library / "fresh")
    assert tree(destination) == tree(library / "fresh")


@pytest.mark.parametrize("layer", ["layer 1", "layer 2"])
def test_a_source_that_changes_during_the_run_is_refused_and_leaves_nothing(
    mixtral: Path, library: Path, layer: str
) -> None:
    destination = library / "m"
    seen: list[str] = []

    def meddle(event: ConvertProgress) -> None:
        seen.append(event.detail.split(",")[0])
        if event.detail.startswith(layer):
            os.utime(mixtral / "model-00001-of-00003.safetensors", ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed"):
        run(mixtral, destination, progress=meddle)
    assert seen[-1] == layer  # no work on another layer after the change
    assert list(library.iterdir()) == []


def test_another_bit_width_in_the_work_directory_is_not_mixed_in(mixtral: Path, library: Path) -> None:
    destination = library / "m"
    checkpoint = Checkpoint.open(mixtral)

    with pytest.raises(KeyboardInterrupt):
        convert(
            checkpoint,
            mixtral_plan(checkpoint),
            destination,
            bits=8,
            source_name="x",
            progress=interrupt_at("layer 1"),
        )
    store = run(mixtral, destination)
    store.verify()
    assert store.geometry.bits == BITS


Usage = namedtuple("Usage", ["total", "used", "free"])


def test_a_disk_that_is_too_small_is_found_before_the_first_file(
    mixtral: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 100 << 10))
    with pytest.raises(DoesNotFitError, match=r"needs [\d.]+ MiB .* 100 KiB are free") as caught:
        run(mixtral, library / "m")
    assert "free" in (caught.value.hint or "")
    assert list(library.iterdir()) == []


def test_finished_files_of_an_interrupted_run_need_no_more_space(
    mixtral: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run(mixtral, library / "whole")
    layer = (store.path / "experts-00000.safetensors").stat().st_size

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, library / "m", progress=interrupt_at("layer 2"))
    slack = 1 << 20
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda _: Usage(1 << 40, 0, layer + slack - 1))
    with pytest.raises(DoesNotFitError):
        run(mixtral, library / "m")
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda _: Usage(1 << 40, 0, layer + 4096 + slack))
    run(mixtral, library / "m")


def test_a_conversion_stopped_by_a_full_disk_can_be_resumed(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    destination = library / "m"
    layer = 4096 + Store.open(library.parent / "reference" / "m").geometry.layer_bytes
    failed = child(mixtral, destination, "--limit", str(layer // 2))  # a real EFBIG in the middle of a layer
    assert failed["error"] == "DoesNotFitError"
    assert "full" in failed["message"]
    assert "again" in failed["hint"]
    assert not destination.exists()
    assert not list(library.rglob("*.tmp"))
    events: list[ConvertProgress] = []
    run(mixtral, destination, progress=events.append)
    assert "checking" in {event.stage for event in events}
    assert tree(destination) == reference


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "replace", "rename", "mkdir"])
def test_every_system_call_reports_a_full_disk(
    mixtral: Path,
    library: Path,
    reference: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    destination = library / "m"

    def full(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, full)
        with pytest.raises(DoesNotFitError, match="full"):
            run(mixtral, destination)
    assert not destination.exists()
    run(mixtral, destination)
    assert tree(destination) == reference


def failing_at(call: str, number: int) -> Any:
    """``os.fsync`` or another call that fails with an input/output error at its ``number``-th use."""
    real, uses = getattr(os, call), 0

    def fail(*given: Any, **named: Any) -> Any:
        nonlocal uses
        uses += 1
        if uses == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*given, **named)

    return fail


def test_an_error_at_any_fsync_has_its_status_and_leaves_nothing_for_good(
    mixtral: Path, library: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = library / "m"
    synced = 0
    with monkeypatch.context() as patch:
        count = os.fsync

        def counted(descriptor: int) -> None:
            nonlocal synced
            synced += 1
            count(descriptor)

        patch.setattr(os, "fsync", counted)
        run(mixtral, destination)
    shutil.rmtree(destination)
    assert synced > 10
    for number in sorted({*range(1, synced, 7), *range(synced - 2, synced + 1)}):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing_at("fsync", number))
            with pytest.raises(StorageError, match=r"converting failed at .*: Input/output error") as failed:
                run(mixtral, destination)
        assert failed.value.exit_code == 9
        assert "dmesg" in (failed.value.hint or "")
        if number == synced:  # the store is in its place: no later conversion would tidy up
            assert_nothing_or_complete(destination)
            assert beside(destination) == []
        run(mixtral, destination)
        assert tree(destination) == reference
        assert beside(destination) == []
        shutil.rmtree(destination)


def test_what_a_failing_disk_kept_is_removed_when_the_store_is_used(
    mixtral: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = library / "m"
    unlink = os.unlink

    def failing(path: Any, **options: Any) -> None:
        if Path(path) == lock_path(destination):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        patch.setattr(workspace.shutil, "rmtree", lambda *_, **__: None)  # its errors are ignored
        run(mixtral, destination)
    shutil.copytree(destination, removal_path(destination))
    assert len(beside(destination)) == 3
    remove_stale_leftovers(destination)
    assert beside(destination) == []
    Store.open(destination).verify()


def test_work_that_can_go_on_and_that_of_others_is_kept(mixtral: Path, library: Path) -> None:
    destination = library / "m"

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, destination, progress=interrupt_at("layer 2"))
    remove_stale_leftovers(destination)
    assert (workspace_path(destination) / "store").is_dir()
    shutil.rmtree(workspace_path(destination))
    workspace_path(destination).mkdir()
    with exclusive_lock(lock_path(destination)):
        remove_stale_leftovers(destination)
        assert workspace_path(destination).exists()
    remove_stale_leftovers(destination)
    assert beside(destination) == []


def test_a_library_that_cannot_be_written_is_an_error_with_a_hint(
    mixtral: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere")

    monkeypatch.setattr(files.os, "replace", denied)
    with pytest.raises(MoechatError, match="somewhere: Permission denied"):
        run(mixtral, library / "m")


@pytest.mark.parametrize("home", ["/proc/nobody", "file/home"])
def test_a_home_that_cannot_be_written_is_explained(mixtral: Path, tmp_path: Path, home: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MoechatError, match="converting failed at") as caught:
        run(mixtral, tmp_path / home / "models" / "m")
    assert "set MOECHAT_HOME to a directory that can be written to" in (caught.value.hint or "")


def test_the_error_about_an_unreadable_source_does_not_mention_the_library(
    mixtral: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(mixtral / "tokenizer.json"))

    monkeypatch.setattr(Conversion, "_copy", denied)
    with pytest.raises(MoechatError, match=r"tokenizer\.json: Permission denied") as caught:
        run(mixtral, library / "m")
    assert caught.value.hint is None


def test_a_store_with_an_unlisted_file_is_replaced(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    run(mixtral, library / "m")
    (library / "m" / "added_tokens.json").write_text("{}")
    run(mixtral, library / "m")
    assert tree(library / "m") == reference


def test_an_edited_readme_makes_no_new_store(mixtral: Path, library: Path) -> None:
    run(mixtral, library / "m")
    before = (library / "m").stat().st_ino
    (mixtral / "README.md").write_text("edited")
    run(mixtral, library / "m")
    assert (library / "m").stat().st_ino == before


def test_a_closed_progress_output_is_not_reported_as_a_disk_error(mixtral: Path, library: Path) -> None:
    def closed(event: ConvertProgress) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(mixtral, library / "m", progress=closed)
    run(mixtral, library / "m")


def test_nothing_is_renamed_before_its_content_is_synced(
    mixtral: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure keeps only what was synced: every write needs an fsync before its rename."""
    unsynced: set[str] = set()
    log: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace", "rename")}

    def name_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def write(descriptor: int, data: Any) -> int:
        unsynced.add(name_of(descriptor))
        return int(real["write"](descriptor, data))

    def fsync(descriptor: int) -> None:
        unsynced.discard(name_of(descriptor))
        log.append(("fsync", name_of(descriptor)))
        real["fsync"](descriptor)

    def move(kind: str, old: Any, new: Any) -> None:
        assert str(old) not in unsynced
        log.append((kind, str(new)))
        real[kind](old, new)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: move("replace", old, new))
    monkeypatch.setattr(os, "rename", lambda old, new: move("rename", old, new))
    run(mixtral, library / "m")
    moves = [place for place, (kind, _) in enumerate(log) if kind != "fsync"]
    assert len(moves) > 10
    for place in moves:  # and every rename is itself made durable at once
        kind, new = log[place]
        assert log[place + 1] == ("fsync", str(Path(new).parent)), (kind, new)
    work = workspace_path(library / "m") / "store"
    for name in tree(library / "m"):
        assert ("fsync", f"{work / name}.tmp") in log
    renames = [new for kind, new in log if kind == "rename"]
    assert renames == [str(library / "m")]
    assert log[-2:] == [("rename", str(library / "m")), ("fsync", str(library))]


def test_of_two_simultaneous_processes_only_one_converts(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    destination = library / "m"
    command = [*CHILD, str(mixtral), str(destination), str(BITS), "--slow", "0.05"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "working\n"
    events: list[ConvertProgress] = []
    store = run(mixtral, destination, progress=events.append)
    output, _ = first.communicate()
    assert json.loads(output.splitlines()[-1])["stages"]["experts"] > 0
    assert {event.stage for event in events} == {"waiting"}
    store.verify()
    assert tree(destination) == reference
    assert beside(destination) == []


def test_when_the_other_process_is_killed_the_waiting_one_takes_over(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    destination = library / "m"
    command = [*CHILD, str(mixtral), str(destination), str(BITS), "--slow", "0.2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "working\n"
    stages: list[str] = []

    def progress(event: ConvertProgress) -> None:
        stages.append(event.stage)
        if stages.count("waiting") == 2:
            first.kill()

    run(mixtral, destination, progress=progress)
    first.communicate()
    assert {"waiting", "experts", "finishing"} <= set(stages)
    assert tree(destination) == reference


def test_a_finished_store_is_returned_untouched(mixtral: Path, library: Path) -> None:
    run(mixtral, library / "m")
    before = {path: path.stat().st_mtime_ns for path in (library / "m").iterdir()}
    events: list[ConvertProgress] = []
    run(mixtral, library / "m", progress=events.append)
    assert events == []
    assert {path: path.stat().st_mtime_ns for path in (library / "m").iterdir()} == before


def test_a_damaged_store_is_replaced(mixtral: Path, library: Path, reference: dict[str, str]) -> None:
    run(mixtral, library / "m")
    os.truncate(library / "m" / "experts-00001.safetensors", 10)
    with pytest.raises(StoreDamagedError):
        Store.open(library / "m")
    run(mixtral, library / "m")
    assert tree(library / "m") == reference
    assert beside(library / "m") == []


def test_an_old_store_stays_until_the_new_one_is_complete(mixtral: Path, library: Path) -> None:
    run(mixtral, library / "m")
    old = tree(library / "m")
    write_mixtral(mixtral, shards=3, layers=3, experts=3, hidden=64, intermediate=128, dtype="F32", seed=2)

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, library / "m", progress=interrupt_at("finishing"))
    assert tree(library / "m") == old
    removal_path(library / "m").mkdir()  # as a kill during an earlier replacement leaves it
    (removal_path(library / "m") / "rest").write_bytes(b"x")
    run(mixtral, library / "m")
    assert tree(library / "m") != old
    assert beside(library / "m") == []


@pytest.mark.slow
def test_a_kill_during_a_replacement_leaves_a_complete_store_or_none(mixtral: Path, tmp_path: Path) -> None:
    run(mixtral, tmp_path / "old" / "m")
    old = tree(tmp_path / "old" / "m")
    write_mixtral(mixtral, shards=3, layers=3, experts=3, hidden=64, intermediate=128, dtype="F32", seed=2)
    shutil.copytree(tmp_path / "old", tmp_path / "counted")
    changes = child(mixtral, tmp_path / "counted" / "m", "--count")["changes"]
    new = tree(tmp_path / "counted" / "m")
    outcomes = set()
    first, second = (number for number, change in enumerate(changes, start=1) if change == "rename")
    for point in {first - 1, first, second, second + 1, second + 2, len(changes)}:
        library = tmp_path / f"library-{point}"
        shutil.copytree(tmp_path / "old", library)
        died = child(mixtral, library / "m", "--kill-at", str(point), check=False)
        assert died["returncode"] == -signal.SIGKILL
        found = tree(library / "m") if assert_nothing_or_complete(library / "m") else None
        assert found in (None, old, new)
        outcomes.add("none" if found is None else "old" if found == old else "new")
        run(mixtral, library / "m")
        assert tree(library / "m") == new
        assert beside(library / "m") == []
    assert outcomes == {"old", "none", "new"}


def test_a_directory_that_is_not_a_store_is_not_changed(mixtral: Path, library: Path) -> None:
    (library / "m").mkdir()
    (library / "m" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not a store"):
        run(mixtral, library / "m")
    assert (library / "m" / "thesis.txt").read_text() == "years of work"
    assert beside(library / "m") == []
    (library / "file").write_text("x")
    with pytest.raises(UsageError, match="is not a store"):
        run(mixtral, library / "file")


def test_an_empty_directory_may_become_the_store(
    mixtral: Path, library: Path, reference: dict[str, str]
) -> None:
    (library / "m").mkdir()
    run(mixtral, library / "m")
    assert tree(library / "m") == reference


def test_memory_beyond_the_page_cache_stays_at_a_few_experts(tmp_path: Path) -> None:
    shape = {"layers": 2, "experts": 6, "hidden": 1024, "intermediate": 1536}
    source = write_mixtral(tmp_path / "source", dtype="BF16", **shape)  # type: ignore[arg-type]
    size = (source / "model.safetensors").stat().st_size
    expert = 3 * 1024 * 1536 * 2
    assert size > 100 << 20
    report = child(source, tmp_path / "library" / "m", "--memory")
    assert report["beyond"] < 3 * expert  # one block buffer and the work space of the solver
    assert report["peak"] < 5 * expert < size // 2  # with the mapped pages of the expert at hand
