"""The fault campaign: its library makes calls fail, it notices what falls, and its short form holds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from fault_injection import fuzz_texts, gguf_fields
from fault_injection.injected import by_rounds
from fault_injection.json_changes import changed, spelled
from fault_injection.phase import Outcome, Phase, ended_badly
from fault_injection.phases import all_phases
from fault_injection.programs import Ran
from fault_injection.record import Record
from fault_injection.scene import Scene
from fault_injection.shim import Control, Fault, build_shim
from fault_injection.soak import Usage
from places import ROOT, SCRIPTS

KINDS = {"I/O faults", "kills", "bit flips", "signals", "fuzzing", "soak"}
CONTENT = bytes(range(256)) * 64
# Reads a file piece by piece, prints its sum and how many reads it took, and writes and renames a copy.
PROGRAM = """
import os, sys
source, target = sys.argv[1:]
descriptor = os.open(source, os.O_RDONLY)
pieces = []
while piece := os.read(descriptor, 4096):
    pieces.append(piece)
print(sum(map(sum, pieces)), len(pieces), flush=True)
out = os.open(target + ".tmp", os.O_WRONLY | os.O_CREAT)
for piece in pieces:
    os.write(out, piece)
os.fsync(out)
os.rename(target + ".tmp", target)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(tmp_path / "control")


def copied(
    shim: Path, control: Control, directory: Path, fault: Fault | None
) -> subprocess.CompletedProcess[str]:
    watched = directory / "watched"
    watched.mkdir(exist_ok=True)
    (watched / "source").write_bytes(CONTENT)
    control.arm([watched], fault)
    return subprocess.run(
        [sys.executable, "-S", "-E", "-c", PROGRAM, str(watched / "source"), str(watched / "target")],
        env={**os.environ, "LD_PRELOAD": str(shim), "FAULTS_CONTROL": str(control.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_calls_on_watched_files_are_counted_by_group(shim: Path, control: Control, tmp_path: Path) -> None:
    done = copied(shim, control, tmp_path, None)
    assert done.stdout == f"{sum(CONTENT)} 4\n"
    expected = {"open": 1, "create": 1, "read": 5, "write": 4, "sync": 1, "rename": 1, "change": 7}
    assert {group: count for group, count in control.counts().items() if count} == expected
    assert control.fired() == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("open:0:once:EMFILE", "Too many open files"),
        ("read:2:once:EIO", "Input/output error"),
        ("create:0:forever:ENOSPC", "No space left"),
        ("write:3:once:ENOSPC", "No space left"),
        ("sync:0:once:EIO", "Input/output error"),
        ("rename:0:once:EIO", "Input/output error"),
    ],
)
def test_a_call_fails_with_the_error_that_was_set(
    shim: Path, control: Control, tmp_path: Path, fault: str, said: str
) -> None:
    assert str(Fault.parse(fault)) == fault
    done = copied(shim, control, tmp_path, Fault.parse(fault))
    assert said in done.stderr
    assert control.fired() == 1
    assert "/watched/" in control.where()


def test_reads_are_interrupted_cut_short_and_spoiled(shim: Path, control: Control, tmp_path: Path) -> None:
    interrupted = copied(shim, control, tmp_path, Fault("read", 1, "once", "EINTR"))
    assert interrupted.stdout == f"{sum(CONTENT)} 4\n"  # Python tries again
    short = copied(shim, control, tmp_path, Fault("read", 1, "short"))
    assert short.stdout == f"{sum(CONTENT)} 5\n"
    wrong = copied(shim, control, tmp_path, Fault("read", 1, "wrong"))
    assert abs(int(wrong.stdout.split()[0]) - sum(CONTENT)) == 0x10


@pytest.mark.parametrize(("mode", "bytes_there"), [("kill", 8192), ("torn", 8192 + 2048)])
def test_a_program_is_killed_at_a_change(
    shim: Path, control: Control, tmp_path: Path, mode: str, bytes_there: int
) -> None:
    done = copied(shim, control, tmp_path, Fault("change", 3, mode))
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "watched" / "target.tmp").stat().st_size == bytes_there


