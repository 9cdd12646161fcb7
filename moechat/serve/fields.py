"""Reads the fields of a request's JSON body; a wrong one is an error that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moechat.serve.api_errors import ApiError
from moechat.validation import shown

_DEEPEST = 64
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_body(data: bytes) -> Fields:
    """The JSON object of a body.

    Raises:
        ApiError: It is not one.
    """
    try:
        # Not from bytes: Python would take halves of surrogate pairs, and other encodings.
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        if _ESCAPED_SURROGATE.search(data):
            json.dumps(body, ensure_ascii=False).encode()  # a half of a pair alone is no text
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError too
        reason = (
            f"{error.msg}, line {error.lineno} column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else "not Unicode text"
        )
        raise ApiError(400, f"the body is not JSON: {reason}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}")
    _require_shallow(body)
    return Fields(body)


class Fields:
    """The fields of one object. ``null`` counts as missing.

    Args:
        values: The object.
        place: Of the object in the body, for messages: ``tools[0].``.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.values = values
        self._place = place

    def has(self, name: str) -> bool:
        """Whether it is there."""
        return self.values.get(name) is not None

    def error(self, name: str, message: str, *, code: str | None = None) -> ApiError:
        """An error about a field."""
        return ApiError(400, message, param=self._place + name, code=code)

    def refuse(self, names: Mapping[str, str]) -> None:
        """Refuse fields that are known, and that this server cannot do.

        Args:
            names: Reasons.

        Raises:
            ApiError: One of them is there.
        """
        for name, reason in names.items():
            value = self.values.get(name)
            if value not in (None, False, [], {}):
                raise self.error(
                    name, f"{self._place}{name} is not supported: {reason}", code="unsupported_parameter"
                )

    def text(self, name: str, default: str = "", *, most: int = 1 << 20) -> str:
        """A text."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self._wrong(name, value, f"a text of at most {most} characters")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str | None:
        """One of some texts."""
        value = self.values.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return str(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """``true`` or ``false``."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number; ``2.0`` is one too."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number."""
        value = self.values.get(name)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not least <= value <= most:  # NaN, infinity and huge integers included
            raise self._wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def inner(self, name: str) -> Fields | None:
        """An object."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self._place}{name}.")

    def items(self, name: str, *, most: int = 100_000) -> list[Any] | None:
        """A list."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > most:
            raise self._wrong(name, value, f"a list of at most {most} items")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> ApiError:
        return self.error(name, f"{self._place}{name} is {shown(value)}; it must be {wanted}")


def _refuse_constant(name: str) -> None:
    raise ApiError(400, f"the body is not JSON: {name} is no number")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _require_shallow(value: object) -> None:
    """Templates and schemas are walked by recursion."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ApiError(400, f"the body is nested more than {_DEEPEST} levels deep")
