"""Values of options from variables and from the settings file, below what the command line says.

Every option ``--some-name`` of every command, but those that say what is deleted and without which question,
can be given as the variable ``MOECHAT_SOME_NAME``, and as ``some-name`` in ``config.toml`` in the user's
configuration directory: at its top for all commands that have such an option, in a table named like a command
for that one.
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
# Variables of ours that are no options.
OWN_VARIABLES = frozenset(
    PREFIX + name for name in ("HOME", "DEBUG", "ISA", "CUDA_GRAPHS", "CUDA_DRIVER", "PYTHON", "TORCH_INDEX")
)
# `rm` asks before it deletes: the answer must be given each time, and so must what it is about. What `show`
# shows should be what `rm` with the same words removes.
_NOT_FROM_HERE = {"help", "version", "yes", "dry-run"}
_NOT_FROM_HERE_OF = {"rm": {"bits", "leftovers", "sources"}, "show": {"bits"}}
# Commands under another name: settings of the one are settings of the other.
_SAME = {"pull": "download", "ls": "list"}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What the settings file says.

    Attributes:
        path: Where it is, or would be.
        general: Values by option, for every command that has it.
        of: The same by command, for that one.
    """

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_settings(paths: Paths) -> Settings:
    """The settings file of a user; without one nothing is set.

    Raises:
        UsageError: It cannot be read, or is not TOML.
    """
    path = paths.config / FILE
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):  # /dev/null is a way to say: nothing
                raise UsageError(f"the settings file {path} is no file", hint="move it away")
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise UsageError(f"the settings file {path} has more than {_MOST_BYTES:,} bytes")
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
            hint="it must be readable for you: change its permissions, or move it away",
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested a thousand deep
        raise UsageError(
            f"the settings file {path} cannot be understood: {error}",
            hint='it is TOML: lines such as vram = "12G", tables such as [run]',
        ) from error
    tables = {_named(name): value for name, value in content.items() if isinstance(value, dict)}
    general = {_named(name): value for name, value in content.items() if not isinstance(value, dict)}
    return Settings(
        path, general, {name: {_named(key): v for key, v in of.items()} for name, of in tables.items()}
    )


def apply_settings(group: LazyGroup, settings: Settings) -> dict[str, dict[str, Any]]:
    """Let options take their values from variables, and find those that the file gives.

    Args:
        group: The command line's grammar: its commands get the names of variables.
        settings: Of the user.

    Returns:
        Values by command and parameter, as a ``default_map``.

    Raises:
        UsageError: The file names what is no option or command, or has a table or list for a value.
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
            of[name].name: _plain(name, value, of[name], settings.path)
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
    """What the file says for a command, by option; some may be options of other commands only."""
    same = settings.of.get(_SAME.get(command, ""), {})
    return {**settings.general, **same, **settings.of.get(command, {})}


def variable_of(option: str) -> str:
    """The variable that an option's value can come from."""
    return PREFIX + option.upper().replace("-", "_")


def options_of(command: Any) -> dict[str, Any]:
    """Options of a command that may be set, by their long names without the hyphens before it."""
    found = {}
    never = _NOT_FROM_HERE | _NOT_FROM_HERE_OF.get(command.name, set())
    for parameter in command.params:
        names = [name[2:] for name in parameter.opts if name.startswith("--")]
        if names and names[0] not in never:
            found[names[0]] = parameter
    return found


def _named(key: str) -> str:
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


def _plain(name: str, value: Any, parameter: Any, path: Path) -> Any:
    # Python would take true for 1.
    if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
        raise UsageError(
            f"the settings file {path} says {name} = {str(value).lower()}, which is no switch",
            hint=f"give it a value, as for --{name}",
        )
    if isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"the settings file {path} gives {name} a {type(value).__name__}",
        hint="a value is a text in quotes, a number, true or false",
    )
