"""Runs pieces of Python code, each in a process of its own that has run the same beginning.

For tests of what imports do: the beginning imports torch, which takes seconds, once for all pieces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence


def run_each(beginning: str, pieces: Sequence[str]) -> list[str]:
    """Run every piece after the beginning, without the other pieces.

    Args:
        beginning: Starts no threads.
        pieces: See the names of the beginning.

    Returns:
        What each has printed; a traceback in place of it if it failed.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([beginning, *pieces]),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: list[str] = json.loads(done.stdout)
    return printed


def _fork(piece: str, names: dict[str, object]) -> str:
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                exec(compile(piece, "piece", "exec"), names)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        for file in (printed, errors):
            file.seek(0)
        failure = f"status {os.waitstatus_to_exitcode(status)}: {errors.read()}"
        return printed.read() if status == 0 else failure


def _main() -> None:
    beginning, *pieces = json.load(sys.stdin)
    sys.path.pop(0)  # the folder of this file
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(beginning, "beginning", "exec"), names)
    print(json.dumps([_fork(piece, names) for piece in pieces]))


if __name__ == "__main__":
    _main()
