"""Servers that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from serve_fixtures import calls_soon, demo, tools, tools_model
from serve_support import ServerProcess

__all__ = ["calls_soon", "demo", "tools", "tools_model"]


@pytest.fixture
def client(demo: ServerProcess) -> Iterator[httpx.Client]:
    with demo.client() as client:
        yield client
