"""Files written several at a time: order, progress, failures, interrupts, and stores made that way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf
from places import SUPPORT
from store_support import beside, tree

from moechat import _native
from moechat.errors import CheckpointError
from moechat.geometry import KEEP
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf_source import opened_gguf
from moechat.store.convert import ConvertProgress, convert
from moechat.store.progress import ProgressCallback
from moechat.store.side_by_side import Advance, write_side_by_side
from moechat.store.store import Store
from moechat.store.workspace import workspace_path

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose experts are kept, in more layers than threads."""
    directory = tmp_path_factory.mktemp("model")
    config = save_model("olmoe", directory / "source", num_hidden_layers=LAYERS)
    write_gguf("olmoe", config, tensors_of(directory / "source"), directory / "m.gguf", lambda *_: Kind.Q8_0)
    return directory / "m.gguf"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before, running = _native.num_threads(), set(threading.enumerate())
    _native.set_num_threads(3)
    yield
    _native.set_num_threads(before)
    # Threads that another test left behind may end meanwhile: only new ones are these tests' own.
    assert set(threading.enumerate()) <= running


def run(source: Path, destination: Path, progress: ProgressCallback | None = None) -> Store:
    with opened_gguf(source) as opened:
        return convert(
            opened, plan_checkpoint(opened), destination, bits=KEEP, source_name="x", progress=progress
        )


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a store that was written one file after the other."""
    destination = tmp_path_factory.mktemp("reference") / "m"
    before = _native.num_threads()
    _native.set_num_threads(1)
    run(model, destination)
    _native.set_num_threads(before)
    return tree(destination)


def test_files_are_begun_in_order_and_progress_is_reported_by_the_caller() -> None:
    begun: list[int] = []
    reported: list[tuple[int, str, str]] = []
    callers = set()

    def write(number: int, advance: Advance) -> None:
        begun.append(number)
        advance(number, "stage", "first")
        advance(number, "stage", "second")

    def advance(size: int, stage: str, detail: str) -> None:
        callers.add(threading.current_thread())
        reported.append((size, stage, detail))

    write_side_by_side(range(20), write, advance, 1)
    assert begun == list(range(20))
    write_side_by_side(range(20), write, advance, 4)
    assert sorted(begun[20:]) == list(range(20))
    assert sum(size for size, _, _ in reported) == 4 * sum(range(20))
    assert callers == {threading.current_thread()}


def test_several_files_are_written_at_a_time() -> None:
    together = threading.Barrier(3, timeout=30)
    write_side_by_side(range(3), lambda *_: together.wait(), lambda *_: None, 3)


@pytest.mark.parametrize("where", ["write", "advance"])
def test_after_a_failure_the_others_stop_at_their_next_piece_and_no_file_is_begun(where: str) -> None:
    begun = []
    together = threading.Barrier(2, timeout=30)

    def write(number: int, advance: Advance) -> None:
        begun.append(number)
        together.wait()
        if number == 0 and where == "write":
            raise OSError("broken")
        while True:
            advance(1, "stage", "")

    def report(*_: object) -> None:
        if where == "advance":
            raise KeyboardInterrupt

    with pytest.raises(OSError if where == "write" else KeyboardInterrupt):
        write_side_by_side(range(9), write, report, 2)
    assert sorted(begun) == [0, 1]


def test_the_store_is_that_of_one_file_after_the_other(
    model: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    events: list[ConvertProgress] = []
    store = run(model, tmp_path / "m", events.append)
    assert tree(tmp_path / "m") == reference
    store.verify()
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes == store.total_bytes
    experts = [event.detail for event in events if event.stage == "experts" and "expert" in event.detail]
    assert len(set(experts)) == len(experts) == LAYERS * store.geometry.num_experts


def test_an_interrupted_conversion_keeps_finished_files_and_goes_on_with_the_others(
    model: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    destination = tmp_path / "library" / "m"

    def interrupt(event: ConvertProgress) -> None:
        if event.detail.startswith("layer 4"):  # with three threads, some layer before it is complete
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, destination, interrupt)
    assert not destination.exists()
    work = workspace_path(destination)
    finished = set(json.loads((work / "journal.json").read_bytes())["files"])
    assert {str(path.relative_to(work / "store")) for path in work.rglob("*.safetensors")} == {
        name for name in finished if name.endswith(".safetensors")
    }
    assert finished
    events: list[ConvertProgress] = []
    run(model, destination, events.append)
    layers = {event.detail.split(",")[0] for event in events if event.stage == "experts"}
    kept = sum(name.startswith("experts") for name in finished)
    assert len(layers) == LAYERS - kept < LAYERS
    assert tree(destination) == reference
    assert beside(destination) == []


def test_an_expert_that_cannot_be_read_is_named_and_leaves_no_store(model: Path, tmp_path: Path) -> None:
    damaged = next(t for t in GGUFReader(model).tensors if t.name == "blk.2.ffn_down_exps.weight")
    content = bytearray(model.read_bytes())
    content[damaged.data_offset : damaged.data_offset + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "damaged.gguf").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"blk\.2\.ffn_down_exps\.weight.*expert 0, down scale at row 0"
    ):
        run(tmp_path / "damaged.gguf", tmp_path / "library" / "m")
    assert not (tmp_path / "library" / "m").exists()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_kill_at_any_file_system_change_is_recovered_to_the_same_bytes(
    model: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, str(SUPPORT / "convert_child.py"), str(model)]

    def child(destination: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, str(destination), str(KEEP), *options], capture_output=True, text=True, check=False
        )

    counted = child(tmp_path / "counted" / "m", "--count")
    total = len(json.loads(counted.stdout.splitlines()[-1])["changes"])
    assert total > 40
    for point in np.linspace(2, total, 5, dtype=int).tolist():
        destination = tmp_path / f"library-{point}" / "m"
        # The order of changes differs from run to run, but not their number.
        assert child(destination, "--kill-at", str(point)).returncode == -signal.SIGKILL
        if destination.exists():
            Store.open(destination).verify()
        run(model, destination)
        assert tree(destination) == reference, f"killed at {point} of {total}"
        assert beside(destination) == []
