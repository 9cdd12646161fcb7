"""Keeps times between starts: one small file for each machine and model, one entry for each budget.

Of two processes that write at the same time, one loses its choice and makes it again later; the
file stays whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moechat.atomic_file import TEMPORARY, replacing
from moechat.configurator.estimate import Near
from moechat.geometry import DenseBits
from moechat.trials import Comparison

FORMAT = 3  # 2: with `auto` dense matrices had 8 bits where they have 6
# Numbers of pages this close are one budget: the process's own memory differs a little at each start.
_SAME_BUDGET = 0.05
_MOST_ENTRIES = 16
_MOST_FILE_BYTES = 1 << 20
# Most files kept, those of earlier versions included; the oldest is removed first.
MAX_FILES = 64
# Seconds after which a temporary file counts as abandoned by its writer.
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class TuningKey:
    """Conditions under which a choice is valid, except for the budget.

    Attributes:
        machine: Identity of hardware and software.
        model: Identity of the weights.
        bits: Of an expert weight.
        threads: Of the CPU.
        dtype: Of the dense weights.
        settings: Default settings of the near tier, and its link.
        version: Of moechat: another one may have other kernels and other plans.
        dense_bits: Of a dense weight.
        dense_bytes: Of all dense weights, which change when moechat gives them another form.
        activation_bits: Of the inputs of quantised weights.
        kv_bits: Of a key or value in the attention cache.
        near: Memory of the pages: ``ram``, or ``gpu``.
    """

    machine: str
    model: str
    bits: int
    threads: int
    dtype: str
    settings: str
    version: str
    dense_bits: DenseBits
    dense_bytes: int
    activation_bits: int
    kv_bits: int
    near: Near

    @property
    def digest(self) -> str:
        """Name of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Remembered:
    """What was timed for one budget.

    Attributes:
        pages: Of the near tier.
        may_map: Whether the mapped store was among the candidates.
        measured: When at last, ISO 8601 in UTC.
        sessions: Times of tokens, by start.
    """

    pages: int
    may_map: bool
    measured: str
    sessions: tuple[Comparison, ...]

    def is_for(self, pages: int, may_map: bool) -> bool:
        """Whether it is valid for this budget."""
        return self.may_map == may_map and abs(self.pages - pages) <= _SAME_BUDGET * max(self.pages, pages)


def recall(directory: Path, key: TuningKey, *, pages: int, may_map: bool) -> Remembered | None:
    """The newest choice for a budget; ``None`` if there is none, or if its file cannot be read or is damaged.

    Args:
        directory: Where choices are kept.
        key: Conditions of the choice.
        pages: Of the near tier.
        may_map: Whether the store may be mapped.
    """
    return next((entry for entry in _read(_path(directory, key), key) if entry.is_for(pages, may_map)), None)


def remember(directory: Path, key: TuningKey, entry: Remembered) -> None:
    """Keep a choice, in place of one for the same budget; the file changes at once or not at all.

    Raises:
        OSError: It cannot be written.
    """
    path = _path(directory, key)
    others = [old for old in _read(path, key) if not old.is_for(entry.pages, entry.may_map)]
    entries = [
        {**vars(kept), "sessions": [session.sums() for session in kept.sessions]} for kept in (entry, *others)
    ][:_MOST_ENTRIES]
    text = json.dumps({"format": FORMAT, "key": asdict(key), "entries": entries}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=0o600) as file:
        file.write(text.encode())
    _remove_oldest(path.parent)


def _remove_oldest(directory: Path) -> None:
    """Keep the directory bounded."""
    dated = []
    for path in directory.iterdir():
        with suppress(OSError):
            written = path.stat().st_mtime
            if path.suffix == ".json":
                dated.append((written, path))
            elif path.suffix == TEMPORARY and written < time.time() - _ABANDONED_S:
                path.unlink()
    for _, path in sorted(dated)[:-MAX_FILES]:
        with suppress(OSError):
            path.unlink()


def _path(directory: Path, key: TuningKey) -> Path:
    return directory / f"{key.digest}.json"


def _read(path: Path, key: TuningKey) -> list[Remembered]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_FILE_BYTES))
        if content["format"] != FORMAT or content["key"] != asdict(key):
            return []
        return [_entry(value) for value in content["entries"]]
    # A file of any other content is ignored.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return []


def _entry(value: dict[str, Any]) -> Remembered:
    sessions = tuple(
        Comparison.of({str(name): list(map(float, sums)) for name, sums in session.items()})
        for session in value["sessions"]
    )
    entry = Remembered(**{**value, "sessions": sessions})
    for name, kind in {"pages": int, "may_map": bool, "measured": str}.items():
        if type(getattr(entry, name)) is not kind:
            raise TypeError(name)
    return entry
