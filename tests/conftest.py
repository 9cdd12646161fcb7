"""What holds for every test: nobody's own library is touched, and GPU tests need a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Triton, which decides then: without a card its kernels are interpreted.
if not any(Path(place).exists() for place in ("/proc/driver/nvidia/version", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the library, the settings and the variables of whoever runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOECHAT_")]:
            # The instruction set is a property of the build under test, not of its user.
            if name not in ("MOECHAT_ISA", "MOECHAT_PYTHON"):
                patch.delenv(name)
        patch.setenv("MOECHAT_HOME", str(tmp_path_factory.mktemp("moechat-home")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none; torch is asked only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
