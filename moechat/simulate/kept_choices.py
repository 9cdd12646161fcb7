"""Keeps what the simulations of a plan have found, so that the same plan, made again, simulates nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moechat.kept_results import KeptResults, result_key
from moechat.simulate.strategy import Chosen, Strategy

_FORMAT = 1
_MOST_FILES = 512
# What simulates.
_CODE = ("budget", "configurator", "routing", "simulate")


@dataclass(frozen=True)
class _Place:
    kept: KeptResults
    write: bool


_PLACE: ContextVar[_Place | None] = ContextVar("kept choices", default=None)


@contextmanager
def kept_choices(directory: Path, *, write: bool) -> Iterator[None]:
    """Use kept choices in the block.

    Args:
        directory: Of the files.
        write: Keep new choices there.
    """
    token = _PLACE.set(_Place(KeptResults(directory, _MOST_FILES), write))
    try:
        yield
    finally:
        _PLACE.reset(token)


def kept_choice(
    inputs: Sequence[object], candidates: Sequence[Strategy], choose: Callable[[], Chosen]
) -> Chosen:
    """A choice that is kept for these inputs, else a new one.

    Args:
        inputs: All that it depends on, but for the code: values whose ``repr`` tells them apart.
        candidates: The strategies that it is made among.
        choose: Makes it.
    """
    place = _PLACE.get()
    if place is None:
        return choose()
    key = result_key((_FORMAT, np.__version__, *inputs), _CODE)
    chosen = _chosen(place.kept.read(key), candidates)
    if chosen is None:
        chosen = choose()
        if place.write:
            place.kept.write(key, {"strategy": chosen.strategy.name, "seconds": chosen.seconds})
    return chosen


def _chosen(content: Any, candidates: Sequence[Strategy]) -> Chosen | None:
    """The choice in a file; ``None`` if it is none among these."""
    by_name = {each.name: each for each in candidates}
    try:
        name, seconds = content["strategy"], content["seconds"]
        sound = all(type(each) is float and 0 < each < math.inf for each in seconds.values())
        if not sound or seconds.keys() != by_name.keys():
            return None
        return Chosen(by_name[name], seconds)
    except (KeyError, TypeError, AttributeError):
        return None
