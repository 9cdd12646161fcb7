"""The openai package as a client of a server under test."""

from __future__ import annotations

import openai
from serve_support import PATIENCE_S, ServerProcess


def openai_client(server: ServerProcess) -> openai.OpenAI:
    """A client that waits as long as tests do, and repeats nothing; a context manager."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)
