"""Fixtures of the GPU kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton_interpreter import quick_interpreter


@pytest.fixture(autouse=True, scope="session")
def _cheaper_launches() -> Iterator[None]:
    with quick_interpreter():
        yield
