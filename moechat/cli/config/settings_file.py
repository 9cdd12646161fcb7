"""Option values from environment variables and the settings file; command-line options override them.

Every option ``--some-name``, except those on what to delete without confirmation, can be set by the variable
``MOECHAT_SOME_NAME``, and by ``some-name`` in ``config.toml`` in the user's configuration directory: at the
top for all commands that have the option, in a table for the command of that name.
"""

from __future__ import annotations

import difflib
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
    )
)
# What `rm` deletes, and its confirmation, must be given each time. `show` with the same arguments shows the
# same models that `rm` deletes.
_COMMAND_LINE_ONLY = {"help", "version", "yes", "dry-run"}
_COMMAND_LINE_ONLY_OF = {
    "rm": {"bits", "leftovers", "sources"},
    "show": {"bits"},
    "help": {"search"},
    "run": {"file"},
}
# Command aliases share the settings of the command.
_ALIASES = {"pull": "download", "ls": "list"}
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The content of the settings file.

    Attributes:
        path: Its path; the file need not exist.
        general: Values by option, for all commands that have it.
        of: Values by option, by command.
    """

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_settings(paths: Paths) -> Settings:
    """Read the settings file; a missing file has no settings.

    Raises:
        UsageError: The file cannot be read, or is not TOML.
    """
    path = paths.config / FILE
    try:
        # O_NONBLOCK: opening a named pipe without a writer would wait forever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):  # a link to /dev/null is an empty file
                raise UsageError(f"the settings file {path} is not a file", hint="move it away")
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(f"the settings file {path} has more than {_MAX_BYTES:,} bytes")
        content = tomllib.loads(text.decode())
    except FileNotFoundError:
        return Settings(path)
    except IsADirectoryError as error:
        raise UsageError(
            f"the settings file {path} is a directory", hint="move it away; without it nothing is set"
        ) from error
    except OSError as error:
        raise UsageError(
            f"the settings file {path} cannot be read: {error.strerror}",
            hint="change its permissions, or move it away",
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested a thousand deep
        raise UsageError(
            f"the settings file {path} cannot be parsed: {error}",
            hint='it is TOML: lines such as vram = "12G", tables such as [run]',
        ) from error
    tables = {_with_hyphens(name): value for name, value in content.items() if isinstance(value, dict)}
    general = {_with_hyphens(name): value for name, value in content.items() if not isinstance(value, dict)}
    return Settings(
        path, general, {name: {_with_hyphens(key): v for key, v in of.items()} for name, of in tables.items()}
    )


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
    if not settings.general and not settings.of:
        return {}
    options = {name: options_of(command) for name, command in group.built().items()}
    known = {name for of in options.values() for name in of}
    for name in settings.general:
        _require(name, known, settings.path, "option")
    for command, values in settings.of.items():
        _require(command, set(options), settings.path, "command")
        for name in values:
            _require(name, set(options[command]), settings.path, f"option of {command}")
    chosen: dict[str, dict[str, Any]] = {}
    for command, of in options.items():
        found = {
            of[name].name: _checked_value(name, value, of[name], settings.path)
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


def _checked_value(name: str, value: Any, parameter: Any, path: Path) -> Any:
    # Python treats true as 1.
    if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
        raise UsageError(
            f"the settings file {path} says {name} = {str(value).lower()}, but it needs a value",
            hint=f"give it a value, as for --{name}",
        )
    if isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"the settings file {path} sets {name} to a {type(value).__name__}",
        hint="a value is a string in quotes, a number, true or false",
    )
