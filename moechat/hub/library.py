"""The library on this machine: which stores are finished, and when a store was used.

Only manifests are read, and without numpy, so that a list of models comes at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moechat.config import Paths
from moechat.errors import ModelNotFoundError, MoechatError, UsageError
from moechat.hub.names import (
    DEMO,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    at_revision,
    holds_manifest,
    hub_model,
    resolve_apart,
)

KEPT = ".kept"  # in a downloaded checkpoint: it was asked to stay, so no later run removes it
_DEFAULT_BITS = 4
_MOST_BYTES = (1 << 63) - 1  # of a file


@dataclass(frozen=True)
class LibraryEntry:
    """One finished store.

    Attributes:
        name: What ``moechat run`` takes: ``org/name[@revision]``; for a converted directory its name, which
            others may share: :func:`told_apart`.
        path: The store; may be a link to one elsewhere.
        source: Where the weights came from: a repository or a directory's name.
        commit: Of the repository; ``None`` for a directory.
        model_type: The family, as transformers calls it.
        bits: Of an expert weight.
        nbytes: Size on disk.
        used: When it was last opened, in seconds since 1970; ``None`` if never since it was made.
        damaged: Its manifest cannot be read; all but name and path are then unknown or zero.
        reason: Why not, where the file system says so.
    """

    name: str
    path: Path
    source: str
    commit: str | None
    model_type: str
    bits: int
    nbytes: int
    used: float | None
    damaged: bool = False
    reason: str | None = None

    @property
    def title(self) -> str:
        """``org/name@revision``: the revision asked for, else the commit in short."""
        if self.commit and "@" not in self.name:
            return at_revision(self.name, self.commit[:12])
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that names it."""
        return self.name, self.path.name, self.title, at_revision(self.name, str(self.commit))


def list_stores(paths: Paths) -> list[LibraryEntry]:
    """The finished stores, those used last first; what cannot be looked into is one that is damaged."""
    entries = []
    for path in _visible(paths.models):
        try:
            if holds_manifest(path):
                entries.append(read_entry(path, paths))
        except OSError as error:  # of this one alone: the others are there all the same
            entries.append(_damaged(path, paths, error))
    return sorted(entries, key=lambda entry: (-(entry.used or 0.0), entry.name, entry.bits))


def names_here(paths: Paths) -> list[str]:
    """Names of the models that are here: the demo, then those of the library, the ones used last first."""
    entries = list_stores(paths)
    named = zip(entries, told_apart(entries), strict=True)
    return list(dict.fromkeys([DEMO, *(name for entry, name in named if not entry.damaged)]))


def told_apart(entries: list[LibraryEntry]) -> list[str]:
    """What a list calls these stores.

    That is the title of each, or the name of its directory where another one has the same title and bits.
    """
    count = Counter((entry.title, entry.bits) for entry in entries)
    return [entry.title if count[entry.title, entry.bits] == 1 else entry.path.name for entry in entries]


