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
from moechat.hub.names import hub_model, repository_of

_SUFFIXES = (".partial", ".removed")
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
        path: Its directory.
        nbytes: Its size on disk.
    """

    repository: str
    commit: str
    path: Path
    nbytes: int

    @property
    def title(self) -> str:
        """``org/name@commit``."""
        return f"{self.repository}@{self.commit}"


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

    With a revision, only what belongs to it: shards are kept by commit, so none of them for a branch.
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
        or (item.path.parent == paths.sources and _is_source(item.path, str(ref.repository), ref.revision))
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
            found.append(KeptSource(repository, commit, directory, disk_usage(directory)))
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
    stores = [(repository_of(entry.source).lower(), entry.commit) for entry in entries if entry.commit]
    return [
        source
        for source in list_sources(paths)
        if any(
            source.repository.lower() == repository and str(commit).startswith(source.commit)
            for repository, commit in stores
        )
        or (ref is not None and _is_source(source.path, str(ref.repository), ref.revision))
    ]


def _origin(directory: Path) -> tuple[str, str]:
    """Repository, and the beginning of its commit, from the name of a directory of shards.

    That is ``org--name@commit``, and ``+`` with what tells its GGUF models apart; the commit is empty where
    the name is of another form.
    """
    name, _, rest = directory.name.rpartition("@")
    return name.replace("--", "/", 1), rest.partition("+")[0] if name else ""


def _is_source(directory: Path, repository: str, revision: str | None) -> bool:
    """Whether a directory holds shards of a repository, at a commit if one is given."""
    name, commit = _origin(directory)
    if not commit or name.lower() != repository.lower():
        return False
    if revision is None:
        return True
    wanted, commit = revision.lower(), commit.lower()
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
