"""Configurations of known models that ship with the package, for plans without weights.

Nothing here needs torch or the network.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from moechat.errors import UsageError
from moechat.hub.model_ref import ALIASES
from moechat.hub.name_forms import normalise_name

# Shapes by repository in lower case.
_REPOSITORIES = {
    "mistralai/mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mistralai/mixtral-8x7b-instruct-v0.1": "mixtral-8x7b",
    "qwen/qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen/qwen3-30b-a3b-base": "qwen3-30b-a3b",
    "qwen/qwen1.5-moe-a2.7b": "qwen1.5-moe-a2.7b",
    "qwen/qwen1.5-moe-a2.7b-chat": "qwen1.5-moe-a2.7b",
    "allenai/olmoe-1b-7b-0125": "olmoe-1b-7b",
    "allenai/olmoe-1b-7b-0125-instruct": "olmoe-1b-7b",
    "allenai/olmoe-1b-7b-0924": "olmoe-1b-7b",
    "allenai/olmoe-1b-7b-0924-instruct": "olmoe-1b-7b",
    "microsoft/phi-3.5-moe-instruct": "phi-3.5-moe",
    "deepseek-ai/deepseek-v2-lite": "deepseek-v2-lite",
    "deepseek-ai/deepseek-v2-lite-chat": "deepseek-v2-lite",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "qwen/qwen3.6-35b-a3b": "qwen3.6-35b-a3b",
    "qwen/qwen3-coder-next": "qwen3-coder-next",
    "zai-org/glm-4.7-flash": "glm-4.7-flash",
    "zai-org/glm-4.5-air": "glm-4.5-air",
    "google/gemma-4-26b-a4b-it": "gemma-4-26b-a4b",
    "poolside/laguna-xs-2.1": "laguna-xs-2.1",
    "minimaxai/minimax-m2.5": "minimax-m2.5",
    "nvidia/nvidia-nemotron-3.5-lightning-30b-a3b-bf16": "nemotron-3.5-lightning",
    "deepseek-ai/deepseek-v4-flash": "deepseek-v4-flash",
}


def _directory() -> Any:
    return resources.files("moechat.hub") / "shapes"


def shape_names() -> list[str]:
    """Names of all known shapes, sorted."""
    return sorted(
        file.name.removesuffix(".json") for file in _directory().iterdir() if file.name.endswith(".json")
    )


def shape_bytes(name: str) -> bytes:
    """The ``config.json`` of a known shape.

    Raises:
        UsageError: The name is unknown.
    """
    if name not in shape_names():
        raise UsageError(f"there is no shape {name!r}", hint=f"choose one of: {', '.join(shape_names())}")
    content: bytes = (_directory() / f"{name}.json").read_bytes()
    return content


def shape_values(name: str) -> dict[str, Any]:
    """The content of ``config.json`` of a known shape.

    Raises:
        UsageError: The name is unknown.
    """
    values: dict[str, Any] = json.loads(shape_bytes(name))
    return values


def find_shape(model: str) -> str | None:
    """The name of a model's shape; ``None`` if unknown.

    Args:
        model: Alias, repository with or without a revision, URL on the hub, or shape name, in any case.
    """
    name = model.partition("@")[0].lower()
    if name not in shape_names():
        name = normalise_name(model).partition("@")[0].lower()
    if name in shape_names():
        return name
    return _REPOSITORIES.get(ALIASES.get(name, name).lower())
