"""What the shell completes: models, systems, values of options. Imports nothing before it is asked.

Names of files are left to the shell: it knows how to quote them. What is offered here is never quoted by
bash, so nothing is offered that a shell would read as more than one plain word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from moechat.configurator.systems import SYSTEMS

if TYPE_CHECKING:
    from moechat.hub.library import LibraryEntry

# Names come from manifests, which others may have written: `$(…)` in one must not reach a command line.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./@:+=,%][A-Za-z0-9_./@:+=,%-]*", re.ASCII)
_PATH = (".", "/", "~")


def answering(complete: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """One of the functions below for the grammar, which reads the types of what it is given at every start.

    Of all of them that is a tenth of the time of a short command; a lambda has no types.
    """
    return lambda incomplete: complete(incomplete)


def complete_models(incomplete: str) -> list[str]:
    """Names that ``run`` takes: models here, and aliases; none where a path is begun."""
    if incomplete.startswith(_PATH):
        return []
    from moechat.hub.names import ALIASES, DEMO

    here = _of_library(lambda entry: not entry.damaged)
    return _beginning_with(incomplete, [DEMO, *here, *sorted(ALIASES)])


def complete_plannable(incomplete: str) -> list[str]:
    """The same, and the shapes that ``plan`` knows without weights."""
    if incomplete.startswith(_PATH):
        return []
    return list(dict.fromkeys([*complete_models(incomplete), *complete_shapes(incomplete)]))


def complete_aliases(incomplete: str) -> list[str]:
    """Names of known models on the hub."""
    from moechat.hub.names import ALIASES

    return _beginning_with(incomplete, sorted(ALIASES))


def complete_library(incomplete: str) -> list[str]:
    """Names of the models in the library, damaged ones too, those used last first."""
    return [] if incomplete.startswith(_PATH) else _beginning_with(incomplete, _of_library(lambda _: True))


def complete_systems(incomplete: str) -> list[str]:
    """Names for ``--system``."""
    return _beginning_with(incomplete, list(SYSTEMS))


def complete_system_list(incomplete: str) -> list[str]:
    """Names for ``--systems``: the last of several, after a comma."""
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
    from moechat.cli.options import BITS

    return _beginning_with(incomplete, map(str, BITS))


def complete_dense_bits(incomplete: str) -> list[str]:
    """Values of ``--dense-bits``."""
    from moechat.cli.options import DENSE_BITS

    return _beginning_with(incomplete, map(str, DENSE_BITS))


def complete_activation_bits(incomplete: str) -> list[str]:
    """Values of ``--activation-bits``."""
    from moechat.cli.options import ACTIVATION_BITS

    return _beginning_with(incomplete, map(str, ACTIVATION_BITS))


def complete_dtypes(incomplete: str) -> list[str]:
    """Values of ``--dtype``."""
    from moechat.cli.options import DTYPES

    return _beginning_with(incomplete, DTYPES)


def complete_devices(incomplete: str) -> list[str]:
    """Values of ``--device``; ``cuda:1`` and the like are for who has several cards."""
    return _beginning_with(incomplete, ["cpu", "cuda"])


def complete_tiers(incomplete: str) -> list[str]:
    """Values of ``--near``."""
    return _beginning_with(incomplete, ["gpu", "ram"])


def complete_formats(incomplete: str) -> list[str]:
    """Values of ``--format`` of an export."""
    return _beginning_with(incomplete, ["md", "json"])


def _of_library(wanted: Callable[[LibraryEntry], bool]) -> list[str]:
    from moechat.config import user_paths
    from moechat.errors import UsageError
    from moechat.hub.library import list_stores, told_apart

    try:
        entries = list_stores(user_paths())
    except UsageError:  # MOECHAT_HOME is no directory; a completion has nobody to tell
        return []
    # A name that would have to be quoted is offered as that of its directory, if that need not be.
    return [
        name if _PLAIN_WORD.fullmatch(name) else entry.path.name
        for entry, name in zip(entries, told_apart(entries), strict=True)
        if wanted(entry)
    ]


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [
        name
        for name in dict.fromkeys(names)
        if name.startswith(incomplete) and _PLAIN_WORD.fullmatch(name) is not None
    ]
