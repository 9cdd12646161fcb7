"""Changes single lines of the settings file; its other lines and comments stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.atomic_file import replacing
from moechat.cli.config.setting_keys import SettingKey
from moechat.cli.config.settings_file import OWN_TABLES, parse_settings, read_text
from moechat.errors import UsageError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import Table

# Only the user may read it: a system prompt may be private.
_MODE = 0o600


class SettingsEditor:
    """The settings file, to be changed.

    Args:
        path: Of the file, which need not exist.

    Raises:
        UsageError: It cannot be read, or is not TOML.
    """

    def __init__(self, path: Path) -> None:
        import tomlkit

        self.path = path
        text = read_text(path) or ""
        parse_settings(text, path)
        self._document: TOMLDocument = tomlkit.parse(text)

    @property
    def text(self) -> str:
        """The text of the file as it is now."""
        return self._document.as_string()

    def set(self, key: SettingKey, value: Any) -> None:
        """Set a value; tables that are not there are added at the end.

        Args:
            key: A setting, not a whole table.
            value: A text, number, bool, list of texts, or a mapping of names to values.

        Raises:
            UsageError: Something else than a table stands where the setting's table would.
        """
        import tomlkit

        table: Any = self._document
        for depth, name in enumerate(key.table):
            if name not in table:
                # [presets.NAME] needs no line [presets] before it.
                table[name] = tomlkit.table(is_super_table=depth == 0 and name in OWN_TABLES)
            table = table[name]
        if isinstance(value, dict):
            inline = tomlkit.inline_table()
            inline.update(value)
            value = inline
        table[_written(table, key.name)] = value

    def unset(self, key: SettingKey) -> bool:
        """Remove a setting or a whole table, and tables that are empty then.

        Returns:
            Whether it was there.
        """
        path: list[tuple[Any, str]] = []
        table: Any = self._document
        for name in (*key.table, *([key.name] if key.name else [])):
            written = _written(table, name) if name == key.name else name
            if written not in table:
                return False
            path.append((table, written))
            table = table[written]
        outer, last = path.pop()
        outer.remove(last)
        while path and _is_empty(outer):
            outer, last = path.pop()
            outer.remove(last)
        return True

    def save(self) -> None:
        """Write the file, at once or not at all.

        Raises:
            UsageError: It cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mode = self.path.stat().st_mode & 0o777 if self.path.exists() else _MODE
            with replacing(self.path, mode=mode) as file:
                file.write(self.text.encode())
        except OSError as error:
            raise UsageError(
                f"the settings file {self.path} cannot be written: {error.strerror}",
                hint="check its directory's permissions",
            ) from error


def _written(table: Table | TOMLDocument, name: str) -> str:
    """The key of an option as it is spelt in the file, where underscores stand for hyphens too."""
    spelt = name.replace("-", "_")
    return spelt if name not in table and spelt in table else name


def _is_empty(table: Any) -> bool:
    """Whether a table holds neither values nor comments."""
    return not len(table) and not table.as_string().strip()


def toml_of(value: Any) -> str:
    """A value as it is written in the file."""
    import tomlkit

    text: str = tomlkit.item(value).as_string()
    return text


def as_text(value: Any) -> str:
    """A value without quotes around it, for ``config get``."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    return toml_of(value)
