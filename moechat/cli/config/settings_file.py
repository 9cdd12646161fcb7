"""Option values from environment variables and the settings file; command-line options override them.

Every option ``--some-name``, except those on what to delete without confirmation, can be set by the variable
``MOECHAT_SOME_NAME``, and by ``some-name`` in ``config.toml`` in the user's configuration directory: at the
top for all commands that have the option, in a table for the command of that name. The tables ``presets`` and
``remotes`` hold the user's own names, see :mod:`moechat.cli.config.own_names`.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.cli.lazy_group import LazyGroup
from moechat.config import Paths
from moechat.errors import UsageError

FILE = "config.toml"
PREFIX = "MOECHAT_"
# Our variables that are not options.
OWN_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "HOME",
        "DEBUG",
        "ISA",
        "CUDA_GRAPHS",
        "CUDA_DRIVER",
        "RUN_AHEAD",
        "PYTHON",
        "TORCH_INDEX",
        "API_KEY",
        "UPDATE_CHECK",
    )
)
# What `rm` deletes and `verify` repairs, and the confirmation, must be given each time. `show` with the same
# arguments shows the same models that `rm` deletes.
_COMMAND_LINE_ONLY = {"help", "version", "yes", "dry-run"}
_COMMAND_LINE_ONLY_OF = {
    "rm": {"bits", "leftovers", "sources"},
    "show": {"bits"},
    "verify": {"bits", "repair", "from"},
    "help": {"search", "man"},
    "run": {"file"},
    "config": {"json", "changed"},
}
# Command aliases share the settings of the command.
_ALIASES = {"pull": "download", "ls": "list"}
# Settings of the program itself, which are options of no command; true or false.
UPDATE_CHECK = "update-check"
OWN_SETTINGS = (UPDATE_CHECK,)
# Tables of the user's own names, which hold a table for each name.
OWN_TABLES = ("presets", "remotes")
# Options whose value may be a table of names and values.
_WITH_NAMES = ("template-option",)
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The content of the settings file.

    Attributes:
        path: Its path; the file need not exist.
        general: Values by option, for all commands that have it.
        of: Values by option, by command.
        presets: The user's presets, unchecked: values by key, by name.
        remotes: The user's servers, in the same form.
    """

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    remotes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_settings(paths: Paths) -> Settings:
    """Read the settings file; a missing file has no settings.

    Raises:
        UsageError: The file cannot be read, or is not TOML.
    """
    path = paths.config / FILE
    text = read_text(path)
    return Settings(path) if text is None else parse_settings(text, path)


def read_text(path: Path) -> str | None:
    """The text of the settings file; ``None`` if there is none.

    Raises:
        UsageError: It cannot be read, is too large, or not UTF-8.
    """
    try:
        # O_NONBLOCK: opening a named pipe without a writer would wait forever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):  # a link to /dev/null is an empty file
                raise UsageError(f"the settings file {path} is not a file", hint="move it away")
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(f"the settings file {path} has more than {_MAX_BYTES:,} bytes")
        return text.decode()
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise UsageError(
            f"the settings file {path} is a directory", hint="move it away; without it nothing is set"
        ) from error
    except OSError as error:
        raise UsageError(
            f"the settings file {path} cannot be read: {error.strerror}",
            hint="change its permissions, or move it away",
        ) from error
    except UnicodeDecodeError as error:
        raise _malformed(path, error) from error


def parse_settings(text: str, path: Path) -> Settings:
    """Parse the text of the settings file.

    Args:
        text: Its text.
        path: Its path, for messages.

    Raises:
        UsageError: It is not TOML, or ``presets`` or ``remotes`` holds something else than tables.
    """
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, or nested a thousand deep
        raise _malformed(path, error) from error
    own = {name: _own_table(name, content.pop(name, {}), path) for name in OWN_TABLES}
    content = {_with_hyphens(name): value for name, value in content.items()}
    options_with_names = {name: content.pop(name) for name in _WITH_NAMES if name in content}
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    general = {name: value for name, value in content.items() if not isinstance(value, dict)}
    of = {name: _hyphenated(values) for name, values in tables.items()}
    return Settings(path, general | options_with_names, of, own["presets"], own["remotes"])


def _malformed(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"the settings file {path} cannot be parsed: {error}",
        hint='it is TOML: lines such as vram = "12G", tables such as [run]',
    )


