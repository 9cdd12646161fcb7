"""The library: the finished block stores on this machine, and when each was last used.

Reads manifests only, without numpy, so that listing models is fast.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.config import Paths
from moechat.errors import ModelNotFoundError, MoechatError, UsageError
from moechat.geometry import DEFAULT_BITS, KEEP, encodings_title
from moechat.hub.local_models import local_model
from moechat.hub.model_ref import (
    DEMO,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    at_revision,
    expand_alias,
    holds_manifest,
    hub_model,
    is_explicit_path,
    repository_of,
)
from moechat.hub.sources import sources_of

KEEP_MARK = ".kept"  # file in a downloaded checkpoint that must not be removed (``--keep-source``)
_MAX_FILE_BYTES = (1 << 63) - 1


@dataclass(frozen=True)
class LibraryEntry:
    """One finished store.

    Attributes:
        name: ``org/name[@revision]``, or the name of the converted directory, which need not be unique: see
            :func:`display_names`.
        path: The store; may be a symbolic link.
        source: Origin of the weights: a repository or a directory's name.
        commit: Commit of the repository; ``None`` for a directory.
        model_type: The family, as transformers calls it.
        bits: Bits per expert weight; :data:`moechat.geometry.KEEP`: the encodings of the source.
        form: The same for people: ``4 bits``, or ``Q4_K and Q6_K``.
        nbytes: Size on disk in bytes.
        used: Last time it was opened, in seconds since 1970; ``None`` if never since it was made.
        damaged: The manifest cannot be read; all fields but name and path are then empty or zero.
        reason: The file system's error for a damaged entry, if there was one.
    """

    name: str
    path: Path
    source: str
    commit: str | None
    model_type: str
    bits: int
    form: str
    nbytes: int
    used: float | None
    damaged: bool = False
    reason: str | None = None

    @property
    def title(self) -> str:
        """``org/name@revision``: the requested revision, else the abbreviated commit."""
        if self.commit and "@" not in self.name:
            return at_revision(self.name, self.commit[:12])
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names that refer to it."""
        return self.name, self.path.name, self.title, at_revision(self.name, str(self.commit))


def list_stores(paths: Paths) -> list[LibraryEntry]:
    """The finished stores, last used first; unreadable ones are marked as damaged."""
    entries = []
    for path in _visible(paths.models):
        try:
            if holds_manifest(path):
                entries.append(read_entry(path, paths))
        except OSError as error:
            entries.append(_damaged(path, paths, error))
    return sorted(entries, key=lambda entry: (-(entry.used or 0.0), entry.name, entry.bits))


def names_here(paths: Paths) -> list[str]:
    """Names of the models on this machine: the demo, then those in the library, last used first."""
    entries = list_stores(paths)
    named = zip(entries, display_names(entries), strict=True)
    return list(dict.fromkeys([DEMO, *(name for entry, name in named if not entry.damaged)]))


def display_names(entries: list[LibraryEntry]) -> list[str]:
    """A unique name per store and bits, which :func:`moechat.hub.names.resolve` finds.

    Its title, or its directory's name where titles are equal, or where the title is that of the demo.
    """
    count = Counter((entry.title, entry.bits) for entry in entries)
    return [
        entry.title
        if count[entry.title, entry.bits] == 1 and entry.title.lower() != DEMO
        else entry.path.name
        for entry in entries
    ]


