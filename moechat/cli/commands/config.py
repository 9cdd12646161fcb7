"""``moechat config``: shows and changes the settings file."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from moechat.cli.config.own_names import shadowed_model
from moechat.cli.config.own_tables import is_secret_key, parsed
from moechat.cli.config.setting_checks import check_settings, new_problems
from moechat.cli.config.setting_keys import SettingKey, SettingKeys, Shown
from moechat.cli.config.settings_edit import SettingsEditor, as_text, toml_of
from moechat.cli.config.settings_file import (
    FILE,
    OWN_SETTINGS,
    OWN_TABLES,
    Settings,
    default_map,
    parse_settings,
    read_settings,
    variable_of,
)
from moechat.cli.lazy_group import LazyGroup
from moechat.cli.terminal.consoles import print_error, print_notice, write_output
from moechat.config import user_paths
from moechat.errors import MoechatError, UsageError
from moechat.safe_text import one_line

_HIDDEN = "(hidden)"
_EDITORS = ("sensible-editor", "nano", "vim", "vi")


def list_settings(group: LazyGroup, *, json: bool, changed: bool) -> int:
    """Show all settings; returns the exit status."""
    settings = read_settings(user_paths())
    keys = SettingKeys(group)
    rows = [row for row in keys.every(settings, os.environ) if not changed or row.source != "default"]
    if json:
        _write_json([{"key": row.key, "value": _shown_value(row), "source": row.source} for row in rows])
        return 0
    if not rows:
        print_notice(f"nothing is set: {settings.path} has no settings")
        return 0
    texts = [(row.key, _cell(row), row.source) for row in rows]
    widths = [max(len(text[column]) for text in texts) for column in (0, 1)]
    lines = [f"{key:{widths[0]}}  {value:{widths[1]}}  {source}\n" for key, value, source in texts]
    write_output(sys.stdout, "".join(lines))
    return 0


def get_setting(group: LazyGroup, key: str, *, json: bool) -> int:
    """Print a value that is in effect, or all values of a table; returns the exit status: 1 without any."""
    settings = read_settings(user_paths())
    keys = SettingKeys(group)
    wanted = keys.parse(key)
    if wanted.name:
        rows = [keys.value(wanted, settings, os.environ)]
    else:
        rows = [row for row in keys.every(settings, os.environ) if row.key.startswith(f"{wanted}.")]
    found = [row for row in rows if row.value is not None]
    if not found:
        print_notice(f"{wanted} is not set")
        return 1
    if json:
        values = {row.key.rpartition(".")[2]: _shown_value(row) for row in found}
        _write_json(next(iter(values.values())) if wanted.name else values)
    elif wanted.name:
        write_output(sys.stdout, f"{as_text(_shown_value(found[0]))}\n")
    else:
        lines = [f"{row.key.rpartition('.')[2]} = {_cell(row)}\n" for row in found]
        write_output(sys.stdout, "".join(lines))
    return 0


def set_setting(group: LazyGroup, key: str, values: Sequence[str]) -> int:
    """Set a value, or several of a table; returns the exit status.

    Raises:
        UsageError: There is no such setting, a value is wrong, or the file cannot be written.
    """
    keys = SettingKeys(group)
    wanted = keys.parse(key)
    given = _pairs(keys, wanted, values)
    editor = SettingsEditor(user_paths().config / FILE)
    before = parse_settings(editor.text, editor.path)
    if wanted.table[:1] == ("presets",) and wanted.table[1] not in before.presets:
        other = shadowed_model(wanted.table[1], user_paths())
        if other is not None:
            raise UsageError(
                f"{wanted.table[1]} is the name of a model, {other}", hint="give the preset another name"
            )
    for place, texts in given:
        editor.set(place, _typed(keys, place, texts))
    _require_sound(group, before, parse_settings(editor.text, editor.path), wanted)
    editor.save()
    for place, _ in given:
        if not wanted.table[:1] or wanted.table[0] not in OWN_TABLES:
            _warn_overridden(place)
    return 0


def unset_setting(group: LazyGroup, key: str) -> int:
    """Remove a setting or a table from the file; returns the exit status: 1 if it was not there.

    Raises:
        UsageError: There is no such setting, or the file cannot be written.
    """
    editor = SettingsEditor(user_paths().config / FILE)
    before = parse_settings(editor.text, editor.path)
    wanted = _key_to_remove(group, key, before)
    if not editor.unset(wanted):
        print_notice(f"{wanted} is not set in {editor.path}")
        return 1
    if wanted.table and wanted.table[0] in OWN_TABLES:  # a preset cannot do without its model
        _require_sound(group, before, parse_settings(editor.text, editor.path), wanted)
    editor.save()
    if wanted.name and (not wanted.table or wanted.table[0] not in OWN_TABLES):
        _warn_overridden(wanted)
    return 0


def edit_settings(group: LazyGroup) -> int:
    """Open the file in an editor, then check it; returns the exit status.

    Raises:
        UsageError: There is no editor, or it failed.
    """
    path = user_paths().config / FILE
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    words = shlex.split(command) or [next((name for name in _EDITORS if shutil.which(name)), "")]
    if not words[0]:
        raise UsageError("there is no editor", hint=f"set EDITOR, or edit {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        status = subprocess.call([*words, str(path)])
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}", hint="set EDITOR") from error
    if status:
        raise UsageError(f"{words[0]} ended with status {status}")
    try:
        settings = read_settings(user_paths())
        default_map(group, settings)
        problems: list[MoechatError] = list(check_settings(group, settings, {}))
    except MoechatError as error:
        problems = [error]
    for problem in problems:
        print_error(str(problem), problem.hint)
    return UsageError.exit_code if problems else 0


def print_path() -> int:
    """Print the path of the settings file; returns the exit status."""
    write_output(sys.stdout, f"{user_paths().config / FILE}\n")
    return 0


def _pairs(
    keys: SettingKeys, wanted: SettingKey, values: Sequence[str]
) -> list[tuple[SettingKey, list[str]]]:
    """The settings that a command line names, with the texts of their values."""
    if wanted.name:
        return [(wanted, list(values))]
    found: dict[str, list[str]] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(
                f"{wanted} is a table, and {one_line(text)[:40]!r} has no name",
                hint=f"write `moechat config set {wanted} NAME=VALUE`",
            )
        found.setdefault(name, []).append(value)
    return [(keys.parse(f"{wanted}.{name}"), texts) for name, texts in found.items()]


def _typed(keys: SettingKeys, key: SettingKey, texts: Sequence[str]) -> Any:
    """A value in the type that the option has.

    Raises:
        UsageError: It is no value of the option.
    """
    if key.name in OWN_SETTINGS and not key.table and len(texts) == 1:
        if texts[0].lower() not in ("true", "false"):
            raise UsageError(f"{key} is {one_line(texts[0])[:40]!r}; it must be true or false")
        return texts[0].lower() == "true"
    parameters = keys.parameters(key)
    several = bool(parameters) and bool(getattr(parameters[0][1], "multiple", False))
    if len(texts) != 1 and not several:
        raise UsageError(f"{key} takes one value, and {len(texts)} were given", hint="put it in quotes")
    if not parameters:
        return texts[0]
    values = [
        parsed(parameter, list(texts) if several else texts[0], command, str(key))
        for command, parameter in parameters
    ]
    return values[0] if isinstance(values[0], bool | int | float | str) else list(values[0])


def _require_sound(group: LazyGroup, before: Settings, after: Settings, key: SettingKey) -> None:
    """Refuse a change that makes the file worse.

    Raises:
        UsageError: It does.
    """
    for problem in new_problems(group, before, after):
        text = str(problem).removeprefix(f"with the variables and {FILE}, ")
        raise UsageError(f"{key} was not changed: {text}", hint=problem.hint)


def _key_to_remove(group: LazyGroup, key: str, settings: Settings) -> SettingKey:
    """A key that is in the file, also where no option has its name (any more)."""
    parts = key.strip().removeprefix("--").split(".")
    tables: Any = {"presets": settings.presets, "remotes": settings.remotes}
    if parts[0] in OWN_TABLES and len(parts) in (2, 3) and parts[1] in tables[parts[0]]:
        return SettingKey((parts[0], parts[1]), parts[2].replace("_", "-") if len(parts) == 3 else "")
    names = [part.replace("_", "-") for part in parts]
    if len(names) == 1 and names[0] in settings.general:
        return SettingKey((), names[0])
    if names[0] in settings.of and (
        len(names) == 1 or (len(names) == 2 and names[1] in settings.of[names[0]])
    ):
        return SettingKey((names[0],), names[1] if len(names) == 2 else "")
    return SettingKeys(group).parse(key)


def _warn_overridden(key: SettingKey) -> None:
    if os.environ.get(variable_of(key.name)):
        print_notice(f"{variable_of(key.name)} is set, and overrides the file")


def _shown_value(row: Shown) -> Any:
    secret = is_secret_key(row.key.rpartition(".")[2])
    address = isinstance(row.value, str) and "://" in row.value and "@" in row.value
    return _HIDDEN if secret or address else row.value


def _cell(row: Shown) -> str:
    value = _shown_value(row)
    if value is None:
        return "-"
    text = one_line(toml_of(value))
    width = shutil.get_terminal_size().columns // 2
    return text if len(text) <= width or not sys.stdout.isatty() else f"{text[: width - 1]}…"


def _write_json(value: Any) -> None:
    plain = sys.stdout.isatty() or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    write_output(sys.stdout, jsonlib.dumps(value, indent=1, ensure_ascii=plain) + "\n")
