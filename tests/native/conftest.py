"""The fake driver for the tests of a module; the process keeps it open."""

import pytest
from fake_cuda import VARIABLE, FakeCuda

from moechat import _native


@pytest.fixture(scope="module")
def cuda():
    with pytest.MonkeyPatch.context() as patch:
        driver = FakeCuda()
        patch.setenv(VARIABLE, str(driver.path))
        _native.cuda_driver_version()
        yield driver
        driver.reset()
