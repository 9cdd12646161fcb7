"""The user's own names in the settings file: presets of a model with settings, and servers.

``[presets.NAME]`` holds a model, a system prompt and options of ``run``; ``[remotes.NAME]`` the URL of a
server, and optionally a model there. Both are checked when they are used, set, or looked at by ``moechat
doctor``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.cli.config.own_tables import (
    DEFAULT_MODEL,
    REMOTE_MARK,
    Preset,
    Remote,
    parse_preset,
    parse_remote,
)
from moechat.cli.config.settings_file import FILE, Settings
from moechat.config import Paths
from moechat.errors import UsageError
from moechat.hub.library import find_store_to_run
from moechat.hub.model_ref import DEMO, expand_alias


@dataclass(frozen=True)
class OwnNames:
    """The names of the settings file, and the values of a command without them.

    Attributes:
        settings: The settings file.
        run: The command ``run``, whose options presets hold; ``None`` where there are no presets.
        plain: Values of the command's parameters before a preset is applied.
        origins: The sources of those that were not typed.
        fixed: Parameters that were typed or set by variables, which override presets.
    """

    settings: Settings = field(default_factory=lambda: Settings(Path(FILE)))
    run: Any = None
    plain: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()

    def preset(self, name: str) -> Preset | None:
        """The preset of a name; ``None`` if there is none.

        Raises:
            UsageError: It is malformed.
        """
        values = self.settings.presets.get(name)
        return None if values is None else parse_preset(name, values, self.run, self.settings.path)

    def remote(self, name: str) -> Remote | None:
        """The server of a name; ``None`` if it is the URL of one.

        Raises:
            UsageError: There is no server of this name, or it is malformed.
        """
        values = self.settings.remotes.get(name)
        if values is not None:
            return parse_remote(name, values, self.settings.path)
        if any(mark in name for mark in ".:/") or name == "localhost":
            return None
        near = difflib.get_close_matches(name, sorted(self.settings.remotes), n=1)
        suggestion = f"do you mean {near[0]}? " if near else ""
        raise UsageError(
            f"there is no remote {name}",
            hint=f"{suggestion}`moechat config set remotes.{name}.url URL` adds one; a host of this name is "
            f"http://{name}",
        )

    def applied(
        self, name: str, values: Mapping[str, Any], has: set[str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The parameters of a command for a model that may be a preset, or a server behind ``@``.

        Args:
            name: As the user gave it.
            values: Parameters of the command before.
            has: Parameters that the command's presets may set.

        Returns:
            The changed parameters, and the sources of those that came from a preset.

        Raises:
            UsageError: The preset is malformed.
        """
        if name.startswith(REMOTE_MARK) and "remote" in has:
            remote, _, model = name[len(REMOTE_MARK) :].partition(" ")
            return {"model": model.strip() or DEFAULT_MODEL, "remote": remote}, {}
        preset = self.preset(name)
        if preset is None:
            return {"model": name}, {}
        taken = {
            parameter: value
            for parameter, value in preset.values.items()
            if parameter in has and parameter not in self.fixed
        }
        if values.get("device") == "cpu" and "device" in self.fixed:
            taken.pop("vram", None)
        return {"model": preset.model, **taken}, dict.fromkeys(taken, f"from the preset {name}")


def shadowed_model(name: str, paths: Paths) -> str | None:
    """The model that a preset of this name would hide; ``None`` if there is none.

    Args:
        name: Of the preset.
        paths: The user's directories.
    """
    if name.lower() == DEMO:
        return DEMO
    known = expand_alias(name)
    if known is not None:
        return known
    try:
        entry = find_store_to_run(name, None, paths, own_name=True)
    except UsageError:  # several stores have it
        return name
    return None if entry is None else entry.title
