"""Keys of settings, as ``moechat config`` takes them, and the values that are in effect.

``ctx`` is a setting for all commands that have the option, ``run.ctx`` one for a command,
``presets.NAME.KEY`` and ``remotes.NAME.KEY`` are those of the user's own names. Without the last part a key
means the whole table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moechat.cli.config.own_tables import (
    REMOTE_KEYS,
    preset_options,
    refuse_secret,
    require_name,
    unknown_key,
)
from moechat.cli.config.settings_file import (
    FILE,
    OWN_SETTINGS,
    OWN_TABLES,
    Settings,
    options_of,
    values_of,
    variable_of,
)
from moechat.cli.lazy_group import LazyGroup
from moechat.errors import UsageError


@dataclass(frozen=True)
class SettingKey:
    """The place of a setting in the file.

    Attributes:
        table: Names of the tables around it, from the outside; empty for settings of all commands.
        name: Its name there; empty: all of the table.
    """

    table: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.table, self.name) if self.name else self.table)

    @property
    def command(self) -> str:
        """The command that it is for; empty for all of them, and for the user's own names."""
        return self.table[0] if self.table and self.table[0] not in OWN_TABLES else ""


@dataclass(frozen=True)
class Shown:
    """A setting with its value.

    Attributes:
        key: Its key.
        value: The value in effect; ``None`` where nothing is set.
        source: ``default``, the file, or the name of a variable.
    """

    key: str
    value: Any
    source: str


class SettingKeys:
    """All keys that there are.

    Args:
        group: All commands.
    """

    def __init__(self, group: LazyGroup) -> None:
        self._commands = {name: command for name, command in group.built().items() if options_of(command)}
        self._options = {name: options_of(command) for name, command in self._commands.items()}

    @property
    def run(self) -> Any:
        """The command whose options presets hold."""
        return self._commands["run"]

    @property
    def general(self) -> list[str]:
        """Names of all options, for whichever command, and of the program's own settings."""
        return sorted({*OWN_SETTINGS, *(name for options in self._options.values() for name in options)})

    def parse(self, text: str) -> SettingKey:
        """The key that a user has given; underscores count as hyphens, and two hyphens in front are allowed.

        Raises:
            UsageError: There is no such setting.
        """
        parts = text.strip().removeprefix("--").split(".")
        refuse_secret(text, parts[-1].replace("_", "-"))
        if parts[0] in OWN_TABLES:
            return self._own(text, parts)
        parts = [part.replace("_", "-") for part in parts]
        if len(parts) == 1 and parts[0] in self.general:
            return SettingKey((), parts[0])
        if len(parts) == 1 and parts[0] in self._options:
            return SettingKey((parts[0],), "")
        if len(parts) == 2 and parts[0] in self._options:
            if parts[1] in self._options[parts[0]]:
                return SettingKey((parts[0],), parts[1])
            raise unknown_key(text, parts[1], list(self._options[parts[0]]))
        known = [*self.general, *(f"{name}.{one}" for name, of in self._options.items() for one in of)]
        near = difflib.get_close_matches(".".join(parts), known, n=1)
        raise UsageError(
            f"there is no setting {text}",
            hint=f"do you mean {near[0]}?" if near else "`moechat config list` shows all of them",
        )

    def _own(self, text: str, parts: list[str]) -> SettingKey:
        kind = parts[0].removesuffix("s")
        if len(parts) not in (2, 3) or not parts[1]:
            raise UsageError(f"{text} names no setting of a {kind}", hint=f"write {parts[0]}.NAME.KEY")
        require_name(kind, parts[1])
        if len(parts) == 2:
            return SettingKey((parts[0], parts[1]), "")
        name = parts[2].replace("_", "-")
        known = self.own_keys(parts[0])
        if name not in known:
            raise unknown_key(text, parts[2], known)
        return SettingKey((parts[0], parts[1]), name)

    def own_keys(self, table: str) -> list[str]:
        """Keys in a table of the user's own names."""
        return ["model", *preset_options(self.run)] if table == "presets" else list(REMOTE_KEYS)

    def parameters(self, key: SettingKey) -> list[tuple[Any, Any]]:
        """The commands and options that a key stands for; none for texts of the user's own names."""
        if key.table[:1] == ("presets",):
            found = preset_options(self.run).get(key.name)
            return [] if found is None else [(self.run, found)]
        if key.table[:1] == ("remotes",):
            return []
        names = [key.command] if key.command else list(self._options)
        return [
            (self._commands[name], self._options[name][key.name])
            for name in names
            if key.name in self._options[name]
        ]

    def value(self, key: SettingKey, settings: Settings, environment: Mapping[str, str]) -> Shown:
        """The value of a setting that is in effect, and its source."""
        if key.table and key.table[0] in OWN_TABLES:
            values = (settings.presets if key.table[0] == "presets" else settings.remotes).get(
                key.table[1], {}
            )
            value = values.get(key.name)
            return Shown(str(key), value, "default" if value is None else FILE)
        variable = variable_of(key.name)
        if text := environment.get(variable):
            return Shown(str(key), text, variable)
        values = values_of(key.command, settings) if key.command else settings.general
        if key.name in values:
            return Shown(str(key), values[key.name], FILE)
        if key.name in OWN_SETTINGS:
            return Shown(str(key), False, "default")
        defaults = [parameter.default for _, parameter in self.parameters(key)]
        same = all(default == defaults[0] for default in defaults)
        return Shown(str(key), _plain(defaults[0]) if same else None, "default")

    def every(self, settings: Settings, environment: Mapping[str, str]) -> Iterator[Shown]:
        """All settings for all commands, then what the file has for single commands and own names."""
        for name in self.general:
            yield self.value(SettingKey((), name), settings, environment)
        for command, values in settings.of.items():
            for name in values:
                yield self.value(SettingKey((command,), name), settings, environment)
        for table, named in (("presets", settings.presets), ("remotes", settings.remotes)):
            for own, values in named.items():
                for name in values:
                    yield self.value(SettingKey((table, own), name), settings, environment)


def _plain(value: Any) -> Any:
    """A default in a form for people: nothing for an option that may be given several times."""
    return value if isinstance(value, bool | int | float | str) else None
