"""Other ways to write a model's name: the address of its page on the hub, and the names of known shapes."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

# Shapes that `plan` knows, and the alias of the model that they are the shape of.
_ALIAS_OF_SHAPE = {
    "mixtral-8x7b": "mixtral",
    "qwen1.5-moe-a2.7b": "qwen-moe",
    "qwen3-30b-a3b": "qwen3",
    "olmoe-1b-7b": "olmoe",
    "phi-3.5-moe": "phi-moe",
}
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_NO_MODELS = {"datasets", "spaces", "collections", "docs", "papers", "api"}
# Pages of one revision: the revision follows.
_OF_REVISION = {"tree", "blob", "resolve", "raw", "commit", "commits"}


def plain_name(model: str) -> str:
    """The name as ``org/name[@revision][:file.gguf]`` or an alias, where it is written in another way.

    Understood are addresses of pages of the hub (``https://`` may be missing; ``HF_ENDPOINT`` counts too) and
    names of known shapes, in either case; everything else, and what exists as a path, stays as it is.
    """
    if os.path.exists(model):
        return model
    address = _of_address(model)
    if address is not None:
        return address
    name, rest = re.fullmatch(r"([^@:]*)(.*)", model, re.DOTALL).groups()  # type: ignore[union-attr]
    alias = _ALIAS_OF_SHAPE.get(name.lower())
    return model if alias is None else alias + rest


def _of_address(model: str) -> str | None:
    text = _SCHEME.sub("", model, count=1) if _SCHEME.match(model) else model
    endpoint = _SCHEME.sub("", os.environ.get("HF_ENDPOINT", ""), count=1).rstrip("/")
    for base in (*_HOSTS, *([endpoint] if endpoint else [])):
        if text.lower().startswith(f"{base.lower()}/"):
            break
    else:
        return None
    parts = re.split(r"[?#]", text[len(base) + 1 :], maxsplit=1)[0].rstrip("/").split("/")
    if len(parts) < 2 or parts[0] in _NO_MODELS:
        return None
    name = "/".join(parts[:2])
    if len(parts) > 3 and parts[2] in _OF_REVISION:
        # refs/pr/1 is one revision; behind others come names of files.
        revision = "/".join(parts[3:6]) if parts[3] == "refs" else unquote(parts[3])
        if parts[-1].lower().endswith(".gguf"):
            place = name if revision == "main" else f"{name}@{revision}"
            return f"{place}:{unquote(parts[-1])}"
        return f"{name}@{revision}"
    return name
