"""The fields of a request that say how tokens are drawn; the same in all protocols."""

from __future__ import annotations

from typing import Any

from moechat.engine.answer import stop_texts
from moechat.errors import UsageError
from moechat.serve.api_errors import api_error
from moechat.serve.fields import Fields

_MOST_SEED = (1 << 63) - 1
_MOST_TOKENS = 1 << 24


def sampling_options(fields: Fields) -> dict[str, Any]:
    """Keyword arguments of ``Engine.generate`` from the fields that are given.

    Raises:
        ApiError: A value has the wrong type or is out of range.
    """
    seed = fields.whole("seed", -(1 << 63), _MOST_SEED)
    options = {
        "temperature": fields.number("temperature", 0, 100),
        "top_p": _above_zero(fields, "top_p", 1),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": _above_zero(fields, "repetition_penalty", 10),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "logit_bias": fields.values.get("logit_bias"),  # checked where the vocabulary is known
        "seed": None if seed is None else seed & _MOST_SEED,
        "stop": stops(fields, "stop"),
    }
    return {name: value for name, value in options.items() if value is not None}


def max_tokens(fields: Fields, *names: str) -> int | None:
    """The first of some fields that is given."""
    found = [number for name in names if (number := fields.whole(name, 1, _MOST_TOKENS)) is not None]
    return found[0] if found else None


def stops(fields: Fields, name: str) -> tuple[str, ...] | None:
    """A text, or a list of texts, that end the answer."""
    try:
        return stop_texts(fields.values.get(name), name) or None
    except UsageError as error:
        raise api_error(error, name) from None


def _above_zero(fields: Fields, name: str, most: float) -> float | None:
    value = fields.number(name, 0, most)
    if value == 0:
        raise fields.error(name, f"{name} is 0; it must be above 0 and at most {most:g}")
    return value


def _top_k(fields: Fields) -> int | None:
    # -1 turns it off in vLLM and SGLang.
    value = fields.whole("top_k", -1, _MOST_TOKENS)
    return None if value is None else max(0, value)
