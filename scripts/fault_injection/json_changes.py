"""Changes of JSON values by chance: other numbers, types, names and depths in valid JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 64, 255, 65536, 10**6, 10**9, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64,
    10**30, -(2**63), 0.5, -0.0, 1e-45, 1e308, 1e400, float("nan"), float("-inf"),
)  # fmt: skip
_TEXTS = (
    "", " ", "a", "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "ÿ" * 70, "a" * 100_000, "model", "auto",
    "{{ 1 }}", "None", "1e9", "\x1b[2J", "silu", "BF16", "F32", "I64", "linear", "yarn", "dynamic",
    "x.safetensors",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [0] * 1000)
_DEEP = 400  # json and copy recurse; deeper values are spelled as text


def changed(value: Any, generator: random.Random, most: int = 3) -> Any:
    """A copy of a value with one to ``most`` changes."""
    value = copy.deepcopy(value)
    for _ in range(generator.randint(1, most)):
        value = _change_one(value, generator)
    return value


def spelled(value: Any, generator: random.Random) -> bytes:
    """A value as JSON; now and then with a name twice, cut short, or with one byte changed."""
    text = json.dumps(value, ensure_ascii=generator.random() < 0.5).encode("utf-8", "surrogatepass")
    kind = generator.random()
    if kind < 0.03:
        return text[: generator.randrange(len(text) + 1)]
    if kind < 0.06 and text:
        place = generator.randrange(len(text))
        return text[:place] + bytes([generator.randrange(256)]) + text[place + 1 :]
    if kind < 0.08 and text.startswith(b"{") and len(text) > 2:
        return text[:-1] + b", " + text[1:]
    if kind < 0.09:
        return b"[" * 200_000 + text
    return text


def _change_one(value: Any, generator: random.Random) -> Any:
    places = list(_places(value))
    holder, key = generator.choice(places) if places else (None, None)
    if holder is None:
        return _other(value, generator)
    kind = generator.random()
    if kind < 0.7:
        holder[key] = _other(holder[key], generator)
    elif kind < 0.8:
        del holder[key]
    elif kind < 0.9 and isinstance(holder, dict):
        name = generator.choice(list(holder)) if generator.random() < 0.5 else generator.choice(_TEXTS)
        holder[name] = copy.deepcopy(holder[key])
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = _other(None, generator)
    return value


def _places(value: Any, most: int = 4000) -> Any:
    """Pairs of a container and a key or index in it; of long lists only some."""
    stack, found = [value], 0
    while stack and found < most:
        one = stack.pop()
        keys = (
            list(one) if isinstance(one, dict) else range(min(len(one), 50)) if isinstance(one, list) else ()
        )
        for key in keys:
            found += 1
            yield one, key
            if isinstance(one[key], dict | list):
                stack.append(one[key])


def _other(value: Any, generator: random.Random) -> Any:
    kind = generator.random()
    if kind < 0.55 and isinstance(value, int | float):
        if generator.random() < 0.4 and abs(value) < 1e300:
            return generator.choice([value + 1, value - 1, value * 2, -value, value * 1000, float(value)])
        return generator.choice(_NUMBERS)
    if kind < 0.55 and isinstance(value, str):
        if generator.random() < 0.4 and value:
            place = generator.randrange(len(value))
            return value[:place] + generator.choice(_TEXTS) + value[place + 1 :]
        return generator.choice(_TEXTS)
    if kind < 0.60:
        return _deep(generator)
    return copy.deepcopy(generator.choice((*_NUMBERS, *_TEXTS, *_OTHERS)))


def _deep(generator: random.Random) -> Any:
    value: Any = copy.deepcopy(generator.choice(_OTHERS))
    for _ in range(generator.choice((5, 50, _DEEP))):
        value = [value] if generator.random() < 0.5 else {"a": value}
    return value