LINK = """
import sys
import numpy as np
from moechat import _native
path, size = sys.argv[1], 4096
try:
    link = _native.file_link([(path, 0, 4 * size)], io="uring", direct=False)
except OSError as error:
    print("none", error)
    raise SystemExit
link.open(4)
pages = np.zeros((4, size), np.uint8)
link.submit([(slot, 0, slot * size, size, 0) for slot in range(4)], pages)
errors = {}
while len(errors) < 4 and link.wait(20):
    errors.update(link.poll())
print([errors.get(slot) for slot in range(4)], int(pages.astype(int).sum()))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (None, f"[0, 0, 0, 0] {sum(CONTENT)}"),
        (Fault("uring", 0, "forever", "EIO"), "[5, 5, 5, 5] 0"),
        (Fault("uring", 0, "once", "EINTR"), f"[0, 0, 0, 0] {sum(CONTENT)}"),
        (Fault("uring", 0, "short"), f"[0, 0, 0, 0] {sum(CONTENT)}"),
    ],
)
def test_reads_through_io_uring_fail_too(
    shim: Path, control: Control, tmp_path: Path, fault: Fault | None, said: str
) -> None:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    control.arm([tmp_path], fault)
    done = subprocess.run(
        [sys.executable, "-c", LINK, str(path)],
        env={**os.environ, "LD_PRELOAD": str(shim), "FAULTS_CONTROL": str(control.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    if done.stdout.startswith("none"):
        pytest.skip(f"no io_uring here: {done.stdout}")
    assert done.stdout == said + "\n"
    assert (control.fired() > 0) == (fault is not None)


def test_fields_of_a_gguf_header_are_found_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list([f"word{number}" for number in range(100)])
    writer.add_tensor("blk.0.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    found = list(gguf_fields.fields(data))
    values = [data[offset : offset + size] for offset, size, _ in found]
    assert b"qwen3moe.block_count" in values
    assert b"word7" in values
    assert b"word99" not in values  # only the beginning of a long list
    assert b"blk.0.weight" in values
    assert (3).to_bytes(4, "little") in values
    assert max(offset + size for offset, size, _ in found) <= len(data) - 2 * 32 * 4
    results = set()
    for seed in range(20):
        changes = bytearray(data)
        gguf_fields.change(changes, random.Random(seed))
        results.add(bytes(changes))
    assert len(results - {data}) > 15


def test_a_case_of_fuzzing_is_the_same_each_time() -> None:
    value = {
        "hidden_size": 64,
        "layers": [1, 2, 3],
        "name": "tiny",
        "rope": {"type": "default", "theta": 1e4},
    }

    def made(seed: int) -> tuple[bytes, str, bytes, bytes]:
        generator = random.Random(seed)
        return (
            spelled(changed(value, generator), generator),
            fuzz_texts.template(generator, "canary"),
            fuzz_texts.prompts(generator),
            fuzz_texts.settings(generator),
        )

    assert [made(seed) for seed in range(30)] == [made(seed) for seed in range(30)]
    assert len({made(seed) for seed in range(30)}) == 30


def ran(
    status: int = 0, out: bytes = b"yes\n", err: str = "", stopped: str = "", peak: int = 100 << 20
) -> Ran:
    return Ran(status, out, err, 1.0, peak, stopped)


@pytest.mark.parametrize(
    ("run", "fell"),
    [
        (ran(), ""),
        (ran(status=6, out=b"", err="error: damaged\n"), ""),
        (ran(out=b"no\n"), "wrong answer"),
        (ran(status=1, err="note\nerror: /a/b12 has 7 bytes\n"), "exit 1: error: PATH has N bytes"),
        (ran(status=-11), "ended by SIGSEGV"),
        (
            ran(status=6, err="Traceback (most recent call last):\n  x\nKeyError: 3\n"),
            "traceback: KeyError: N",
        ),
        (ran(status=-9, stopped="hang"), "hang"),
        (ran(peak=1200 << 20), "memory"),
    ],
)
def test_a_run_is_judged_by_status_answer_words_and_memory(run: Ran, fell: str) -> None:
    assert ended_badly(run, b"yes\n", 100 << 20).fell == fell


class Planned(Phase):
    name = "planned"
    kind = "kind"

    def cases(self, seed: int):
        yield from ("a", "b", "c")

    def run(self, case: str) -> Outcome:
        raise AssertionError


def test_every_call_fails_once_before_any_fails_again() -> None:
    faults = [
        Fault(group, index, mode, "EIO")
        for group, index in (("read", 0), ("read", 1), ("open", 0))
        for mode in ("once", "forever")
    ]
    ordered = [*by_rounds(faults)]
    assert sorted(map(str, ordered)) == sorted(map(str, faults))
    assert {(one.group, one.index) for one in ordered[:3]} == {("read", 0), ("read", 1), ("open", 0)}
    assert [one.mode for one in ordered] == ["once"] * 3 + ["forever"] * 3


def test_results_are_continued_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    record = Record(path, 7)
    record.add(Planned(), "a", Outcome())
    record.add(Planned(), "b", Outcome("exit 1", "details"))
    record.close()
    path.write_text(path.read_text() + '{"kind": "kind", "phase": "pla')  # interrupted while it was written
    again = Record(path, 8)
    assert again.seed == 7
    assert again.done == {"planned:a", "planned:b"}
    again.add(Planned(), "c", Outcome(count=100))
    again.close()
    last = Record(path, 9)
    assert last.to_json()["counts"] == {"kind / planned": {"tried": 102, "held": 101, "fell": 1}}
    assert "scripts/faults --case 'planned:b'" in last.table()
    last.close()


def test_growth_is_what_stays_above_all_before() -> None:
    def growth(files: list[int], memory: int = 0) -> str:
        usage = Usage(os.getpid())
        for number, count in enumerate(files):
            usage.add(number * memory, count, 3)
        return usage.growth()

    assert growth([5] * 20) == ""
    assert growth([5] * 5 + [6] * 5 + [7] * 5 + [8] * 5) == "files from 6 to 8"
    assert growth([5] * 5 + [6] * 5 + [7] * 5 + [8] * 4 + [5]) == ""  # it was closed again
    assert growth([5] * 20, memory=1 << 20) == ""
    assert growth([5] * 20, memory=4 << 20).startswith("memory from ")


def test_every_phase_of_the_help_exists(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        phases = all_phases(scene, ROOT)
    finally:
        scene.close()
    said = (SCRIPTS / "faults").read_text().split("Phases, by class:")[1].split("What must hold")[0]
    for name in phases:
        prefix, _, part = name.rpartition("-")
        assert name in said or (f"{prefix}-" in said and f"-{part}" in said), name


@pytest.mark.slow
def test_nothing_falls_in_the_short_campaign(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "faults"), "--short", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 10" in done.stdout
    counts = json.loads(out.with_suffix(".json").read_text())["counts"]
    assert {title.split(" / ")[0] for title in counts} == KINDS
    assert all(count["tried"] == count["held"] > 0 for count in counts.values())
