"""What the shell completes: models, systems and reference machines. Imports nothing slow."""

from __future__ import annotations

import os
from pathlib import Path

from moechat.configurator.systems import SYSTEMS
from moechat.hub.names import ALIASES, DEMO


def complete_models(incomplete: str) -> list[str]:
    """Names that ``run`` takes: the demo, the library, aliases; directories where a path is begun."""
    if incomplete.startswith((".", "/", "~")):
        return _directories(incomplete)
    return _beginning_with(incomplete, [DEMO, *complete_library(incomplete), *sorted(ALIASES)])


def complete_aliases(incomplete: str) -> list[str]:
    """Names of known models on the hub."""
    return _beginning_with(incomplete, sorted(ALIASES))


def complete_library(incomplete: str) -> list[str]:
    """Names of the models on this machine, those used last first."""
    from moechat.config import user_paths
    from moechat.hub.library import list_stores

    try:
        return _beginning_with(incomplete, [entry.title for entry in list_stores(user_paths())])
    except Exception:  # a completion has nobody to tell
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
