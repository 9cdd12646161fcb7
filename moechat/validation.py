"""Checks of single values, with one form of message: ``NAME is VALUE; it must be ...``.

Every check takes the name that the caller knows the value by (``--ctx`` on the command line, ``ctx`` in
Python), returns the value in its plain type, and raises :class:`~moechat.errors.UsageError`, never
``TypeError`` or ``ValueError``.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from moechat.errors import UsageError

_MOST_SHOWN = 80
_P = ParamSpec("_P")
_R = TypeVar("_R")


def shown(value: object) -> str:
    """The value as Python writes it, shortened; the type's name where it cannot be written."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4300 digits, an object with a broken __repr__
        return f"of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def require_choice(name: str, value: object, choices: tuple[Any, ...]) -> Any:
    """One of ``choices``, which are all strings or all integers.

    Raises:
        UsageError: It is not one of them, or of another type.
    """
    plain: object = value
    if isinstance(choices[0], int):
        plain = None if isinstance(value, bool) else _as_index(value)
    if not isinstance(plain, type(choices[0])) or plain not in choices:
        raise UsageError(f"{name} is {shown(value)}", hint=f"choose one of: {', '.join(map(str, choices))}")
    return plain


def require_whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``; numpy's integers count, booleans do not.

    Raises:
        UsageError: It is another type, or out of range.
    """
    number = require_whole_type(name, value)
    if not least <= number <= most:
        raise UsageError(f"{name} is {shown(number)}; it must be at least {least} and at most {_bound(most)}")
    return number


def require_whole_type(name: str, value: object, *, hint: str | None = None) -> int:
    """A whole number of any size, as for :func:`require_whole`.

    Raises:
        UsageError: It is another type.
    """
    number = None if isinstance(value, bool) else _as_index(value)
    if number is None:
        raise UsageError(f"{name} is {shown(value)}; it must be a whole number", hint=hint)
    return number


def require_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """A number from ``low`` to ``high``; with ``above``, ``low`` itself is refused.

    Returns:
        The value; integers stay integers.

    Raises:
        UsageError: It is another type, NaN, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} is {shown(value)}; it must be a number")
    # Written so that NaN fails too.
    if not low <= value <= high or (above and value == low):
        least = "above" if above else "at least"
        raise UsageError(f"{name} is {shown(value)}; it must be {least} {low:g} and at most {high:g}")
    return value


def require_bool(name: str, value: object) -> bool:
    """``True`` or ``False``.

    Raises:
        UsageError: It is anything else.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value)}; it must be True or False")
    return value


def require_callable(name: str, value: object) -> None:
    """A function, or ``None``.

    Raises:
        UsageError: It is anything else.
    """
    if value is not None and not callable(value):
        raise UsageError(f"{name} is {shown(value)}; it must be a function")


def require_known(
    name: object, names: Iterable[str], *, purpose: str, label: Callable[[str], str] = str
) -> None:
    """The name of an option.

    Args:
        name: As the user wrote it.
        names: All that there are.
        purpose: Completes "NAME is no option for ...".
        label: How a name is written in messages.

    Raises:
        UsageError: There is no such option; the hint has the closest one.
    """
    known = list(names)
    if name in known:
        return
    close = difflib.get_close_matches(str(name), known, n=1)
    raise UsageError(
        f"{label(str(name))} is no option for {purpose}",
        hint=f"did you mean {label(close[0])}?"
        if close
        else f"the options are {', '.join(map(label, known))}",
    )


def known_keywords(purpose: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: a call with an unknown keyword raises as :func:`require_known`, not ``TypeError``.

    Args:
        purpose: See :func:`require_known`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(function).parameters.values()
        names = [entry.name for entry in parameters if entry.kind is not entry.POSITIONAL_ONLY]
        optional = [entry.name for entry in parameters if entry.kind is entry.KEYWORD_ONLY]

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in names:
                    require_known(name, optional, purpose=purpose)
            return function(*args, **kwargs)

        return checked

    return decorate


def require_model(value: object) -> None:
    """The name of a model, or a path.

    Raises:
        UsageError: It is another type.
    """
    if not isinstance(value, str | Path):
        raise UsageError(
            f"the model is of type {type(value).__name__}", hint="give a name, or the path of a directory"
        )


def _bound(number: int) -> str:
    """A limit for people: those of whole machine words as powers."""
    power = (number + 1).bit_length() - 1
    return f"2^{power} - 1" if power > 32 and number + 1 == 1 << power else str(number)


def _as_index(value: object) -> int | None:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
