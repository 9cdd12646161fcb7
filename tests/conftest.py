"""Settings of all tests: a library of their own, signals as a terminal sets them, a GPU for GPU tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import moechat  # noqa: F401 - sets how torch's threads wait, before a test imports torch

pytest_plugins = ["selection"]

# Examples take longer on a busy machine, which is no failure; a test that hangs ends by pytest's own limit.
settings.register_profile("moechat", deadline=None)
settings.load_profile("moechat")

# Programs that tests start shall start as fast as an installed one, whose compiled modules are kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Shells start background jobs with Ctrl-C ignored, and nohup ignores SIGHUP: programs that tests start would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Triton reads this when it is imported: without a GPU its kernels are interpreted.
if not any(Path(place).exists() for place in ("/proc/driver/nvidia/version", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests an empty home and none of the user's MOECHAT variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOECHAT_")]:
            # These two choose the build under test.
            if name not in ("MOECHAT_ISA", "MOECHAT_PYTHON"):
                patch.delenv(name)
        patch.setenv("MOECHAT_HOME", str(tmp_path_factory.mktemp("moechat-home")))
        patch.setenv("MOECHAT_NO_DAEMON", "1")  # else tests would use the servers of others
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a CUDA device; import torch only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
