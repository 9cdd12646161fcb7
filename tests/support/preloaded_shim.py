"""Builds a C file that replaces calls of the system library, for ``LD_PRELOAD``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def built_shim(source: str, directory: Path) -> Path:
    """The shared library of a C source; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    file, library = directory / "shim.c", directory / "shim.so"
    file.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, file, "-ldl"], check=True)
    return library