def read_entry(store: Path, paths: Paths) -> LibraryEntry:
    """The entry of one store; ``damaged`` if its manifest cannot be read."""
    try:
        with open(store / MANIFEST, "rb") as file:
            content = json.loads(file.read(MAX_MANIFEST_BYTES))
        source = content["source"]
        bits, form = _form(content["geometry"])
        return LibraryEntry(
            name=_text(source["name"]),
            path=store,
            source=_text(source["name"]),
            commit=None if source["revision"] is None else _text(source["revision"]),
            model_type=_text(content["model_type"]),
            bits=bits,
            form=form,
            nbytes=_count(sum(_count(record["bytes"]) for record in content["files"].values())),
            used=_last_use(store, paths),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _damaged(store, paths, error)


def _damaged(store: Path, paths: Paths, error: Exception) -> LibraryEntry:
    reason = error.strerror if isinstance(error, OSError) else None
    return LibraryEntry(
        store.name, store, "", None, "", 0, "?", 0, _last_use(store, paths), damaged=True, reason=reason
    )


def _form(geometry: dict[str, Any]) -> tuple[int, str]:
    if "kept" in geometry:
        return KEEP, encodings_title((_text(gate_up), _text(down)) for gate_up, down in geometry["kept"])
    bits = _count(geometry["bits"], 1, 16)
    return bits, f"{bits} bits"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a non-empty string")
    return value


def _count(value: object, least: int = 0, most: int = _MAX_FILE_BYTES) -> int:
    # Stricter than int(): JSON allows 1e400, and Python counts true as an int.
    if type(value) is not int or not least <= value <= most:
        raise ValueError("not a count")
    return value


def find_stores(model: str, bits: int | None, paths: Paths) -> list[LibraryEntry]:
    """The stores in the library that a name refers to.

    Args:
        model: An alias, ``org/name[@revision]``, the path of a converted checkpoint, the path of a store, the
            name of a store's directory, or a name from :func:`display_names`.
        bits: Bits per weight; ``None`` for any.
        paths: The user's directories.

    Raises:
        ModelNotFoundError: There is none.
        UsageError: The name matches different models.
    """
    entries = list_stores(paths)
    matching = _by_path(model, entries)
    if not matching:
        matching = (
            _by_own_name(model, entries) or _by_hub_name(model, entries) or _by_other_source(model, entries)
        )
    if len({entry.path.name.rpartition("-")[0] for entry in matching}) > 1:
        raise _ambiguous("models", model, matching)
    chosen = [entry for entry in matching if bits is None or entry.bits == bits or entry.damaged]
    if not chosen:
        with_bits = f" with {bits} bits" if bits is not None and matching else ""
        raise ModelNotFoundError(
            f"{model}{with_bits} is not in the library", hint="`moechat list` shows what is there"
        )
    return chosen


def find_store_to_run(
    model: str, bits: int | None, paths: Paths, *, own_name: bool = False
) -> LibraryEntry | None:
    """The store in the library to run for a name that is no path.

    A directory's name selects that store. Of several stores with one name the requested bits decide; without
    bits, or if no store has them, 4 bits.

    Args:
        model: A name from :func:`display_names`, or that of a store's directory.
        bits: Preferred bits per weight.
        paths: The user's directories.
        own_name: Only stores that the library shows by this name, not those that an alias refers to.

    Returns:
        The store, perhaps with other bits; ``None`` if no name matches.

    Raises:
        UsageError: The name matches several stores, and bits do not decide.
    """
    entries = list_stores(paths)
    matching = _by_own_name(model, entries) or ([] if own_name else _by_hub_name(model, entries))
    chosen = [entry for entry in matching if entry.bits == bits] or matching
    if len(chosen) > 1:
        preferred = [entry for entry in chosen if entry.bits == DEFAULT_BITS]
        chosen = preferred if len(preferred) == 1 else chosen
    if len(chosen) > 1:
        raise _ambiguous("stores", model, chosen)
    return chosen[0] if chosen else None


def record_use(store: Path, paths: Paths) -> None:
    """Record that a store was opened now; errors are ignored."""
    stamp = _use_path(store, paths)
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def forget_use(store: Path, paths: Paths) -> None:
    """Remove the record of use of a deleted store."""
    with suppress(OSError):
        _use_path(store, paths).unlink(missing_ok=True)


def _by_path(model: str, entries: list[LibraryEntry]) -> list[LibraryEntry]:
    named = model.lower() == DEMO or expand_alias(model) is not None
    if not is_explicit_path(model) and (named or not os.path.isdir(model)):
        return []
    try:
        ref = local_model(model)
    except MoechatError:
        return []
    if ref.store is not None:
        return [entry for entry in entries if entry.path.resolve() == ref.store]
    return [entry for entry in entries if entry.path.name.rpartition("-")[0] == ref.slug]


def _by_own_name(model: str, entries: list[LibraryEntry]) -> list[LibraryEntry]:
    """The stores with this name, exact matches before those that differ in case."""
    return (
        [entry for entry in entries if entry.path.name == model]
        or [entry for entry in entries if model in entry.names]
        or [entry for entry in entries if model.lower() in map(str.lower, entry.names)]
    )


def _by_hub_name(model: str, entries: list[LibraryEntry]) -> list[LibraryEntry]:
    """The stores of the repository that an alias or another spelling refers to."""
    try:
        name = hub_model(model).name.lower()
    except MoechatError:
        return []
    return [entry for entry in entries if name in map(str.lower, entry.names)]


def _by_other_source(model: str, entries: list[LibraryEntry]) -> list[LibraryEntry]:
    try:
        sources = {repository.lower() for repository in sources_of(model)}
    except MoechatError:  # not a name at all
        return []
    return [entry for entry in entries if sources & {repository_of(name).lower() for name in entry.names}]


def _ambiguous(kind: str, model: str, entries: list[LibraryEntry]) -> UsageError:
    matches = ", ".join(entry.path.name for entry in entries)
    return UsageError(f"{model} matches several {kind}: {matches}", hint="use one of these names")


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
