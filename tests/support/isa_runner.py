"""Runs tests of a file under each instruction set, in one process that imports torch once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_CHILD = Path(__file__).with_name("isa_child.py")


def isa_fixture(file: str, chosen: str) -> Any:
    """A fixture of a module: a function that runs tests of ``file``, chosen as by pytest's ``-k``, under an
    instruction set.
    """

    @pytest.fixture(scope="module")
    def run_under() -> Iterator[Callable[[str], None]]:
        child = subprocess.Popen(
            [sys.executable, str(_CHILD), file, "-k", chosen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def run(isa: str) -> None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{isa}\n")
            child.stdin.flush()
            status, output = json.loads(child.stdout.readline())
            assert status == 0, output

        with child:
            yield run
            child.communicate()

    return run_under