def _own_table(table: str, found: Any, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(found, dict) or not all(isinstance(values, dict) for values in found.values()):
        raise UsageError(
            f"the settings file {path} has something else than a table of values in {table}",
            hint=f"write [{table}.NAME], with your own name for NAME",
        )
    return {name: _hyphenated(values) for name, values in found.items()}


def _hyphenated(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_with_hyphens(key): value for key, value in values.items()}


def apply_settings(group: LazyGroup, settings: Settings) -> dict[str, dict[str, Any]]:
    """Set the variable names of all options, and validate the settings file.

    Args:
        group: All commands; their options get variable names.
        settings: The user's settings.

    Returns:
        The file's values by command and parameter, as a ``default_map``.

    Raises:
        UsageError: The file names an unknown option or command, or has a value of a wrong type.
    """
    group.prepare(_name_variables)
    return default_map(group, settings)


def default_map(group: LazyGroup, settings: Settings) -> dict[str, dict[str, Any]]:
    """The file's values by command and parameter; raises as :func:`apply_settings`."""
    if not settings.general and not settings.of:
        return {}
    options = {name: options_of(command) for name, command in group.built().items()}
    known = {name for of in options.values() for name in of}
    for name, value in settings.general.items():
        if name in OWN_SETTINGS:
            _require_switch(name, value, settings.path)
        else:
            _require(name, {*known, *OWN_SETTINGS}, settings.path, "option")
    for command, values in settings.of.items():
        _require(command, {*options, *OWN_TABLES}, settings.path, "command")
        for name in values:
            _require(name, set(options[command]), settings.path, f"option of {command}")
    chosen: dict[str, dict[str, Any]] = {}
    for command, of in options.items():
        found = {
            of[name].name: checked_value(name, value, of[name], settings.path)
            for name, value in values_of(command, settings).items()
            if name in of
        }
        if found:
            chosen[command] = found
    return chosen


def _name_variables(command: Any) -> None:
    for name, parameter in options_of(command).items():
        parameter.envvar = variable_of(name)
        parameter.show_envvar = False


def values_of(command: str, settings: Settings) -> dict[str, Any]:
    """The file's values for a command, by option; includes general ones that it may not have."""
    aliased = settings.of.get(_ALIASES.get(command, ""), {})
    return {**settings.general, **aliased, **settings.of.get(command, {})}


def variable_of(option: str) -> str:
    """The variable that sets an option."""
    return PREFIX + option.upper().replace("-", "_")


def options_of(command: Any) -> dict[str, Any]:
    """Options of a command that variables and the file may set, by long name without hyphens."""
    found = {}
    excluded = _COMMAND_LINE_ONLY | _COMMAND_LINE_ONLY_OF.get(command.name, set())
    for parameter in command.params:
        names = [name[2:] for name in parameter.opts if name.startswith("--")]
        if names and names[0] not in excluded:
            found[names[0]] = parameter
    return found


def _with_hyphens(key: str) -> str:
    return key.replace("_", "-")


def _require(name: str, known: set[str], path: Path, kind: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = (
        f"do you mean {near[0]}?"
        if near
        else "moechat COMMAND --help shows the options, without the two hyphens"
    )
    raise UsageError(f"the settings file {path} sets {name!r}, which is no {kind}", hint=hint)


def _require_switch(name: str, value: Any, path: Path) -> None:
    if not isinstance(value, bool):
        raise UsageError(
            f"the settings file {path} says {name} = {value!r}; it must be true or false",
            hint="correct or remove that line",
        )


def for_parser(value: Any, parameter: Any) -> Any:
    """A value of the file in the form that the option's parser takes.

    Args:
        value: As it stands in the file.
        parameter: The option.

    Returns:
        A list for an option that may be given several times: of one value, or of ``NAME=VALUE`` for a table.
    """
    if not getattr(parameter, "multiple", False):
        return value
    if isinstance(value, dict):
        return [f"{name}={json.dumps(one)}" for name, one in value.items()]
    return value if isinstance(value, list) else [value]


def checked_value(name: str, value: Any, parameter: Any, path: Path) -> Any:
    """A value of the file for an option's parser, which checks the rest.

    Args:
        name: Of the option.
        value: As it stands in the file.
        parameter: The option.
        path: Of the file, for messages.

    Raises:
        UsageError: It has a type that no option takes.
    """
    # Python treats true as 1.
    if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
        raise UsageError(
            f"the settings file {path} says {name} = {str(value).lower()}, but it needs a value",
            hint=f"give it a value, as for --{name}",
        )
    if isinstance(value, bool | int | float | str):
        return for_parser(value, parameter)
    if getattr(parameter, "multiple", False) and (
        (isinstance(value, list) and all(isinstance(one, str) for one in value))
        or (isinstance(value, dict) and name in _WITH_NAMES)
    ):
        return for_parser(value, parameter)
    raise UsageError(
        f"the settings file {path} sets {name} to a {type(value).__name__}",
        hint="a value is a string in quotes, a number, true or false",
    )
