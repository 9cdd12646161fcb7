"""Keeps what the simulations of a plan have found, so that the same plan, made again, simulates nothing.

A choice of a strategy takes up to a second. It depends on the model's sizes, the pages, the settings, the
costs of the machine, the routing statistics and the code. A file that cannot be read
counts as missing, and one that cannot be written changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import moechat
from moechat import _native
from moechat.atomic_file import replacing
from moechat.simulate.strategy import Chosen, Strategy

_FORMAT = 1
_MOST_FILES = 512
_MOST_BYTES = 1 << 14
_PACKAGE = Path(__file__).parents[1]
# Rooms whose code a choice depends on, beside the native core.
_ROOMS = ("budget", "configurator", "routing", "simulate")


@dataclass(frozen=True)
class _Place:
    directory: Path
    write: bool


_PLACE: ContextVar[_Place | None] = ContextVar("kept choices", default=None)


@contextmanager
def kept_choices(directory: Path, *, write: bool) -> Iterator[None]:
    """Use kept choices in the block.

    Args:
        directory: Of the files.
        write: Keep new choices there.
    """
    token = _PLACE.set(_Place(directory, write))
    try:
        yield
    finally:
        _PLACE.reset(token)


def kept_choice(
    inputs: Sequence[object], candidates: Sequence[Strategy], choose: Callable[[], Chosen]
) -> Chosen:
    """A choice that is kept for these inputs, else a new one.

    Args:
        inputs: All that it depends on: values whose ``repr`` tells them apart.
        candidates: The strategies that it is made among.
        choose: Makes it.
    """
    place = _PLACE.get()
    if place is None:
        return choose()
    path = place.directory / f"{_key(inputs)}.json"
    chosen = _read(path, candidates)
    if chosen is None:
        chosen = choose()
        if place.write:
            _write(path, chosen)
    return chosen


def _key(inputs: Sequence[object]) -> str:
    parts = (_FORMAT, moechat.__version__, np.__version__, _own_code(), *inputs)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _own_code() -> list[tuple[str, int, int]]:
    """Sizes and times of files that a choice depends on: between two releases they tell versions apart."""
    files = sorted(file for room in _ROOMS for file in (_PACKAGE / room).rglob("*.py"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in (*files, _core())]


def _core() -> Path:
    assert _native.__file__ is not None
    return Path(_native.__file__)


def _read(path: Path, candidates: Sequence[Strategy]) -> Chosen | None:
    by_name = {each.name: each for each in candidates}
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
        name, seconds = content["strategy"], content["seconds"]
        sound = all(type(each) is float and 0 < each < math.inf for each in seconds.values())
        if not sound or seconds.keys() != by_name.keys():
            return None
        return Chosen(by_name[name], seconds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write(path: Path, chosen: Chosen) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            content = {"strategy": chosen.strategy.name, "seconds": chosen.seconds}
            file.write(json.dumps(content).encode())
        files = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in files[_MOST_FILES:]:
            old.unlink(missing_ok=True)
