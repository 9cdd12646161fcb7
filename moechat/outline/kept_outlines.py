"""Keeps the outlines of models, so that the next plan needs neither torch nor a model on the meta device.

To count a model, torch and transformers are imported, the model is built without memory, and a pass is tried:
seconds. The result is a few numbers, which are kept in the user's cache. A file that cannot be read counts as
missing, and one that cannot be written changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import moechat
from moechat import _native
from moechat.atomic_file import replacing
from moechat.errors import UsageError
from moechat.geometry import AUTO_BITS, DEFAULT_ACTIVATION_BITS, PLAIN_KV_BITS, DenseBits
from moechat.outline.plain_values import from_plain, to_plain
from moechat.sizes.model_outline import ModelOutline

_FORMAT = 1
_MOST_FILES = 256
_MOST_BYTES = 1 << 20
_PACKAGE = Path(__file__).parents[1]
# Rooms whose code the numbers depend on, beside the native core and the geometry.
_ROOMS = ("models", "sizes", "outline", "store")
# Beyond the integers of the native core.
_MOST = 1 << 63


@dataclass(frozen=True)
class OutlineRequest:
    """All that the outline of a model depends on, besides the versions of the code.

    Attributes:
        config: SHA-256 of the content of its ``config.json``, in hexadecimal.
        dtype: Compute type of the dense weights, by its name in torch.
        dense_bits: Bits per dense weight: 16, 8, 4 or ``auto``.
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
        with open(directory / f"{outline_key(request)}.json", "rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
        outline = from_plain(ModelOutline, content)
    except (OSError, ValueError, OverflowError, RecursionError, UsageError):
        return None
    return outline if _is_sound(outline) else None


def write_outline(directory: Path, request: OutlineRequest, outline: ModelOutline) -> None:
    """Keep an outline; the oldest files above 256 are deleted."""
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(directory / f"{outline_key(request)}.json") as file:
            file.write(json.dumps(to_plain(outline)).encode())
        files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[_MOST_FILES:]:
            path.unlink(missing_ok=True)


def outline_key(request: OutlineRequest) -> str:
    """Name of the file of a request: a hash over it and the versions of all code that counts."""
    parts = (_FORMAT, request, moechat.__version__, library_versions(), _own_code())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


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


@cache
def _own_code() -> list[tuple[str, int, int]]:
    """Sizes and times of the files that count: between two releases they tell versions apart."""
    files = sorted(file for room in _ROOMS for file in (_PACKAGE / room).rglob("*.py"))
    files += [_PACKAGE / "geometry.py", *([Path(_native.__file__)] if _native.__file__ else [])]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


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
