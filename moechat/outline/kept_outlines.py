"""Keeps the outlines of models, so that the next plan needs neither torch nor a model on the meta device.

To count a model, torch and transformers are imported, the model is built without memory, and a pass is tried:
seconds. The result is a few numbers, which are kept in the user's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from moechat.errors import UsageError
from moechat.geometry import AUTO_BITS, DEFAULT_ACTIVATION_BITS, PLAIN_KV_BITS, DenseBits
from moechat.kept_results import KeptResults, result_key
from moechat.outline.plain_values import from_plain, to_plain
from moechat.sizes.model_outline import ModelOutline

_FORMAT = 1
_MOST_FILES = 256
# What counts a model.
_CODE = ("geometry.py", "models", "outline", "sizes", "store")
# Beyond the integers of the native core.
_MOST = 1 << 63


@dataclass(frozen=True)
class OutlineRequest:
    """All that the outline of a model depends on, besides the versions of the code.

    Attributes:
        config: SHA-256 of the content of its ``config.json``, in hexadecimal.
        dtype: Compute type of the dense weights, by its name in torch.
        dense_bits: Bits per dense weight: 16, 8, 6, 4 or ``auto``.
        activation_bits: Bits of the inputs of packed weights: 8, 16 or 32.
        kv_bits: Bits of a key or value in the attention cache: 16 or 8.
        on_gpu: The dense part runs on a GPU.
        headers: SHA-256 of names, types and shapes of the stored weights; empty: they are not here.
    """

    config: str
    dtype: str
    dense_bits: DenseBits = AUTO_BITS
    activation_bits: int = DEFAULT_ACTIVATION_BITS
    kv_bits: int = PLAIN_KV_BITS
    on_gpu: bool = False
    headers: str = ""


def read_outline(directory: Path, request: OutlineRequest) -> ModelOutline | None:
    """The kept outline of a request; ``None`` if there is none that can be used."""
    try:
        outline = from_plain(ModelOutline, _kept(directory).read(outline_key(request)))
    except (ValueError, OverflowError, UsageError):
        return None
    return outline if _is_sound(outline) else None


def write_outline(directory: Path, request: OutlineRequest, outline: ModelOutline) -> None:
    """Keep an outline."""
    _kept(directory).write(outline_key(request), to_plain(outline))


def _kept(directory: Path) -> KeptResults:
    return KeptResults(directory, _MOST_FILES)


def outline_key(request: OutlineRequest) -> str:
    """Name of the file of a request: a hash over it and the versions of the code and the libraries."""
    return result_key((_FORMAT, request, library_versions()), _CODE)


def library_versions() -> dict[str, str]:
    """Versions of the libraries that a model is counted with; importing them to ask would take seconds. Empty
    where a library does not tell.
    """
    found = {}
    for name in ("torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _is_sound(outline: ModelOutline) -> bool:
    """Whether the numbers of a file can be those of a model."""
    sizes = outline.sizes
    divisors = (outline.chunk, outline.top_k, sizes.heads, sizes.kv_heads, sizes.compressed, sizes.experts)
    return min(divisors) >= 1 and bool(outline.expert_layers) and _in_range(to_plain(outline))


def _in_range(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_in_range, value.values()))
    if isinstance(value, list):
        return all(map(_in_range, value))
    return not isinstance(value, int | float) or 0 <= value < _MOST
