"""What lies beside the finished stores: what interrupted work left, and checkpoints that were to be kept."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moechat.config import Paths
from moechat.errors import MoechatError
from moechat.hub.library import KEPT, LibraryEntry
from moechat.hub.names import ModelRef, at_revision, hub_model, repository_of, variant_of

_SUFFIXES = (".partial", ".removed")
_VARIANTS = ".variants"  # in a directory of shards: which variants it was asked for as, one a line
_MOST_VARIANTS = 1 << 16  # bytes of that file
_COMMIT = re.compile(r"[0-9a-f]{7,40}", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Leftover:
    """What an interrupted download, conversion or removal left; or what one that is running works on.

    Attributes:
        path: A directory.
        nbytes: Its size on disk.
    """

    path: Path
    nbytes: int

    @property
    def lock(self) -> Path:
        """The lock file that whoever works on it holds."""
        name = self.path.name
        if name.startswith("."):  # .NAME.partial belongs to NAME
            name = name[1:].rpartition(".")[0]
        return self.path.parent / f".{name}.lock"


@dataclass(frozen=True)
class KeptSource:
    """A downloaded checkpoint that was to be kept (``--keep-source``).

    Attributes:
        repository: ``org/name``.
        commit: The beginning of the commit that it is of.
        variant: The GGUF model of the repository that it was first asked for as; empty without one.
        path: Its directory.
        nbytes: Its size on disk.
    """

    repository: str
    commit: str
    variant: str
    path: Path
    nbytes: int

    @property
    def title(self) -> str:
        """``org/name@commit``, or ``org/name@commit:VARIANT``: what ``moechat rm --sources`` takes."""
        name = f"{self.repository}:{self.variant}" if self.variant else self.repository
        return at_revision(name, self.commit)


def list_leftovers(paths: Paths) -> list[Leftover]:
    """Directories that belong to no finished store; a checkpoint that was to be kept is none."""
    found = [
        directory
        for directory in _own_directories(paths.models)
        if directory.name.startswith(".") and directory.name.endswith(_SUFFIXES)
    ]
    found += [directory for directory in _own_directories(paths.sources) if not is_kept_source(directory)]
    return [Leftover(directory, disk_usage(directory)) for directory in found]


def find_leftovers(model: str, paths: Paths) -> list[Leftover]:
    """What interrupted downloads and conversions of a hub model left, in whatever bits.

    With a revision, only what belongs to it: shards are kept by commit, so none of them for a branch. Only
    of the GGUF model that is named, and of none without one, as with stores.
    """
    try:
        ref = hub_model(model)
    except MoechatError:
        return []
    # In full: the names of other models may begin like this one.
    store = re.compile(rf"\.{re.escape(ref.slug)}-\d+bit\.(partial|removed)", re.IGNORECASE)
    return [
        item
        for item in list_leftovers(paths)
        if store.fullmatch(item.path.name)
        or (item.path.parent == paths.sources and _is_source(item.path, ref))
    ]


def is_kept_source(directory: Path) -> bool:
    """Whether a downloaded checkpoint was to be kept (``--keep-source``).

    Where nobody can tell it was: what may not be looked into is not deleted unasked.
    """
    try:
        return (directory / KEPT).exists()
    except OSError:
        return True


def list_sources(paths: Paths) -> list[KeptSource]:
    """The checkpoints that were to be kept."""
    found = []
    for directory in _own_directories(paths.sources):
        repository, commit = _origin(directory)
        if commit and is_kept_source(directory):
            first = (_variants(directory) or ("",))[0]
            found.append(KeptSource(repository, commit, first, directory, disk_usage(directory)))
    return found


def find_sources(model: str, entries: list[LibraryEntry], paths: Paths) -> list[KeptSource]:
    """The kept checkpoints of a model.

    Args:
        model: As for :func:`moechat.hub.library.find_stores`.
        entries: Its stores; their checkpoints count whatever the name says.
        paths: The user's directories.
    """
    try:
        ref = hub_model(model)
    except MoechatError:
        ref = None
    stores = [
        (repository_of(entry.source).lower(), variant_of(entry.source), entry.commit)
        for entry in entries
        if entry.commit
    ]
    return [
        source
        for source in list_sources(paths)
        if any(
            source.repository.lower() == repository
            and commit.startswith(source.commit)
            and _is_for(source.path, variant)
            for repository, variant, commit in stores
        )
        or (ref is not None and _is_source(source.path, ref))
    ]


def note_variant(directory: Path, variant: str | None) -> None:
    """Remember what a directory of shards is used for, so that removing something else leaves it there.

    Args:
        directory: The shards; more than one name may stand for the same ones.
        variant: The GGUF model of the repository, as asked for.

    Raises:
        OSError: It cannot be written.
    """
    names = _variants(directory) or ()
    if (variant or "") not in names:
        (directory / _VARIANTS).write_text("".join(f"{name}\n" for name in (*names, variant or "")), "ascii")


def _variants(directory: Path) -> tuple[str, ...] | None:
    """What a directory of shards was asked for as; ``None``: an earlier version made it and noted nothing."""
    if "+" not in directory.name:  # not of a GGUF model
        return ("",)
    try:
        with open(directory / _VARIANTS, encoding="ascii") as file:
            return tuple(file.read(_MOST_VARIANTS).splitlines()) or None
    except (OSError, UnicodeDecodeError):
        return None


def _is_for(directory: Path, variant: str | None) -> bool:
    variants = _variants(directory)
    return variants is None or (variant or "").lower() in map(str.lower, variants)


def _origin(directory: Path) -> tuple[str, str]:
    """Repository, and the beginning of its commit, from the name of a directory of shards.

    That is ``org--name@commit``, and ``+`` with what tells its GGUF models apart; the commit is empty where
    the name is of another form.
    """
    name, _, rest = directory.name.rpartition("@")
    return name.replace("--", "/", 1), rest.partition("+")[0] if name else ""


def _is_source(directory: Path, ref: ModelRef) -> bool:
    """Whether a directory holds shards of a model, at a commit if one is given."""
    name, commit = _origin(directory)
    if not commit or name.lower() != str(ref.repository).lower() or not _is_for(directory, ref.variant):
        return False
    if ref.revision is None:
        return True
    wanted, commit = ref.revision.lower(), commit.lower()
    return _COMMIT.fullmatch(wanted) is not None and (wanted.startswith(commit) or commit.startswith(wanted))


def _own_directories(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if _is_own_directory(path))
    except OSError:
        return []


def _is_own_directory(path: Path) -> bool:
    # What a link points to is not ours to count or to delete; nor is what cannot be looked at.
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def disk_usage(directory: Path) -> int:
    """Bytes of the disk that the files below a directory take; those that go meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
