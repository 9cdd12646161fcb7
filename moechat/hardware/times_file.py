"""Files with measured times of models, one per model, next to the profile of the machine."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from moechat.errors import MoechatError
from moechat.geometry import DenseBits
from moechat.hardware.measured_file import profiles_directory, read_json, write_json
from moechat.hardware.profile import Figure, ModelTimes, Origin

FORMAT = 2  # 1: with `auto` dense matrices had 8 bits where they have 6
_KIND = "moechat model times"
_PARTS = ("attention", "moe", "head")


@dataclass(frozen=True)
class TimesKey:
    """Everything that the times of a model depend on.

    Attributes:
        profile: Key of the machine: :attr:`moechat.hardware.identity.Identity.key`.
        model: Fingerprint of the weights: ``store.manifest.source.fingerprint``.
        dtype: Type of the dense weights, such as ``bfloat16``.
        threads: Number of compute threads.
        bits: Bits per expert weight.
        dense_bits: Bits per dense weight.
        dense_bytes: Bytes of all dense weights, which change when moechat gives them another form.
        activation_bits: Bits of the inputs in products with quantised weights.
        kv_bits: Bits of a key or value in the attention cache.
    """

    profile: str
    model: str
    dtype: str
    threads: int
    bits: int
    dense_bits: DenseBits
    dense_bytes: int
    activation_bits: int
    kv_bits: int

    @property
    def path(self) -> Path:
        """Path of the file."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return profiles_directory() / f"{self.profile}.times" / f"{name}.json"


def save_times(key: TimesKey, times: ModelTimes) -> None:
    """Write times, replacing older ones.

    Raises:
        MoechatError: The file cannot be written.
    """
    write_json(
        key.path,
        {
            "format": FORMAT,
            "kind": _KIND,
            "key": asdict(key),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "times": asdict(times),
        },
    )


def load_times(key: TimesKey, notice: Callable[[str], None] = lambda _: None) -> ModelTimes | None:
    """Load the times measured for a key; ``None`` if there are none.

    Args:
        key: Machine, model and settings.
        notice: Called with the reason, in a sentence, if a file is not used.
    """
    data = read_json(key.path, notice)
    if data is None:
        return None
    try:
        if data["kind"] != _KIND or data["format"] != FORMAT or data["key"] != asdict(key):
            notice(f"{key.path} was written by another version of moechat; it is ignored")
            return None
        return _times(data["times"])
    except (MoechatError, AttributeError, KeyError, TypeError, ValueError) as problem:
        notice(f"{key.path} is damaged and is ignored: {problem}")
        return None


def _times(data: dict[str, Any]) -> ModelTimes:
    if set(data) != {item.name for item in fields(ModelTimes)}:
        raise ValueError(f"the times are of {', '.join(sorted(data))}")
    return ModelTimes(**{part: _figure(part, data[part]) for part in _PARTS})


def _figure(part: str, data: dict[str, Any]) -> Figure:
    value, origin, source = data["value"], data["origin"], data["source"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{part} takes {value!r} s")
    if origin not in get_args(Origin) or not isinstance(source, str):
        raise ValueError(f"{part} comes from {origin!r}, {source!r}")
    return Figure(float(value), origin, source)
