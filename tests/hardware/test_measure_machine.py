"""Real measurements of this machine, shortened. No speed is asserted: other programs run here, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvml import one_gpu_here
from played_card import PlayedCard

from moechat import _native
from moechat.errors import DoesNotFitError, MoechatError
from moechat.hardware import disk_speed, kernel_sweep, measure_link
from moechat.hardware import measure as room
from moechat.hardware.kernel_sweep import KernelSweep
from moechat.hardware.measure import measure, measure_machine
from moechat.hardware.measure_budget import EXPERT_BYTES, LARGE_BYTES, RECORD_BYTES, Budget
from moechat.hardware.measure_cpu import (
    Background,
    ExpertMemory,
    Passes,
    compute_rate,
    last_cache_bytes,
    operation_rate,
    thread_counts,
    used_threads,
)
from moechat.hardware.measure_link import latency, stream
from moechat.hardware.measured_file import Measurement, load_measured
from moechat.hardware.profile import Figure
from moechat.hardware.resident_pages import touched_pages

MIB = 1 << 20
SHORT = Budget(
    scratch_bytes=2 * LARGE_BYTES,
    link_seconds=0.05,
    latency_seconds=0.01,
    memory_bytes=64 * MIB,
    stream_seconds=0.02,
    compute_seconds=0.02,
    many_seconds=0.0,
    together_seconds=0.05,
    bits=(2, 4),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("measured")
        patch.setenv("MOECHAT_HOME", str(place))
        yield place


@pytest.fixture(scope="module")
def measured(home: Path) -> Measurement:
    _native.set_num_threads(_native.available_cores())  # whatever other tests have left
    return measure(budget=SHORT)


def figures(measurement: Measurement) -> dict[str, Figure]:
    profile = measurement.profile
    link = profile.links["file"]
    found = {"ram": profile.ram, "stream": profile.ram_bandwidth, "latency": link.latency}
    found |= {f"link {size}": figure for size, figure in link.bandwidth.items()}
    found |= {f"latency {size}": figure for size, figure in link.latencies.items()}
    for bits, rates in profile.expert_rate.items():
        found |= {f"rate {bits} {threads}": figure for threads, figure in rates.items()}
        found[f"together {bits}"] = profile.expert_rate_together[bits]
        found[f"flops {bits}"] = profile.expert_flops[bits]
    assert link.together is not None
    found["link together"] = link.together
    return found


def test_every_figure_is_measured_and_positive(measured: Measurement) -> None:
    for name, figure in figures(measured).items():
        assert figure.value > 0, name
        assert figure.origin == "measured", name
        assert figure.source, name


def test_all_requested_figures_are_measured(measured: Measurement) -> None:
    profile = measured.profile
    assert set(profile.expert_rate) == {2, 4}
    assert all(set(rates) == set(thread_counts(profile.cores)) for rates in profile.expert_rate.values())
    link = profile.links["file"]
    assert list(link.bandwidth) == list(link.latencies) == [RECORD_BYTES, EXPERT_BYTES, LARGE_BYTES]
    assert link.latency == link.latencies[RECORD_BYTES]
    assert profile.cores == _native.available_cores()
    assert profile.isa == _native.active_isa()
    assert profile.ram.value > 1 << 28
    assert measured.facts["disk_read"] == "scratch file"
    assert measured.facts["disk_read_bytes"] == 2 * LARGE_BYTES
    assert measured.seconds > 0
    if profile.gpu is None:
        assert measured.missing["gpu"]


GPU_BUDGET = replace(
    SHORT,
    bits=(4,),
    gpu_cell_seconds=0.01,
    gpu_together_seconds=0.02,
    gpu_link_bytes=8 * MIB,
    gpu_transfers=(64 << 10, MIB),
    gpu_depths=(1, 4),
    pin_chunk=8 * MIB,
    pin_most=16 * MIB,
)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This machine as if NVIDIA's library reported a GPU."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    with one_gpu_here(monkeypatch):
        yield


def test_a_gpu_is_measured_into_the_profile_and_kept(with_gpu: None) -> None:
    profile = measure_machine(budget=GPU_BUDGET, open_card=lambda device: PlayedCard())
    assert profile.gpu is not None
    assert profile.gpu.name == "NVIDIA GeForce RTX 3060"
    assert profile.gpu.bandwidth.origin == profile.gpu.expert_rate[4][1].origin == "measured"
    assert profile.gpu.vram.value == 12 << 30
    link = profile.links["gpu"]
    assert link.measured
    # Plans for the GPU take the CPU's rate beside its link, others that beside the disk.
    assert profile.expert_rate_together == link.experts
    assert set(profile.links["file"].experts) == {4}
    assert link.experts[4].value <= profile.expert_rate[4][profile.cores].value
    assert load_measured() == replace(profile, gpu=load_measured().gpu)  # type: ignore[union-attr]


def test_a_gpu_that_cannot_be_opened_is_assumed_and_says_why(with_gpu: None) -> None:
    def refuse(device: object) -> PlayedCard:
        raise DoesNotFitError("torch finds no GPU")

    found = measure(budget=GPU_BUDGET, open_card=refuse)
    assert found.missing["link gpu"] == "torch finds no GPU"
    assert "gpu" not in found.profile.links
    assert found.profile.gpu is not None
    assert found.profile.gpu.bandwidth.origin == "estimate"
    assert found.profile.expert_rate


def test_nothing_is_faster_together_than_alone(measured: Measurement) -> None:
    profile = measured.profile
    for bits, together in profile.expert_rate_together.items():
        assert together.value <= profile.expert_rate[bits][profile.cores].value
    link = profile.links["file"]
    assert link.together is not None
    assert link.together.value <= link.bandwidth[LARGE_BYTES].value


def test_memory_gives_at_least_what_kernels_read_of_it(measured: Measurement) -> None:
    profile = measured.profile
    fastest = max(rate.value for rates in profile.expert_rate.values() for rate in rates.values())
    assert profile.ram_bandwidth.value >= fastest


def test_of_two_rounds_the_better_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([3.0, 5.0, 4.0, 6.0])
    monkeypatch.setattr(kernel_sweep, "compute_rate", lambda *arguments, **named: next(rates))
    monkeypatch.setattr(kernel_sweep, "operation_rate", lambda *arguments, **named: 1.0)
    sweep = KernelSweep(ExpertMemory(64 * MIB), 2, lambda _: None)
    busy = iter([40.0, 20.0])
    for _ in range(2):
        sweep.run([4], compute_seconds=0, many_seconds=0, link=lambda seed: next(busy))
    assert {threads: rate.value for threads, rate in sweep.rate[4].items()} == {1: 4.0, 2: 6.0}
    assert sweep.link_together is not None
    # The link's figure is of the same round as the kernels'.
    assert sweep.link_together.value in (40.0, 20.0)
    sweep.settle()
    assert sweep.rate[4][2].value == sweep.together[4].value > 6.0
    assert sweep.stream is not None
    assert sweep.stream.value == sweep.together[4].value


def test_a_link_that_fails_under_load_leaves_the_kernels_alone() -> None:
    def fail(seed: int) -> float:
        raise OSError(5, "Input/output error")

    sweep = KernelSweep(ExpertMemory(64 * MIB), 1, lambda _: None)
    sweep.run([4], compute_seconds=0, many_seconds=0, link=fail)
    assert "Input/output error" in sweep.failure
    assert sweep.rate[4][1].value > 0
    assert not sweep.together
    assert sweep.link_together is None


def test_nothing_is_left_in_the_library(measured: Measurement, home: Path) -> None:
    assert not list((home / "data" / "models").iterdir())


def test_the_number_of_threads_is_restored(measured: Measurement) -> None:
    assert _native.num_threads() == _native.available_cores()


def test_a_measured_profile_is_stored_and_loaded(home: Path) -> None:
    said: list[str] = []
    profile = measure_machine(said.append, budget=SHORT)
    assert load_measured() == profile
    assert any(step.startswith("CPU: experts of 4 bits") for step in said)


def test_a_profile_that_cannot_be_stored_is_still_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "profiles").write_text("a file in the way")
    said: list[str] = []
    assert measure_machine(said.append, budget=SHORT).expert_rate
    assert said[-1].startswith("the profile was not saved: ")


def test_with_a_full_disk_only_the_link_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    measurement = measure(budget=replace(SHORT, bits=(4,), keep_free=1 << 60))
    assert not measurement.profile.links
    assert not measurement.profile.expert_rate_together
    assert measurement.profile.expert_rate[4]
    assert "MiB are free" in measurement.missing["link file"]


def test_without_a_library_only_the_link_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    (tmp_path / "data").write_text("a file in the way")
    measurement = measure(budget=replace(SHORT, bits=(4,)))
    assert not measurement.profile.links
    assert "nothing can be written" in measurement.missing["link file"]


def test_stores_are_read_instead_of_a_scratch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    store = tmp_path / "data" / "models" / "some"
    store.mkdir(parents=True)
    file = store / "experts-0.safetensors"
    file.write_bytes(np.random.default_rng(0).bytes(2 * LARGE_BYTES))
    os.sync()
    monkeypatch.setattr(disk_speed, "scratch_file", None)
    measurement = measure(budget=replace(SHORT, bits=(4,)))
    assert measurement.facts["disk_read"] == "stores"
    assert measurement.profile.links["file"].bandwidth[LARGE_BYTES].value > 0
    assert [entry.name for entry in store.iterdir()] == [file.name]


def test_a_file_system_without_direct_reads_is_read_through_the_cache_with_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    monkeypatch.setattr(disk_speed, "reads_direct", lambda path: False)
    measurement = measure(budget=replace(SHORT, bits=(4,), link_seconds=30.0, together_seconds=30.0))
    assert measurement.facts["direct_reads"] is False
    assert any("refuses direct reads" in remark or "in memory" in remark for remark in measurement.remarks)
    # Each unit is read once, so it does not go on for half a minute.
    assert measurement.seconds < 60


def test_too_little_memory_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 100 * MIB)
    with pytest.raises(DoesNotFitError, match="measuring takes 256 MiB of memory; 100 MiB are available"):
        measure(budget=SHORT)


# ---- parts


def _file(directory: Path, nbytes: int) -> str:
    path = directory / "blocks"
    path.write_bytes(np.random.default_rng(0).bytes(nbytes))
    return str(path)


def test_a_stream_moves_whole_units_and_counts_them(tmp_path: Path) -> None:
    path = _file(tmp_path, 4 * MIB)
    moved = stream(_native.file_link([(path, 0, 4 * MIB)]), MIB, MIB // 4, seconds=60, once=True)
    assert moved.nbytes == 4 * MIB
    assert moved.rate == moved.nbytes / moved.seconds
    again = stream(_native.file_link([(path, 0, 4 * MIB)]), MIB, MIB // 4, seconds=0.05)
    assert again.nbytes % MIB == 0
    assert again.nbytes > 0


def test_a_stream_knows_the_speed_of_a_link() -> None:
    memory = np.zeros(8 * MIB, dtype=np.uint8)
    link = _native.sim_link([memory], bandwidth=200e6)
    moved = stream(link, MIB, MIB // 4, seconds=0.3, window=touched_pages(1, 2 * MIB))
    assert moved.rate == pytest.approx(200e6, rel=0.25)


def test_latency_is_that_of_an_idle_link() -> None:
    memory = np.zeros(8 * MIB, dtype=np.uint8)
    waited = latency(_native.sim_link([memory], latency=0.02), MIB // 4, MIB // 4, seconds=0.01)
    assert 0.02 <= waited < 0.1


def test_latency_of_a_unit_is_until_its_last_byte() -> None:
    memory = np.zeros(16 * MIB, dtype=np.uint8)
    waits = {
        size: latency(
            _native.sim_link([memory], bandwidth=100 * MIB, latency=0.005), size, MIB // 4, seconds=0.05
        )
        for size in (MIB // 4, 4 * MIB)
    }
    assert waits[MIB // 4] >= 0.005 + 0.0025
    assert 0.04 <= waits[4 * MIB] < 0.2


def test_through_the_page_cache_no_unit_is_read_twice() -> None:
    memory = np.zeros(16 * MIB, dtype=np.uint8)
    link = _native.sim_link([memory])
    asked: list[int] = []

    class Counting:
        """The link, with a note of every unit that is asked for."""

        def __getattr__(self, name: str) -> Any:
            return getattr(link, name)

        def submit(self, batch: list[tuple[int, int, int, int, int]], target: Any) -> None:
            assert [entry[2] - batch[0][2] for entry in batch] == [0, MIB // 4, MIB // 2, 3 * MIB // 4]
            asked.append(batch[0][2])
            link.submit(batch, target)

    latency(Counting(), MIB, MIB // 4, seconds=60, once=True)  # type: ignore[arg-type]
    assert sorted(asked) == [at * MIB for at in range(16)]


@pytest.mark.parametrize(
    ("count", "most", "taken", "goes_on"),
    [
        (0, None, 9.0, True),  # one sample at least
        (1, None, 1.5, True),  # several, though the time is over
        (4, None, 2.9, True),
        (5, None, 1.1, False),
        (1, None, 3.1, False),  # unless each takes very long
        (100, None, 0.9, True),
        (3, 3, 0.1, False),  # nothing is left that was not read
    ],
)
def test_how_many_samples_are_taken(count: int, most: int | None, taken: float, goes_on: bool) -> None:
    assert measure_link._goes_on(count, most, taken, seconds=1.0) is goes_on


def test_errors_of_a_link_are_errors() -> None:
    memory = np.zeros(8 * MIB, dtype=np.uint8)
    with pytest.raises(MoechatError, match="cannot be read: Input/output error"):
        stream(_native.sim_link([memory], fault_rate=1.0), MIB, MIB // 4, seconds=1)
    with pytest.raises(MoechatError, match="has failed"):
        stream(_native.sim_link([memory], fail_after=3), MIB, MIB // 4, seconds=1)
    with pytest.raises(MoechatError, match="nothing has come from"):
        stream(_native.sim_link([memory], stall_after=3), MIB, MIB // 4, seconds=1, stall_seconds=0.1)
    with pytest.raises(MoechatError, match="cannot be read"):
        latency(_native.sim_link([memory], fault_rate=1.0), MIB // 4, MIB // 4, seconds=0.01)
    with pytest.raises(MoechatError, match="nothing has come from"):
        latency(_native.sim_link([memory], stall_after=3), MIB, MIB // 4, seconds=1, stall_seconds=0.1)
    with pytest.raises(ValueError, match="no region of the link holds"):
        latency(_native.sim_link([memory]), 16 * MIB, MIB, seconds=1)
    with pytest.raises(ValueError, match="does not hold a unit"):
        latency(_native.sim_link([memory]), 4 * MIB, MIB, seconds=1, window=touched_pages(1, MIB))
    with pytest.raises(ValueError, match="no region of the link holds"):
        stream(_native.sim_link([memory]), 16 * MIB, MIB, seconds=1)
    with pytest.raises(ValueError, match="does not hold two units"):
        stream(_native.sim_link([memory]), 4 * MIB, MIB, seconds=1, window=touched_pages(1, MIB))


def test_each_expert_is_computed_once_before_any_is_again() -> None:
    experts = ExpertMemory(64 * MIB).fill(2)
    passes = Passes(experts, top_k=4)
    count = len(experts.records)
    assert count > 20
    chosen = passes._choices.reshape(-1)
    assert set(chosen.tolist()) == set(range(count))
    assert len(chosen) < count + 4
    passes.once()
    assert passes.nbytes == 4 * experts.records[0].nbytes


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
def test_rates_count_what_was_computed(bits: int) -> None:
    experts = ExpertMemory(64 * MIB).fill(bits)
    assert experts.layout.bits == bits
    assert compute_rate(experts, 1, seconds=0.01) > 0
    assert operation_rate(experts, 1, seconds=0.0) > 0
    # The weights are numbers, so that no kernel is slowed down by what is none.
    gate, _, down, _ = _native.unpack_expert(experts.layout, experts.records[-1])
    assert np.isfinite(gate).all()
    assert 0 < np.abs(down).max() < 1


def test_the_number_of_threads_is_restored_after_errors() -> None:
    before = _native.num_threads()
    inside = 0
    try:
        with used_threads(before + 1):
            inside = _native.num_threads()
            raise RuntimeError
    except RuntimeError:
        pass
    assert inside == before + 1
    assert _native.num_threads() == before


def test_the_background_computes_while_the_block_runs_and_ends_with_it() -> None:
    experts = ExpertMemory(64 * MIB).fill(4)
    with Background(experts, 1) as background:
        time.sleep(0.05)
    assert background.rate > 0
    assert "moechat-measure" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="inside"), Background(experts, 1):
        raise RuntimeError("inside")
    assert "moechat-measure" not in {thread.name for thread in threading.enumerate()}


def test_thread_counts_are_powers_of_two_and_all() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 3, 6, 16)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]


@pytest.mark.parametrize(("share", "remarked"), [(0.05, False), (0.5, True)])
def test_a_busy_machine_gets_a_remark(monkeypatch: pytest.MonkeyPatch, share: float, remarked: bool) -> None:
    monkeypatch.setattr(room._Others, "share", lambda self: share)
    measurement = measure(budget=replace(SHORT, bits=(4,), link_seconds=0.01))
    assert any("50% of the processors" in remark for remark in measurement.remarks) == remarked
    assert measurement.facts["others_share"] == share


def test_the_load_of_other_programs_excludes_this_process() -> None:
    others = room._Others()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
    finally:
        busy.kill()
        busy.wait()
    assert others.share() >= 0.5 / (os.cpu_count() or 1)


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "32M", "what")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache_bytes(tmp_path) == 32 * MIB
    assert last_cache_bytes(tmp_path / "missing") == 0


def test_pages_are_aligned_and_zero() -> None:
    pages = touched_pages(3, 8192)
    assert pages.shape == (3, 8192)
    assert pages.ctypes.data % 4096 == 0
    assert not pages.any()


# ---- reading memory


def test_reading_memory_takes_threads_and_any_alignment() -> None:
    data = np.arange(1 << 20, dtype=np.uint8)
    for part in (data, data[1:], data[:4096], data[3:4099]):
        for threads in (1, 2, 7):
            assert _native.stream_read_rate(part, threads, 0.0) > 0


def test_reading_memory_refuses_invalid_arguments() -> None:
    data = np.zeros(8192, dtype=np.uint8)
    for arguments in ((data, 0, 0.1), (data, 1025, 0.1), (data, 1, -1.0), (data, 1, float("nan"))):
        with pytest.raises(ValueError, match=r"threads is|are not a finite"):
            _native.stream_read_rate(*arguments)
    with pytest.raises(ValueError, match="4095 bytes to read"):
        _native.stream_read_rate(data[:4095], 1, 0.0)
    with pytest.raises(ValueError, match="C-contiguous"):
        _native.stream_read_rate(data[::2], 1, 0.0)
    with pytest.raises(ValueError, match="dtype"):
        _native.stream_read_rate(data.view(np.float32), 1, 0.0)  # type: ignore[arg-type]


def test_reading_memory_takes_the_time_given_and_lets_others_run() -> None:
    data = np.zeros(MIB, dtype=np.uint8)
    steps: list[float] = []
    worker = threading.Thread(target=lambda: _native.stream_read_rate(data, 1, 0.3))
    started = time.perf_counter()
    worker.start()
    while worker.is_alive():
        steps.append(time.perf_counter())
        time.sleep(0.005)
    assert time.perf_counter() - started >= 0.3
    assert len(steps) > 5
    assert max(after - before for before, after in pairwise(steps)) < 0.29


def test_reading_memory_ends_with_ctrl_c() -> None:
    code = (
        "import numpy as np; from moechat import _native; print('ready', flush=True); "
        "_native.stream_read_rate(np.zeros(1 << 20, dtype=np.uint8), 1, 60.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
