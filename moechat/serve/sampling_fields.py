"""The fields of a request that say how tokens are drawn; the same in all protocols."""

from __future__ import annotations

from typing import Any

from moechat.engine.answer import stop_texts
from moechat.errors import UsageError
from moechat.sampling_ranges import MOST_SEED, MOST_TOKENS, MOST_TOP_K, RANGES, Range
from moechat.serve.api_errors import api_error
from moechat.serve.fields import Fields


def sampling_options(fields: Fields) -> dict[str, Any]:
    """Keyword arguments of ``Engine.generate`` from the fields that are given.

    Raises:
        ApiError: A value has the wrong type or is out of range.
    """
    seed = fields.whole("seed", -(1 << 63), MOST_SEED)
    options = {
        **{name: _number(fields, name, allowed) for name, allowed in RANGES.items()},
        "top_k": _top_k(fields),
        "logit_bias": fields.values.get("logit_bias"),  # checked where the vocabulary is known
        "seed": None if seed is None else seed & MOST_SEED,
        "stop": stops(fields, "stop"),
    }
    return {name: value for name, value in options.items() if value is not None}


def max_tokens(fields: Fields, *names: str) -> int | None:
    """The first of some fields that is given."""
    found = [number for name in names if (number := fields.whole(name, 1, MOST_TOKENS)) is not None]
    return found[0] if found else None


def stops(fields: Fields, name: str) -> tuple[str, ...] | None:
    """A text, or a list of texts, that end the answer."""
    try:
        return stop_texts(fields.values.get(name), name) or None
    except UsageError as error:
        raise api_error(error, name) from None


def _number(fields: Fields, name: str, allowed: Range) -> float | None:
    value = fields.number(name, allowed.least, allowed.most)
    if value is not None and value not in allowed:
        raise fields.error(name, f"{name} is {value:g}; it must be {allowed}")
    return value


def _top_k(fields: Fields) -> int | None:
    # -1 turns it off in vLLM and SGLang.
    value = fields.whole("top_k", -1, MOST_TOP_K)
    return None if value is None else max(0, value)
