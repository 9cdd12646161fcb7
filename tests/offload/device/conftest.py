"""A simulated GPU: the fake driver, Triton's interpreter, and torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_config, write_tiny_checkpoint
from triton_interpreter import quick_interpreter


@pytest.fixture(scope="session")
def driver() -> Iterator[object]:
    """The fake driver, opened by this process."""
    from fake_cuda import VARIABLE, FakeCuda

    from moechat import _native

    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        patch.setenv(VARIABLE, str(cuda.path))
        assert _native.cuda_driver_version() == 12080
        yield cuda


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    """A small checkpoint."""
    directory = tmp_path_factory.mktemp("tiny") / "qwen3"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0, moe_intermediate_size=64))
    return directory


@pytest.fixture(autouse=True, scope="session")
def _cheaper_launches() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture(autouse=True)
def _cheaper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by programs and operations, whatever their size."""
    from wide_products import use_cheaper_kernels

    use_cheaper_kernels(monkeypatch)


@pytest.fixture
def gpu(driver: object) -> Iterator[object]:
    """A GPU with 8 GB, new for every test."""
    from interpreted_gpu import InterpretedGpu

    driver.reset()
    made = InterpretedGpu(driver)
    yield made
    made.close()
    driver.reset()
