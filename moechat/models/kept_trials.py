"""Keeps what trial passes of a model on the meta device have found, so that the next plan needs none.

A trial builds every tensor of a pass without memory; for a large model that takes seconds. Its results are a
few numbers, which depend on the configuration, the type, the bits of the cache, and the versions of the code.
A file that cannot be read counts as missing, and one that cannot be written changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from moechat.atomic_file import replacing
from moechat.models.attention_cache import CacheShape

_FORMAT = 1
_MOST_FILES = 256
_MOST_BYTES = 1 << 20
_PAIRS = ("growing", "copied", "unpacked")
_TEXTS = ("in_one_pass",)


@dataclass(frozen=True)
class Trial:
    """The results of the trial passes of a model.

    Attributes:
        cache: Its attention cache.
        top_k: Experts of a token, as its routers chose them; 0: they were not reached.
        reads: Names of plain layers whose weights are read from outside their own forward.
        chunk: Tokens of a part of a prompt.
        live: Bytes of activations of such a part; 0 where they are not counted in a pass.
    """

    cache: CacheShape
    top_k: int
    reads: tuple[str, ...]
    chunk: int
    live: int


def trial_key(config: Any, dtype: torch.dtype, kv_bits: int) -> str:
    """A hash over all that the results of a trial depend on.

    Args:
        config: The configuration, before the model is built.
        dtype: Compute type of the dense weights.
        kv_bits: Bits of a key or value in the attention cache.
    """
    parts = (
        _FORMAT,
        f"{type(config).__module__}.{type(config).__qualname__}",
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        str(dtype),
        kv_bits,
        sys.version,
        torch.__version__,
        transformers.__version__,
        _own_code(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_trial(directory: Path, key: str, model: nn.Module) -> Trial | None:
    """The kept results of a trial; ``None`` if there are none that can be used.

    Args:
        directory: Of all kept results.
        key: From :func:`trial_key`.
        model: Has the layers that the results name.
    """
    try:
        with open(directory / f"{key}.json", "rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
        trial = _parsed(content)
        for name in trial.reads:
            model.get_submodule(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return trial


def write_trial(directory: Path, key: str, trial: Trial) -> None:
    """Keep the results of a trial; the oldest files above 256 are deleted."""
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(directory / f"{key}.json") as file:
            file.write(json.dumps(asdict(trial)).encode())
        files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[_MOST_FILES:]:
            path.unlink(missing_ok=True)


def _own_code() -> list[tuple[str, int, int]]:
    """Sizes and times of the files of this room: between two releases they tell versions apart."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _parsed(content: Mapping[str, Any]) -> Trial:
    """The results in a file.

    Raises:
        ValueError, KeyError, TypeError: The content has another form.
    """
    stored = content["cache"]
    if stored.keys() != {field.name for field in fields(CacheShape)}:
        raise ValueError("other fields")
    values: dict[str, Any] = {}
    for field in fields(CacheShape):
        value = stored[field.name]
        if field.name in _PAIRS:
            values[field.name] = tuple(
                (_count(each), None if most is None else _count(most)) for each, most in value
            )
        elif field.name in _TEXTS:
            values[field.name] = _checked(value, str)
        else:
            values[field.name] = _checked(value, bool) if isinstance(value, bool) else _count(value)
    reads = tuple(_checked(name, str) for name in content["reads"])
    top_k, chunk, live = (_count(content[name]) for name in ("top_k", "chunk", "live"))
    if chunk < 1:
        raise ValueError("no tokens in a part of a prompt")
    return Trial(CacheShape(**values), top_k, reads, chunk, live)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a count")
    return value


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"not of type {kind.__name__}")
    return value
