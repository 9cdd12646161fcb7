"""Layers of the attention cache that compress keys: a window, and entries that stand for several tokens each.

DeepSeek-V4 (technical report, section 2.3) attends to the last tokens, and to one entry for every 4 or 128
tokens before. Entries are only added. Tokens that are not in an entry yet wait in buffers, which change in
place, as the window does.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

# Attribute of a layer that holds its entries, a dictionary of tensors.
ENTRIES = "compressed_kv"
_WAITING = ("buffer_kv", "buffer_gate")
# Types of :func:`compact` by those of transformers.
_COMPACT: dict[Any, type] = {}


def compresses(kind: type) -> bool:
    """Whether layers of a type are of this form."""
    return issubclass(kind, DynamicSlidingWindowLayer) and hasattr(kind, "update_compressor_states")


def compact(layer: Any) -> None:
    """Let the tokens that wait in a layer have memory of their own.

    They would be views of all tokens of a part, which would stay in memory with them.
    """
    kind: Any = type(layer)
    if kind not in _COMPACT:
        _COMPACT[kind] = _compact_kind(kind)
    layer.__class__ = _COMPACT[kind]


def _compact_kind(kind: Any) -> type:
    class Compact(kind):  # type: ignore[misc]
        def store_compression_weights(self, name: str, *parts: Any) -> Any:
            found = super().store_compression_weights(name, *parts)
            for held in (getattr(self, each) for each in _WAITING):
                held[name] = held[name].clone()
            return found

    return Compact


def entries_of(layer: Any) -> list[torch.Tensor]:
    """The entries of a layer, ``[1, entries, dim]`` each."""
    return [rows for rows in getattr(layer, ENTRIES).values() if rows is not None]


def entry_bytes(layer: Any) -> int:
    """Bytes of the entries for each token, rounded up, for a layer that has some."""
    each = sum(rows.shape[-1] * rows.element_size() for rows in entries_of(layer))
    return int(-(-each // layer.compress_rate))


def waiting_bytes(layer: Any) -> int:
    """Most bytes of everything besides entries and window, for a layer that has seen some tokens."""
    total = 0
    for name, held in vars(layer).items():
        if name == ENTRIES or not isinstance(held, dict):
            continue
        for rows in held.values():
            if isinstance(rows, torch.Tensor):
                row = rows.shape[-1] * rows.element_size()
                total += row * layer.compress_rate if name in _WAITING else rows.nbytes
    return total


def other_tensors(layer: Any) -> list[torch.Tensor]:
    """Everything that a layer holds besides its window."""
    held = [value for value in vars(layer).values() if isinstance(value, dict)]
    return [rows for each in held for rows in each.values() if isinstance(rows, torch.Tensor)]


def copy_compressing(layer: Any) -> dict[str, Any]:
    """Copy what a layer overwrites; of its entries, their numbers."""
    found: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name == ENTRIES:
            found[name] = {key: 0 if rows is None else rows.shape[1] for key, rows in value.items()}
        elif name != "values":  # the tensor of the keys
            found[name] = _cloned(value)
    return found


def restore_compressing(layer: Any, held: dict[str, Any]) -> None:
    """Take a layer back to a copy, which stays usable."""
    for name, value in held.items():
        if name != ENTRIES:
            setattr(layer, name, _cloned(value))
            continue
        entries = getattr(layer, name)
        for key, count in value.items():
            entries[key] = entries[key][:, :count] if count else None
    layer.values = layer.keys


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
