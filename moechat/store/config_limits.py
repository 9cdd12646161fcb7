"""Limits of what a model's JSON files may hold; no real model comes near them.

transformers builds lists, dictionaries and modules as long as the numbers in a ``config.json`` say, so a
file of forty bytes could take all memory. Every configuration passes :func:`require_sane_config` before
transformers sees it, and every JSON file of a model is read by :func:`parse_limited`. A number's limit
depends on its key, wherever it is nested.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moechat.errors import CheckpointError
from moechat.validation import shown

# Of one JSON file of a model. Lists of modules that are not quantised take up to 7 MB.
MAX_CONFIG_BYTES = 16 << 20
# Numbers, strings, lists and objects of a file: the same lists have up to 300,000.
MAX_VALUES = 1 << 20
MAX_DEPTH = 32
MAX_LENGTH = 1 << 18
# Other whole numbers are less than this, other numbers than the largest float32.
_MAX_WHOLE = (1 << 63) - 1
_MAX_NUMBER = 3.5e38
_SHOWN_KEY = 60
_FLOAT = "__float__"
_HINT = "compare it with the file in the model's repository"


@dataclass(frozen=True)
class NumberLimit:
    """The limit of the numbers under some keys.

    Attributes:
        keys: Matches the end of their names.
        most: Largest magnitude.
        least: Smallest value.
        counts: They must be whole numbers, or lists of them, where they are set; ``False`` for others that
            happen to match.
    """

    keys: re.Pattern[str]
    most: float
    least: float = -math.inf
    counts: bool = False


def _limit(keys: str, most: float, least: float = -math.inf, *, counts: bool = False) -> NumberLimit:
    return NumberLimit(re.compile(rf"(?:.*_)?(?:{keys})"), most, least, counts)


# The first that matches a key counts. The largest values of published models are given behind each.
LIMITS = (
    _limit("(?:eps|epsilon)", 1.0, 0.0),  # 1e-3
    _limit("(?:rope_theta|rotary_emb_base|rope_base)", 1e18, 0.0),  # 1e11
    _limit("num_hidden_layers|num_layers|n_layers?", 512, 0, counts=True),  # 128
    _limit("layers?|depths?|blocks?|stages?|layer_ids|layers_indices", 512),  # 128
    _limit("num_labels|num_classes", 1 << 16, 0, counts=True),  # 30,522
    _limit("(?:positions?|sequence|seq|context|window|max)(?:_\\w*)?", 1 << 40),  # 10,485,760
    _limit("(?:token_ids?|token_index|ids?|index|indexes|indices)", 1 << 31),  # 262,273
    _limit("vocab(?:_\\w*)?|num_embeddings", 1 << 26, 0),  # 20,000,000 hashed n-grams
    _limit("num_(?:\\w+_)?experts(?:_\\w*)?|n_(?:\\w+_)?experts", 1 << 16, 0, counts=True),  # 16,384
    _limit("num_(?:attention_|key_value_)?heads|n_heads?", 1 << 16, 0, counts=True),  # 128
    _limit("(?:hidden|intermediate)_size|head_dim", 1 << 20, 0, counts=True),  # 53,248
    _limit("(?:num|n)_\\w+", 1 << 20),  # 16,384
    _limit("\\w*(?:size|sizes|dim|dims|rank|channels|width|kernel|stride|groups?)", 1 << 24),  # 1,440,000
)
_UNLIMITED = re.compile(r".*(limit|clip|clamp).*")  # may be infinite: no limit


def parse_limited(
    data: bytes, where: str, *, most_bytes: int = MAX_CONFIG_BYTES, most_values: int = MAX_VALUES
) -> Any:
    """Parse a JSON file of a model, within limits of its size, number of values and depth.

    Not strict: some published files repeat keys or contain ``Infinity``, and transformers reads them.

    Args:
        data: Its content.
        where: Its name, for messages.
        most_bytes: Largest size.
        most_values: Most numbers, strings, lists and objects.

    Raises:
        CheckpointError: It is no JSON, or beyond a limit.
    """
    if len(data) > most_bytes:
        raise CheckpointError(f"{where} has {len(data):,} bytes, more than {most_bytes:,}", hint=_HINT)
    # A cheap bound of the values, before memory is taken for them. Commas in strings count too, so that is
    # not yet an error.
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > 4 * most_values:
        raise _too_many(where, values, most_values)
    try:
        parsed = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise CheckpointError(f"{where} nests values more than {MAX_DEPTH} deep", hint=_HINT) from None
    except ValueError as problem:
        raise CheckpointError(f"{where} is not valid JSON: {problem}") from None
    _require_shape(parsed, where, most_values)
    return parsed


def _too_many(where: str, values: int, most: int) -> CheckpointError:
    return CheckpointError(f"{where} has {values:,} values, more than {most:,}", hint=_HINT)


def _require_shape(parsed: Any, where: str, most_values: int) -> None:
    """Check depth, lengths and number of values.

    Raises:
        CheckpointError: One is beyond its limit; the message names the key.
    """
    values = 0
    level: list[tuple[str, Any]] = [("", parsed)]
    for _ in range(MAX_DEPTH):
        following: list[tuple[str, Any]] = []
        for key, value in level:
            if not isinstance(value, dict | list):
                continue
            values += len(value)
            if len(value) > MAX_LENGTH:
                raise CheckpointError(
                    f"{where}: {_named(key)} has {len(value):,} entries, more than {MAX_LENGTH:,}", hint=_HINT
                )
            inner = value.items() if isinstance(value, dict) else ((key, each) for each in value)
            following += [(name, each) for name, each in inner if isinstance(each, dict | list)]
        if values > most_values:
            raise _too_many(where, values, most_values)
        level = following
        if not level:
            return
    raise CheckpointError(f"{where}: {_named(level[0][0])} is nested more than {MAX_DEPTH} deep", hint=_HINT)


def decoded_floats(value: Any) -> Any:
    """A JSON value in which numbers that JSON does not have are floats, as transformers writes them:
    ``{"__float__": "Infinity"}``.

    Args:
        value: From :func:`parse_limited`, so that its depth is limited.
    """
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("Infinity", "-Infinity", "NaN"):
            return float(value[_FLOAT])
        return {key: decoded_floats(each) for key, each in value.items()}
    return [decoded_floats(each) for each in value] if isinstance(value, list) else value


def require_sane_config(config: Mapping[str, Any], where: str) -> None:
    """Check all numbers of a configuration, of its parts too, before anything is built by them.

    Args:
        config: Content of a ``config.json``, its floats decoded.
        where: Its name, for messages.

    Raises:
        CheckpointError: A number is beyond the limit of its key, or is NaN, or a count is no whole number;
            the message gives key, value and limit.
    """
    if config.get("configuration_files") is not None:
        raise CheckpointError(
            f"{where} has configuration_files, which name other files to be read in its place",
            hint="give the directory the right config.json, and remove that key",
        )
    for key, value in _entries(config):
        _require_number(key, value, where)


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All values that are no containers, with the nearest key. The depth is limited already."""
    for key, value in config.items():
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if isinstance(each, Mapping):
                yield from _entries(each)
            elif isinstance(each, list | tuple):
                waiting += each
            else:
                yield key, each


