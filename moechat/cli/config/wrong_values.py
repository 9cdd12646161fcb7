"""What is wrong with a value that the parser refuses, in words."""

from __future__ import annotations

import os
from typing import Any

from moechat.cli.config.settings_file import Settings, values_of, variable_of
from moechat.errors import UsageError

# The parser's kinds of errors begin with the type that a value should have had.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
}


def wrong_type(error: Any) -> tuple[object, str] | None:
    """The value that a parser error is about and what it should have been, if the value has a wrong type."""
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return None
    first = details()[0]
    wanted = _WANTED.get(first["type"].partition("_")[0])
    return None if wanted is None else (first["input"], wanted)


def problem_of(error: Any) -> str:
    """The end of a sentence "NAME is VALUE"."""
    wrong = wrong_type(error)
    return f": {error.message}" if wrong is None else f"; it must be {wrong[1]}"


def wrong_variable(option: str, error: Any) -> UsageError:
    """The error about the value of a variable that the parser refuses."""
    variable = variable_of(option)
    return UsageError(
        f"{variable} is {os.environ.get(variable, '')!r}{problem_of(error)}",
        hint=f"it sets --{option}: correct or unset it",
    )


def wrong_line(command: str, option: str, settings: Settings, error: Any) -> UsageError:
    """The error about a value of the settings file that the parser refuses."""
    value = values_of(command, settings).get(option)
    return UsageError(
        f"the settings file {settings.path} says {option} = {value!r}{problem_of(error)}",
        hint=f"it sets --{option}: correct or remove that line",
    )
