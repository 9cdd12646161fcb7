"""What the shell completes: models, systems and reference machines. Imports nothing slow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from moechat.config import Paths, user_paths
from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.hub.library import list_stores, names_here
from moechat.hub.names import ALIASES


def complete_models(incomplete: str) -> list[str]:
    """Names that ``run`` takes: models here, and aliases; directories where a path is begun."""
    if incomplete.startswith((".", "/", "~")):
        return _directories(incomplete)
    return _beginning_with(incomplete, [*_of_library(names_here), *sorted(ALIASES)])


def complete_aliases(incomplete: str) -> list[str]:
    """Names of known models on the hub."""
    return _beginning_with(incomplete, sorted(ALIASES))


def complete_library(incomplete: str) -> list[str]:
    """Names of the models in the library, damaged ones too, those used last first."""
    return _beginning_with(
        incomplete, _of_library(lambda paths: [entry.title for entry in list_stores(paths)])
    )


def _of_library(names: Callable[[Paths], list[str]]) -> list[str]:
    try:
        return names(user_paths())
    except UsageError:  # MOECHAT_HOME is no directory; a completion has nobody to tell
        return []


def complete_systems(incomplete: str) -> list[str]:
    """Names for ``--system``."""
    return _beginning_with(incomplete, list(SYSTEMS))


def complete_machines(incomplete: str) -> list[str]:
    """Names of the reference machines."""
    from moechat.hardware.profile_file import reference_names

    return _beginning_with(incomplete, reference_names())


def _beginning_with(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _directories(incomplete: str) -> list[str]:
    head, _, tail = incomplete.rpartition("/")
    base = f"{head}/" if "/" in incomplete else ""
    try:
        entries = sorted(os.scandir(Path(base or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return []
    return [f"{base}{entry.name}/" for entry in entries if entry.is_dir() and entry.name.startswith(tail)]
