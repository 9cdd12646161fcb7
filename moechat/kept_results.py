"""Results that are kept in the user's cache, by all that they depend on.

A file that cannot be read counts as missing, and one that cannot be written changes nothing. Which values are
sound is for the caller to check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import moechat
from moechat import _native
from moechat.atomic_file import replacing

_PACKAGE = Path(__file__).parent
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class KeptResults:
    """JSON files in a directory.

    Attributes:
        directory: It is made when the first result is kept.
        most: Files that are kept; the oldest above are deleted.
    """

    directory: Path
    most: int

    def read(self, key: str) -> Any:
        """The kept value; ``None`` if there is none."""
        try:
            with open(self._path(key), "rb") as file:
                return json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, key: str, value: Any) -> None:
        """Keep a value of JSON."""
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(key)) as file:
                file.write(json.dumps(value).encode())
            files = sorted(self.directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in files[self.most :]:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def result_key(inputs: Sequence[object], code: tuple[str, ...]) -> str:
    """Name of the file of a result: a hash over its inputs and the versions of the code that makes it.

    Args:
        inputs: Values whose ``repr`` tells them apart.
        code: Rooms and modules of the package whose code makes the result, beside the native core.
    """
    parts = (moechat.__version__, code_stamp(code), *inputs)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def code_stamp(code: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Sizes and times of source files and the native core: they tell versions apart between two releases."""
    files = [file for name in code for file in _sources(_PACKAGE / name)]
    files += [Path(_native.__file__)] if _native.__file__ else []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _sources(place: Path) -> list[Path]:
    return [place] if place.suffix else sorted(place.rglob("*.py"))
