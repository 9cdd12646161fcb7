"""Fixtures of the GPU kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton_interpreter import list_members_once


@pytest.fixture(autouse=True, scope="session")
def _cheaper_launches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        list_members_once(patch)
        yield
