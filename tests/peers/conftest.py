"""Servers that the tests against other programs share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from places import SUPPORT
from serve_fixtures import calls_soon, demo, tools, tools_model
from serve_support import PATIENCE_S

__all__ = ["calls_soon", "demo", "tools", "tools_model"]


@pytest.fixture(scope="session")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as a GGUF file of float32."""
    pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp) is not installed")
    from demo_gguf import demo_tensors, write_demo
    from gguf.constants import GGMLQuantizationType as Kind

    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    write_demo(Kind.F32, demo_tensors(), path, whole=True)
    return path


@pytest.fixture(scope="session")
def llama(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of llama.cpp's server with that file."""
    log = tmp_path_factory.mktemp("llama") / "log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, SUPPORT / "llama_server.py", demo_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), log.read_text()
        for _ in range(PATIENCE_S * 10):
            if httpx.get(f"{address}/health").status_code == 200:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(log.read_text())
        yield address
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()  # it has nothing to save
        process.wait(PATIENCE_S)
