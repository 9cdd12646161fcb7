"""Frozen dataclasses as JSON values and back, by their annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

# JSON has no infinite numbers.
_INFINITE = "inf"


def to_plain(value: Any) -> Any:
    """A value of JSON: dataclasses become objects, tuples arrays.

    Args:
        value: Made of dataclasses, tuples, enumerations of texts, numbers, texts and ``None``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return _INFINITE if isinstance(value, float) and math.isinf(value) and value > 0 else value


def from_plain(kind: Any, value: Any) -> Any:
    """Inverse of :func:`to_plain`.

    Args:
        kind: Type of the value.
        value: Of JSON.

    Raises:
        ValueError: It has another type, or lacks a field or has others; or a class refuses its values.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        for each in get_args(kind):
            try:
                return from_plain(each, value)
            except ValueError:
                continue
        raise ValueError(f"{value!r:.40} is none of {kind}")
    if origin is tuple:
        inner = get_args(kind)
        items = _of(list, value)
        kinds = [inner[0]] * len(items) if len(inner) == 2 and inner[1] is Ellipsis else list(inner)
        if len(kinds) != len(items):
            raise ValueError(f"{len(items)} values instead of {len(kinds)}")
        return tuple(from_plain(each, item) for each, item in zip(kinds, items, strict=True))
    if is_dataclass(kind):
        return _dataclass_of(kind, _of(dict, value))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and value == _INFINITE:
        return math.inf
    return _of(kind, value)


def _dataclass_of(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    if values.keys() != hints.keys():
        raise ValueError(f"other fields than those of {kind.__name__}: {', '.join(values)[:80]}")
    return kind(**{name: from_plain(hint, values[name]) for name, hint in hints.items()})


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _of(kind: Any, value: Any) -> Any:
    # Not isinstance: a bool is no number here.
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {getattr(kind, '__name__', kind)}")
    if kind is float and not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
