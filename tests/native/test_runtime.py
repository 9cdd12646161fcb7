import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from native_support import Call, run_isa

from moechat import _native


def test_the_best_instruction_set_is_chosen_and_known():
    available, built = _native.available_isas(), _native.built_isas()
    assert available[0] == built[0] == "portable"
    assert set(available) <= set(built)
    features = _native.cpu_features()
    wide = all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
    wider = wide and all(features.get(f"avx512{name}", False) for name in ("f", "bw", "dq", "vl"))
    runs = {
        "avx2": wide,
        "avx2-vnni": wide and features.get("avx_vnni", False),
        "avx512": wider,
        "avx512-vnni": wider and features.get("avx512_vnni", False),
    }
    assert [isa for isa in runs if isa in available] == [isa for isa in runs if runs[isa] and isa in built]
    done = run_isa("from moechat import _native; print(_native.active_isa())", "")
    assert done.stdout.strip() == available[-1]


@pytest.mark.parametrize("isa", _native.available_isas())
def test_the_environment_overrides_the_choice(isa):
    done = run_isa("from moechat import _native; print(_native.active_isa())", isa)
    assert done.stdout.strip() == isa


def test_a_build_contains_the_best_instruction_set_of_its_processor():
    features = _native.cpu_features()
    if not all(features.get(name, False) for name in ("avx2", "fma", "f16c")):
        pytest.skip("only the portable kernels run here")
    assert _native.available_isas()[-1] != "portable"


def test_an_instruction_set_that_is_not_compiled_in_is_named_with_the_way_to_build_it():
    sets = ["avx2", "avx2-vnni", "avx512", "avx512-vnni"]
    features = _native.cpu_features()
    runs = {
        "avx2": all(features.get(name, False) for name in ("avx2", "fma", "f16c")),
        "avx512": all(features.get(f"avx512{name}", False) for name in ("f", "bw", "dq", "vl")),
    }
    missing = [isa for isa in sets if runs.get(isa) and isa not in _native.built_isas()]
    if not missing:
        pytest.skip("this build has all instruction sets")
    done = run_isa("from moechat import _native; _native.active_isa()", missing[0])
    assert f"MOECHAT_ISA={missing[0]} is not compiled into this build, which has portable, " in done.stderr
    assert "MOECHAT_ISAS=all scripts/setup compiles all instruction sets" in done.stderr


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "avx512", "avx2_vnni"])
def test_an_impossible_instruction_set_fails_loudly_at_first_use(isa):
    if isa in _native.available_isas():
        pytest.skip("this processor runs it")
    code = """
import numpy as np
from moechat import _native
layout = _native.BlockLayout(64, 64, 4)
weights = np.zeros((64, 64), np.float32)
out = np.zeros((1, layout.record_bytes), np.uint8)
empty = [np.zeros(0, t) for t in (np.uint64, np.int32, np.int32)]
csr = [np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)]
tokens = np.zeros((1, 64), np.float32)
for use in (
    _native.active_isa,
    lambda: _native.pack_expert(layout, weights, weights, weights, None, out),
    lambda: _native.moe_forward(layout, _native.Gate(), tokens, *empty, *csr, tokens.copy()),
):
    try:
        use()
    except RuntimeError as error:
        print(error)
print(_native.available_isas())
"""
    done = run_isa(code, isa)
    assert done.returncode == 0, done.stderr
    *errors, names = done.stdout.splitlines()
    assert len(errors) == 3
    assert all(f"MOECHAT_ISA={isa}" in line and "portable" in line for line in errors)
    assert "portable" in names


def test_thread_numbers_are_checked_and_default_to_the_cores_at_hand():
    done = run_isa("from moechat import _native; print(_native.num_threads())")
    assert 1 <= int(done.stdout) <= len(os.sched_getaffinity(0))
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    done = run_isa(code + "from moechat import _native; print(_native.num_threads())")
    assert int(done.stdout) == 1
    for bad in (0, -3, 1025):
        with pytest.raises(ValueError, match=f"number of threads is {bad}"):
            _native.set_num_threads(bad)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_the_same_even_when_forked_during_a_call():
    call = Call.random(1, 700, 400, 4, tokens=4)
    _native.set_num_threads(3)
    expected = call.run()
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            call.run()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(30)
                code = 1
                try:
                    code = 0 if np.array_equal(expected, call.run()) and _native.num_threads() == 3 else 2
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert status == 0
    finally:
        stop.set()
        busy.join(timeout=30)
    assert np.array_equal(expected, call.run())
    _native.set_num_threads(2)


def _child(queue: "multiprocessing.Queue[bytes]") -> None:
    queue.put(Call.random(1, 96, 64, 4).run().tobytes())


def test_a_spawned_process_computes_the_same_bits():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    received = queue.get(timeout=60)
    process.join(timeout=60)
    assert received == Call.random(1, 96, 64, 4).run().tobytes()


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "Thread(target=lambda: [call.run() for _ in range(10**6)], daemon=True).start()",
        "raise SystemExit(0)",
    ],
)
def test_the_interpreter_ends_promptly_with_workers_alive(ending):
    code = f"""
from threading import Thread
from native_support import Call
from moechat import _native
_native.set_num_threads(4)
call = Call.random(1, 700, 400, 4)
call.run()
{ending}
"""
    done = run_isa(code)
    assert done.returncode == 0, done.stderr


def test_the_gil_is_free_while_the_kernels_run():
    call = Call.random(1, 1024, 1024, 8, tokens=200)
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(1)
            stop.wait(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    for _ in range(3):
        call.run()
    during = len(ticks) - before
    stop.set()
    thread.join()
    assert during >= 3


@pytest.mark.parametrize("name", ["row_token", "row_start", "block_row", "block_index"])
def test_indices_that_share_memory_with_the_output_are_read_before_it_is_written(name):
    """Runs in a child: indices read again after the check would take kernels out of bounds."""
    code = f"""
import numpy as np
from moechat import _native
layout = _native.BlockLayout(64, 64, 16)
record = np.zeros((1, layout.record_bytes), np.uint8)
eye = np.eye(64, dtype=np.float32)
_native.pack_expert(layout, eye, eye, eye * 1e30, None, record)
out = np.zeros((4, 64), np.float32)
index = dict(row_token=np.zeros(1, np.int32), row_start=np.array([0, 1], np.int32),
             block_row=np.zeros(1, np.int32), block_index=np.zeros(1, np.int32))
shared = out.view(np.int32)[0, : len(index[{name!r}])]
shared[:] = index[{name!r}]
index[{name!r}] = shared
for _ in range(3):
    try:
        _native.moe_forward(layout, _native.Gate(), np.full((4, 64), 3.0, np.float32),
            np.array([record.ctypes.data], np.uint64), index["block_index"], index["block_row"],
            index["row_start"], index["row_token"], np.ones(1, np.float32), out)
    except ValueError:
        pass
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
