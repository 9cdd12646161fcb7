"""Values of options from variables and from the settings file, below what the command line says.

Every option ``--some-name`` of every command but ``--yes`` can be given as the variable
``MOECHAT_SOME_NAME``, and as ``some-name`` in ``config.toml`` in the user's configuration directory: at its
top for all commands that have such an option, in a table named like a command for that one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.config import Paths
from moechat.errors import UsageError

FILE = "config.toml"
PREFIX = "MOECHAT_"
# The last must be said each time: `rm` asks before it deletes.
_NOT_FROM_HERE = {"help", "version", "install-completion", "show-completion", "yes"}
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
        with open(path, "rb") as file:
            content = tomllib.loads(file.read(_MOST_BYTES).decode())
    except FileNotFoundError:
        return Settings(path)
    except OSError as error:
        raise UsageError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(
            f"the settings file {path} cannot be understood: {error}",
            hint='it is TOML: lines such as vram = "12G", tables such as [run]',
        ) from error
    tables = {_named(name): value for name, value in content.items() if isinstance(value, dict)}
    general = {_named(name): value for name, value in content.items() if not isinstance(value, dict)}
    return Settings(
        path, general, {name: {_named(key): v for key, v in of.items()} for name, of in tables.items()}
    )


def apply_settings(group: Any, settings: Settings) -> dict[str, dict[str, Any]]:
    """Let options take their values from variables, and find those that the file gives.

    Args:
        group: The command line's grammar: its ``commands`` get the names of variables.
        settings: Of the user.

    Returns:
        Values by command and parameter, as a ``default_map``.

    Raises:
        UsageError: The file names what is no option or command, or has a table or list for a value.
    """
    options = {name: _options(command) for name, command in group.commands.items()}
    for of in options.values():
        for name, parameter in of.items():
            parameter.envvar = variable_of(name)
            parameter.show_envvar = False
    known = {name for of in options.values() for name in of}
    for name in settings.general:
        _require(name, known, settings.path, "option")
    for command, values in settings.of.items():
        _require(command, set(options), settings.path, "command")
        for name in values:
            _require(name, set(options[command]), settings.path, f"option of {command}")
    chosen: dict[str, dict[str, Any]] = {}
    for command, of in options.items():
        values = {**settings.general, **settings.of.get(command, {})}
        found = {
            of[name].name: _plain(name, value, settings.path) for name, value in values.items() if name in of
        }
        if found:
            chosen[command] = found
    return chosen


def variable_of(option: str) -> str:
    """The variable that an option's value can come from."""
    return PREFIX + option.upper().replace("-", "_")


def origins_of(context: Any) -> dict[str, str]:
    """Where the values come from that a variable or the file gave, in words, by parameter."""
    found = {}
    for option, parameter in _options(context.command).items():
        source = context.get_parameter_source(parameter.name)
        name = None if source is None else source.name
        if name == "ENVIRONMENT":
            found[parameter.name] = f"from {variable_of(option)}"
        elif name == "DEFAULT_MAP":
            found[parameter.name] = f"from {FILE}"
    return found


def _options(command: Any) -> dict[str, Any]:
    """Options of a command by their long names, without the hyphens before it."""
    found = {}
    for parameter in command.params:
        names = [name[2:] for name in parameter.opts if name.startswith("--")]
        if names and names[0] not in _NOT_FROM_HERE:
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


def _plain(name: str, value: Any, path: Path) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"the settings file {path} gives {name} a {type(value).__name__}",
        hint="a value is a text in quotes, a number, true or false",
    )
