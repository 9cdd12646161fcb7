"""Guards of mapped files: a file that others cut short, read by many threads; other faults stay fatal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import faulthandler, gc, mmap, os, signal, sys, threading
import numpy as np
from pathlib import Path
from moechat import _native
from moechat.store.mapped_file import GuardedMapping
path, kind = Path(sys.argv[1]), sys.argv[2]
size = 256 << 12
path.write_bytes(bytes([7]) * size)

def guarded():
    with open(path, "rb") as file:
        return GuardedMapping.of(file.fileno(), size)

def total(array):
    return int(array.sum(dtype=np.int64))

"""
CASES = {
    # Every thread meets the hole.
    "threads": """\
mapping = guarded()
array = np.ndarray((size,), np.uint8, buffer=mapping)
assert total(array) == 7 * size and mapping.lost is None
os.truncate(path, 10 << 12)
sums = []
threads = [threading.Thread(target=lambda: sums.append(total(array))) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert set(sums) == {7 * (10 << 12)}, sums
assert mapping.lost == 10 << 12, mapping.lost
assert _native.mapping_losses() >= 1
other = guarded_again = None
path.write_bytes(bytes([7]) * size)
again = guarded()
assert total(np.ndarray((size,), np.uint8, buffer=again)) == 7 * size and again.lost is None
assert mapping.lost == 10 << 12, "a loss stays"
""",
    # So do the threads of the kernels, which get no other signals.
    "kernels": """\
rows = size // 2 // 4096
x, out = np.ones((1, 4096), np.float32), np.empty((1, rows), np.float32)
for _ in range(50):
    path.write_bytes(bytes([7]) * size)
    mapping = guarded()
    weights = np.ndarray((rows, 4096), np.uint16, buffer=mapping)
    os.truncate(path, 4096)
    _native.rows16_forward(weights, False, x, None, out)
    assert mapping.lost == 4096, mapping.lost
    assert out[0, -1] == 0
""",
    # Whoever puts a handler back that was there before ours does not keep ours away for good.
    "put back": """\
faulthandler.enable()
mapping = guarded()
faulthandler.disable()
faulthandler.enable()
other = guarded()
os.truncate(path, 10 << 12)
assert total(np.ndarray((size,), np.uint8, buffer=other)) == 7 * (10 << 12)
assert other.lost == 10 << 12
""",
    # The handler is there only while a guard is.
    "handler": """\
def ours():
    import ctypes
    action = (ctypes.c_char * 256)()
    assert ctypes.CDLL(None).sigaction(signal.SIGBUS, None, ctypes.byref(action)) == 0
    return int.from_bytes(bytes(action)[:8], "little")

assert ours() == 0
mapping, second = guarded(), guarded()
assert ours() != 0
array = np.ndarray((size,), np.uint8, buffer=mapping)
del mapping
second.close()
gc.collect()
assert ours() != 0, "the array keeps its mapping"
os.truncate(path, 0)
assert total(array) == 0
del array
gc.collect()
assert ours() == 0
""",
    # A fault elsewhere ends the process as before.
    "elsewhere": """\
mapping = guarded()
with open(path, "rb") as file:
    bare = np.ndarray((size,), np.uint8, buffer=mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
os.truncate(path, 0)
print("before", flush=True)
total(bare)
""",
    # Python's own handler of faults is called for faults elsewhere.
    "faulthandler": """\
faulthandler.enable()
mapping = guarded()
array = np.ndarray((size,), np.uint8, buffer=mapping)
with open(path, "rb") as file:
    bare = np.ndarray((size,), np.uint8, buffer=mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
os.truncate(path, 0)
assert total(array) == 0
print("before", flush=True)
total(bare)
""",
    # One that was enabled later gives ours the fault when it is done.
    "faulthandler later": """\
mapping = guarded()
faulthandler.enable()
array = np.ndarray((size,), np.uint8, buffer=mapping)
os.truncate(path, 0)
assert total(array) == 0 and mapping.lost == 0
""",
    "a signal that was sent": """\
mapping = guarded()
print("before", flush=True)
os.kill(os.getpid(), signal.SIGBUS)
""",
}
FATAL = ("elsewhere", "faulthandler", "a signal that was sent")


@pytest.mark.parametrize("kind", CASES)
def test_guarded_mappings(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + CASES[kind], str(tmp_path / "file"), kind],
        capture_output=True,
        text=True,
        preexec_fn=lambda: __import__("resource").setrlimit(4, (0, 0)),  # no core files
    )
    if kind in FATAL:
        assert done.stdout == "before\n", done.stderr
        assert done.returncode == -signal.SIGBUS
        assert ("Fatal Python error: Bus error" in done.stderr) == (kind == "faulthandler")
    else:
        assert done.returncode == 0, done.stderr


def test_a_guard_needs_bytes() -> None:
    from moechat import _native

    with pytest.raises(ValueError, match="must have bytes"):
        _native.MappedGuard(b"")
    assert os.getpid() > 0
