"""Servers of the demo, and of a model with tools, that the tests of several rooms use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_support import ServerProcess, serving
from tiny import write_tiny_chat_model

# Calls as Hermes and Qwen write them; thinking where it is wanted.
TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>{% endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor -%}
<|assistant|>{% if enable_thinking %}<think>
{% endif -%}
"""


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the demo model."""
    with serving(tmp_path_factory.mktemp("serve-demo"), "demo", "--parallel", "2", "-v") as server:
        yield server


@pytest.fixture(scope="session")
def tools_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint whose chat template has tools and thinking."""
    directory = tmp_path_factory.mktemp("tools-model")
    write_tiny_chat_model(directory, max_position_embeddings=4096)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def tools(tools_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of that model."""
    with serving(tmp_path_factory.mktemp("serve-tools"), str(tools_model)) as server:
        yield server


@pytest.fixture(scope="session")
def calls_soon(tools_model: Path) -> dict[str, int]:
    """A bias for that model: it writes ``<tool_call>``, not ``<think>``, and ends behind a call."""
    content = json.loads((tools_model / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    return {str(content["model"]["vocab"]["h"]): -100, str(added["<|end|>"]): 100}