def read_entry(store: Path, paths: Paths) -> LibraryEntry:
    """What the manifest of a store says; one that cannot be read is ``damaged``."""
    try:
        with open(store / MANIFEST, "rb") as file:
            content = json.loads(file.read(MAX_MANIFEST_BYTES))
        source = content["source"]
        return LibraryEntry(
            name=_text(source["name"]),
            path=store,
            source=_text(source["name"]),
            commit=None if source["revision"] is None else _text(source["revision"]),
            model_type=_text(content["model_type"]),
            bits=_count(content["geometry"]["bits"], 1, 16),
            nbytes=_count(sum(_count(record["bytes"]) for record in content["files"].values())),
            used=_last_use(store, paths),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _damaged(store, paths, error)


def _damaged(store: Path, paths: Paths, error: Exception) -> LibraryEntry:
    reason = error.strerror if isinstance(error, OSError) else None
    return LibraryEntry(
        store.name, store, "", None, "", 0, 0, _last_use(store, paths), damaged=True, reason=reason
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return value


def _count(value: object, least: int = 0, most: int = _MOST_BYTES) -> int:
    # Not what int() makes of it: 1e400 is a number for JSON, and true is one for Python.
    if type(value) is not int or not least <= value <= most:
        raise ValueError("not a count")
    return value


def find_stores(model: str, bits: int | None, paths: Paths) -> list[LibraryEntry]:
    """The stores in the library that a name means.

    Args:
        model: An alias, ``org/name[@revision]``, a checkpoint directory that was converted, a store's
            directory, its name, or a name that :func:`list_stores` shows.
        bits: Only the one with these bits.
        paths: The user's directories.

    Raises:
        ModelNotFoundError: There is none.
        UsageError: The name stands for different models.
    """
    entries = list_stores(paths)
    matching = _by_path(model, entries, paths)
    if not matching:
        matching = _by_name(model, entries)
    if len({entry.path.name.rpartition("-")[0] for entry in matching}) > 1:
        raise _several("models", model, matching)
    chosen = [entry for entry in matching if bits is None or entry.bits == bits or entry.damaged]
    if not chosen:
        wanted = f" with {bits} bits" if bits is not None and matching else ""
        raise ModelNotFoundError(
            f"{model}{wanted} is not in the library", hint="`moechat list` shows what is there"
        )
    return chosen


def find_store_to_run(model: str, bits: int | None, paths: Paths) -> LibraryEntry | None:
    """The one store in the library that a name, which is no path, means to somebody who wants to run it.

    The name of a store's directory means that store. Of several stores of one name the bits choose, without
    them 4 bits; with bits that none of them has, the stores are those of a name without bits.

    Args:
        model: A name that :func:`list_stores` shows, or that of a store's directory.
        bits: Bits a weight that are wanted.
        paths: The user's directories.

    Returns:
        The store, perhaps one of other bits; ``None`` if the name means none.

    Raises:
        UsageError: The name stands for several, and nothing chooses between them.
    """
    entries = list_stores(paths)
    # What is written as it is shown stands before what differs in capitals.
    matching = (
        [entry for entry in entries if entry.path.name == model]
        or [entry for entry in entries if model in entry.names]
        or _by_name(model, entries)
    )
    chosen = [entry for entry in matching if entry.bits == bits] or matching
    if len(chosen) > 1:
        preferred = [entry for entry in chosen if entry.bits == _DEFAULT_BITS]
        chosen = preferred if len(preferred) == 1 else chosen
    if len(chosen) > 1:
        raise _several("stores", model, chosen)
    return chosen[0] if chosen else None


def note_use(store: Path, paths: Paths) -> None:
    """Remember that a store was opened just now; where nothing can be written nothing happens."""
    stamp = _use_path(store, paths)
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def forget_use(store: Path, paths: Paths) -> None:
    """The store is gone."""
    with suppress(OSError):
        _use_path(store, paths).unlink(missing_ok=True)


def _by_path(model: str, entries: list[LibraryEntry], paths: Paths) -> list[LibraryEntry]:
    if not (model.startswith((".", "/", "~")) or os.path.isdir(model)):
        return []
    try:
        ref = resolve_apart(model, paths=paths)
    except MoechatError:
        return []
    if ref.store is not None:
        return [entry for entry in entries if entry.path.resolve() == ref.store]
    return [entry for entry in entries if entry.path.name.rpartition("-")[0] == ref.slug]


def _by_name(model: str, entries: list[LibraryEntry]) -> list[LibraryEntry]:
    named = {_spelt_out(model).lower(), model.lower()}
    return [entry for entry in entries if not named.isdisjoint(map(str.lower, entry.names))]


def _several(what: str, model: str, entries: list[LibraryEntry]) -> UsageError:
    shown = ", ".join(entry.path.name for entry in entries)
    return UsageError(f"{model} stands for several {what}: {shown}", hint="say one of these names")


def _spelt_out(model: str) -> str:
    try:
        return hub_model(model).name
    except MoechatError:
        return model


def _visible(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _use_path(store: Path, paths: Paths) -> Path:
    name = hashlib.sha256(os.fsencode(store.resolve())).hexdigest()[:32]
    return paths.state / "used" / name


def _last_use(store: Path, paths: Paths) -> float | None:
    try:
        return _use_path(store, paths).stat().st_mtime
    except OSError:
        return None
