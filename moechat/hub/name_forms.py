"""Other spellings of a model's name: the URL of a page on the hub, and the names of known shapes."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

# Aliases of the models whose shapes ship with the package, by shape.
_ALIAS_OF_SHAPE = {
    "mixtral-8x7b": "mixtral",
    "qwen1.5-moe-a2.7b": "qwen-moe",
    "qwen3-30b-a3b": "qwen3",
    "olmoe-1b-7b": "olmoe",
    "phi-3.5-moe": "phi-moe",
    "qwen3.6-35b-a3b": "qwen3.6",
    "qwen3-coder-next": "coder-next",
    "glm-4.7-flash": "glm-flash",
    "glm-4.5-air": "glm-air",
    "gemma-4-26b-a4b": "gemma4",
    "laguna-xs-2.1": "laguna",
    "minimax-m2.5": "minimax",
    "nemotron-3.5-lightning": "nemotron",
}
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_NOT_MODELS = {"datasets", "spaces", "collections", "docs", "papers", "api"}
# Path segments that a revision follows.
_BEFORE_REVISION = {"tree", "blob", "resolve", "raw", "commit", "commits"}


def normalise_name(model: str) -> str:
    """Convert a URL to ``org/name[@revision][:file.gguf]``, and the name of a known shape to its alias.

    URLs of the hub and of ``HF_ENDPOINT`` are recognised, also without ``https://``; shape names in any case.
    All other names, and existing paths, are returned unchanged.
    """
    if os.path.exists(model):
        return model
    name_in_url = _parse_url(model)
    if name_in_url is not None:
        return name_in_url
    name, rest = re.fullmatch(r"([^@:]*)(.*)", model, re.DOTALL).groups()  # type: ignore[union-attr]
    alias = _ALIAS_OF_SHAPE.get(name.lower())
    return model if alias is None else alias + rest


def _parse_url(model: str) -> str | None:
    text = _SCHEME.sub("", model, count=1) if _SCHEME.match(model) else model
    endpoint = _SCHEME.sub("", os.environ.get("HF_ENDPOINT", ""), count=1).rstrip("/")
    for base in (*_HOSTS, *([endpoint] if endpoint else [])):
        if text.lower().startswith(f"{base.lower()}/"):
            break
    else:
        return None
    parts = re.split(r"[?#]", text[len(base) + 1 :], maxsplit=1)[0].rstrip("/").split("/")
    if len(parts) < 2 or parts[0] in _NOT_MODELS:
        return None
    name = "/".join(parts[:2])
    if len(parts) > 3 and parts[2] in _BEFORE_REVISION:
        # refs/pr/1 is one revision; after other revisions come file names.
        revision = "/".join(parts[3:6]) if parts[3] == "refs" else unquote(parts[3])
        if parts[-1].lower().endswith(".gguf"):
            place = name if revision == "main" else f"{name}@{revision}"
            return f"{place}:{unquote(parts[-1])}"
        return f"{name}@{revision}"
    return name
