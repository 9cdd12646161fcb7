"""Completion candidates for the shell: models, systems, values of options. Imports are deferred to the calls.

The shell completes file names itself, because it can quote them. bash inserts the candidates of this module
unquoted, so a candidate is always one plain word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from moechat.configurator.systems import SYSTEMS

if TYPE_CHECKING:
    from moechat.hub.library import LibraryEntry

# Names come from manifests, which are untrusted: `$(…)` in one must not reach a command line.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./@:+=,%][A-Za-z0-9_./@:+=,%-]*", re.ASCII)
_PATH = (".", "/", "~")


def complete_models(incomplete: str) -> list[str]:
    """Names for ``run``: models in the library, and aliases; none if the word begins like a path."""
    if incomplete.startswith(_PATH):
        return []
    from moechat.hub.model_ref import ALIASES, DEMO

    here = _of_library(lambda entry: not entry.damaged)
    presets, remotes = _own_names()
    servers = [f"@{name}" for name in remotes] if incomplete.startswith("@") else []
    return _beginning_with(incomplete, [*presets, DEMO, *here, *sorted(ALIASES), *servers])


def complete_plannable(incomplete: str) -> list[str]:
    """Names for ``plan``: those of :func:`complete_models`, and known shapes, which need no weights."""
    if incomplete.startswith(_PATH):
        return []
    return list(dict.fromkeys([*complete_models(incomplete), *complete_shapes(incomplete)]))


def complete_aliases(incomplete: str) -> list[str]:
    """Names of known models on the hub."""
    from moechat.hub.model_ref import ALIASES

    return _beginning_with(incomplete, sorted(ALIASES))


def complete_library(incomplete: str) -> list[str]:
    """Names of the models in the library, including damaged ones, most recently used first."""
    return [] if incomplete.startswith(_PATH) else _beginning_with(incomplete, _of_library(lambda _: True))


def complete_systems(incomplete: str) -> list[str]:
    """Names for ``--system``."""
    return _beginning_with(incomplete, list(SYSTEMS))


def complete_system_list(incomplete: str) -> list[str]:
    """Values of ``--systems``, a list with commas; completes its last name."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in complete_systems(last)]


def complete_machines(incomplete: str) -> list[str]:
    """Names of the reference machines."""
    from moechat.hardware.profile_file import reference_names

    return _beginning_with(incomplete, reference_names())


def complete_shapes(incomplete: str) -> list[str]:
    """Names of the shapes that ship with the package, in either case."""
    from moechat.hub.known_shapes import shape_names

    return _beginning_with(incomplete.lower(), shape_names())


def complete_bits(incomplete: str) -> list[str]:
    """Values of ``--bits``."""
    from moechat.options import BITS

    return _beginning_with(incomplete, map(str, BITS))


def complete_dense_bits(incomplete: str) -> list[str]:
    """Values of ``--dense-bits``."""
    from moechat.geometry import AUTO_BITS, DENSE_BITS

    return _beginning_with(incomplete, map(str, (AUTO_BITS, *DENSE_BITS)))


def complete_activation_bits(incomplete: str) -> list[str]:
    """Values of ``--activation-bits``."""
    from moechat.options import ACTIVATION_BITS

    return _beginning_with(incomplete, map(str, ACTIVATION_BITS))


def complete_kv_bits(incomplete: str) -> list[str]:
    """Values of ``--kv-bits``."""
    from moechat.options import KV_BITS

    return _beginning_with(incomplete, map(str, KV_BITS))


def complete_dtypes(incomplete: str) -> list[str]:
    """Values of ``--dtype``."""
    from moechat.options import DTYPES

    return _beginning_with(incomplete, DTYPES)


def complete_devices(incomplete: str) -> list[str]:
    """Common values of ``--device``; machines with several GPUs also have ``cuda:1`` and so on."""
    return _beginning_with(incomplete, ["cpu", "cuda"])


def complete_tiers(incomplete: str) -> list[str]:
    """Values of ``--near``."""
    return _beginning_with(incomplete, ["gpu", "ram"])


def complete_topics(incomplete: str) -> list[str]:
    """Topics of ``moechat help``."""
    from moechat.manual import topics

    return _beginning_with(incomplete, [topic.name for topic in topics()])


def complete_remotes(incomplete: str) -> list[str]:
    """Names of the user's servers."""
    return _beginning_with(incomplete, _own_names()[1])


def complete_settings(incomplete: str) -> list[str]:
    """Keys for ``moechat config``: the settings of loading and answers, and the user's own names."""
    from dataclasses import fields

    from moechat.chat.chat_options import NAMES
    from moechat.options import LoadOptions

    load = [entry.name.replace("_", "-") for entry in fields(LoadOptions)]
    answers = [name.replace("_", "-") for name in NAMES]
    presets, remotes = _own_names()
    keys = [*load, *answers, *(f"run.{name}" for name in (*load, *answers))]
    for name in presets:
        keys += [
            f"presets.{name}",
            *(f"presets.{name}.{key}" for key in ("model", "system", *answers, *load)),
        ]
    for name in remotes:
        keys += [
            f"remotes.{name}",
            *(f"remotes.{name}.{key}" for key in ("url", "model", "api-key-variable")),
        ]
    return _beginning_with(incomplete, keys)


def complete_formats(incomplete: str) -> list[str]:
    """Values of ``--format`` of an export."""
    return _beginning_with(incomplete, ["md", "json"])


def _of_library(wanted: Callable[[LibraryEntry], bool]) -> list[str]:
    from moechat.config import user_paths
    from moechat.errors import UsageError
    from moechat.hub.library import display_names, list_stores

    try:
        entries = list_stores(user_paths())
    except UsageError:  # MOECHAT_HOME is not a directory; a completion cannot show errors
        return []
    # Instead of a name that needs quotes, offer the name of the store's directory.
    return [
        name if _PLAIN_WORD.fullmatch(name) else entry.path.name
        for entry, name in zip(entries, display_names(entries), strict=True)
        if wanted(entry)
    ]


def _own_names() -> tuple[list[str], list[str]]:
    """Names of the user's presets and servers; none where the settings cannot be read."""
    from moechat.cli.config.settings_file import read_settings
    from moechat.config import user_paths
    from moechat.errors import UsageError

    try:
        settings = read_settings(user_paths())
    except UsageError:  # a completion cannot show errors
        return [], []
    return sorted(settings.presets), sorted(settings.remotes)


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [
        name
        for name in dict.fromkeys(names)
        if name.startswith(incomplete) and _PLAIN_WORD.fullmatch(name) is not None
    ]