def _require_number(key: str, value: Any, where: str) -> None:
    limit = next((limit for limit in LIMITS if limit.keys.fullmatch(key)), None)
    if limit is not None and limit.counts and isinstance(value, bool | str):
        raise CheckpointError(f"{where}: {_named(key)} is {shown(value)}, not a whole number", hint=_HINT)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and math.isnan(value):
        raise CheckpointError(f"{where}: {_named(key)} is NaN, not a number", hint=_HINT)
    if isinstance(value, float) and math.isinf(value) and _UNLIMITED.fullmatch(key):
        return
    most: float = _MAX_NUMBER if isinstance(value, float) else _MAX_WHOLE
    least = -most
    if limit is not None:
        most, least = limit.most, max(limit.least, -limit.most)
    if value > most:
        raise CheckpointError(
            f"{where}: {_named(key)} is {shown(value)}, more than {_figure(most)}, which no model exceeds",
            hint=_HINT,
        )
    if value < least:
        raise CheckpointError(
            f"{where}: {_named(key)} is {shown(value)}, less than {_figure(least)}", hint=_HINT
        )


def require_layers_in(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Check that a checkpoint can have the layers of its configuration: each has a tensor of its own.

    Args:
        config: Content of ``config.json``.
        tensors: Tensors in the checkpoint.
        where: Name of the file, for messages.

    Raises:
        CheckpointError: It cannot.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        layers = part.get("num_hidden_layers")
        if isinstance(layers, int) and layers > tensors:
            raise CheckpointError(
                f"{where}: num_hidden_layers is {layers}; the checkpoint has {tensors} tensors", hint=_HINT
            )


def _named(key: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in key)
    return (printable if len(key) <= _SHOWN_KEY else printable[: _SHOWN_KEY - 1] + "…") or "the file"


def _figure(limit: float) -> str:
    return f"{int(limit):,}" if abs(limit) < 1e15 and limit == int(limit) else f"{limit:g}"
