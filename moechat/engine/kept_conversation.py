"""The attention cache of a conversation as a file, so that a later process computes only new tokens.

The file is in the safetensors format: keys and values of each layer, and as metadata the tokens and what the
numbers depend on. It is read only by the same model with the same options, because others would get other
numbers. Only caches of keys and values of all tokens are written: those with windows or states cannot go back
to where a new prompt leaves the old one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moechat.atomic_file import replacing
from moechat.errors import MoechatError, UsageError, one_line
from moechat.loading import LoadedModel
from moechat.models.cache_layers import ReservedLayer
from moechat.models.packed_rows import row_bytes, unpack
from moechat.models.prompt_cache import CachedTokens
from moechat.steps import NO_TOKEN

_FORMAT = "1"
# Metadata of a safetensors file is part of its header, which readers limit to 100 MB.
_MOST_TOKENS = 8_000_000


def conversation_key(loaded: LoadedModel) -> dict[str, str]:
    """What the numbers of an attention cache depend on, besides the tokens."""
    return {
        "format": _FORMAT,
        "model": _digest(loaded),
        "dtype": str(loaded.dtype),
        "dense": loaded.form.title,
        "activation_bits": str(loaded.form.activation_bits),
        "kv_bits": str(loaded.cache.bits),
        "part": str(loaded.chunk),
    }


def _digest(loaded: LoadedModel) -> str:
    files = sorted((name, record.sha256) for name, record in loaded.store.manifest.files.items())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def write_conversation(path: Path, held: CachedTokens, key: Mapping[str, str]) -> None:
    """Write a conversation's cache; an existing file is replaced only by a whole one.

    Args:
        path: The file.
        held: The cache.
        key: From :func:`conversation_key`.

    Raises:
        UsageError: The cache has something else than keys and values of all tokens.
        MoechatError: The file cannot be written.
    """
    from safetensors.torch import save

    if not held.cache.layers or not all(type(layer) is ReservedLayer for layer in held.cache.layers):
        raise UsageError(
            "the attention cache of this model cannot be kept in a file: it has windows or states",
            hint="run without --prompt-cache",
        )
    tensors = {}
    for number, layer in enumerate(held.cache.layers):
        for name, rows in (("keys", layer.keys), ("values", layer.values)):
            tensors[f"{number}.{name}"] = _plain(layer, rows)
    numbers = {"prompt": held.prompt, "answered": held.answered, "fresh": held.fresh, "marks": held.marks}
    metadata = {**key, "tokens": json.dumps(held.tokens), "numbers": json.dumps(numbers)}
    try:
        with replacing(path, mode=0o600) as file:
            file.write(save(tensors, metadata))
    except OSError as error:
        raise MoechatError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="choose another file for --prompt-cache",
        ) from error


def read_conversation(
    path: Path, cache: Any, key: Mapping[str, str], *, vocabulary: int, context: int
) -> CachedTokens:
    """Read a conversation's cache.

    Args:
        path: The file.
        cache: An empty attention cache of the model.
        key: From :func:`conversation_key`.
        vocabulary: Number of tokens.
        context: Most tokens of the cache.

    Raises:
        UsageError: It is no such file, it is damaged, another model or other options have made it, or it is
            longer than the context.
        MoechatError: It cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _require_same(path, metadata, key)
            held = _described(metadata, vocabulary)
            if len(held.tokens) > context:
                raise UsageError(
                    f"{path} has {len(held.tokens)} tokens; the context holds {context}",
                    hint="give a longer --ctx, or name another file",
                )
            with torch.inference_mode():
                for number, layer in enumerate(cache.layers):
                    rows = [file.get_tensor(f"{number}.{name}") for name in ("keys", "values")]
                    if any(one.ndim != 4 or one.shape[::2] != (1, len(held.tokens)) for one in rows):
                        raise ValueError("a layer has another number of tokens")
                    layer.update(*rows)
    except OSError as error:
        raise MoechatError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} holds no conversation's attention cache: {one_line(error)}",
            hint="delete it, or name another file",
        ) from None
    held.cache = cache
    return held


def _plain(layer: ReservedLayer, rows: torch.Tensor) -> torch.Tensor:
    """Rows in the model's type; packing them again gives the same bytes."""
    if not layer.packed:
        return rows.contiguous()
    width = rows.shape[-1]
    dim = next(dim for dim in range(width) if row_bytes(dim) == width)
    return unpack(rows, dim, layer.dtype)


def _require_same(path: Path, found: Mapping[str, str], key: Mapping[str, str]) -> None:
    if found.get("format") != key["format"] or "tokens" not in found:
        raise ValueError("it was not written by this version")
    other = [name for name, value in key.items() if found.get(name) != value]
    if other:
        what = "another model" if "model" in other else f"other options ({', '.join(other)})"
        raise UsageError(
            f"{path} was written with {what}", hint="delete it, or name another file for --prompt-cache"
        )


def _described(found: Mapping[str, str], vocabulary: int) -> CachedTokens:
    tokens, numbers = json.loads(found["tokens"]), json.loads(found["numbers"])
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MOST_TOKENS:
        raise ValueError("it has no tokens")
    if not all(type(token) is int and NO_TOKEN < token < vocabulary for token in tokens):
        raise ValueError("a token is none of the vocabulary")
    prompt, answered, fresh = (numbers[name] for name in ("prompt", "answered", "fresh"))
    marks = numbers["marks"]
    if any(type(number) is not int or number < 0 for number in (prompt, answered, fresh, *marks)):
        raise ValueError("a place is no number")
    kept = sorted({mark for mark in marks if mark <= len(tokens)})
    return CachedTokens(None, tokens, min(prompt, len(tokens)), answered, min(fresh, len(tokens)), kept)
