from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moechat.store.lock import exclusive_lock

HOLDER = """
import sys, time
from pathlib import Path
from moechat.store.lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / ".m.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waits = 0

        def waiting() -> None:
            nonlocal waits
            waits += 1
            if waits == 2:
                holder.send_signal(signal.SIGKILL)

        with exclusive_lock(path, waiting):
            assert waits >= 2
            assert path.exists()  # left behind by the killed process, taken over
    finally:
        holder.kill()
        holder.wait()
    assert not path.exists()


def test_removing_the_file_each_time_keeps_the_lock_exclusive(tmp_path: Path) -> None:
    path = tmp_path / ".m.lock"
    inside = 0
    most = 0
    entries = 0

    def work() -> None:
        nonlocal inside, most, entries
        for _ in range(15):
            with exclusive_lock(path):
                inside += 1
                most = max(most, inside)
                entries += 1
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, entries) == (1, 60)
    assert not path.exists()


def test_waiting_can_be_interrupted_and_closes_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / ".m.lock"

    def interrupt() -> None:
        raise KeyboardInterrupt

    with exclusive_lock(path):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KeyboardInterrupt), exclusive_lock(path, interrupt):
            pytest.fail("two holders at once")
        assert len(os.listdir("/proc/self/fd")) == before
        assert path.exists()  # still ours


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".m.lock"
    with pytest.raises(ZeroDivisionError), exclusive_lock(path):
        raise ZeroDivisionError
    with exclusive_lock(path, lambda: pytest.fail("still locked")):
        pass
