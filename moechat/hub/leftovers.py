"""Directories beside the finished stores: leftovers of interrupted work, and kept checkpoints."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moechat.config import Paths
from moechat.errors import MoechatError
from moechat.hub.library import KEEP_MARK, LibraryEntry
from moechat.hub.model_ref import ModelRef, at_revision, hub_model, repository_of, variant_of

_SUFFIXES = (".partial", ".removed")
_VARIANTS_FILE = ".variants"  # in a directory of shards: the variants it was downloaded for, one per line
_MAX_VARIANTS_BYTES = 1 << 16
_COMMIT = re.compile(r"[0-9a-f]{7,40}", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Leftover:
    """The directory of an unfinished download, conversion or removal, interrupted or still running.

    Attributes:
        path: The directory.
        nbytes: Its size on disk in bytes.
    """

    path: Path
    nbytes: int

    @property
    def lock(self) -> Path:
        """The lock file that a running process holds."""
        name = self.path.name
        if name.startswith("."):  # .NAME.partial belongs to NAME
            name = name[1:].rpartition(".")[0]
        return self.path.parent / f".{name}.lock"


@dataclass(frozen=True)
class KeptSource:
    """A downloaded checkpoint that is kept (``--keep-source``).

    Attributes:
        repository: ``org/name``.
        commit: Its abbreviated commit.
        variant: The GGUF variant of the first download; empty for safetensors.
        path: Its directory.
        nbytes: Its size on disk in bytes.
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
    """Directories that belong to no finished store, without kept checkpoints."""
    found = [
        directory
        for directory in _own_directories(paths.models)
        if directory.name.startswith(".") and directory.name.endswith(_SUFFIXES)
    ]
    found += [directory for directory in _own_directories(paths.sources) if not is_kept_source(directory)]
    return [Leftover(directory, disk_usage(directory)) for directory in found]


def find_leftovers(model: str, paths: Paths) -> list[Leftover]:
    """Leftovers of a hub model, of all bits.

    A name with a revision matches that revision only; shards are stored by commit, so a branch matches none.
    A name with a GGUF variant matches that variant only, one without matches no GGUF variant.
    """
    try:
        ref = hub_model(model)
    except MoechatError:
        return []
    # A full match: the names of other models may begin with this one.
    store = re.compile(rf"\.{re.escape(ref.slug)}-(\d+bit|kept)\.(partial|removed)", re.IGNORECASE)
    return [
        item
        for item in list_leftovers(paths)
        if store.fullmatch(item.path.name)
        or (item.path.parent == paths.sources and _is_source(item.path, ref))
    ]


def is_kept_source(directory: Path) -> bool:
    """Whether a downloaded checkpoint is kept (``--keep-source``).

    An unreadable directory counts as kept, so that it is never deleted without confirmation.
    """
    try:
        return (directory / KEEP_MARK).exists()
    except OSError:
        return True


def list_sources(paths: Paths) -> list[KeptSource]:
    """All kept checkpoints."""
    found = []
    for directory in _own_directories(paths.sources):
        repository, commit = _origin(directory)
        if commit and is_kept_source(directory):
            variant = (variants_of(directory) or ("",))[0]
            found.append(KeptSource(repository, commit, variant, directory, disk_usage(directory)))
    return found


def find_sources(model: str, entries: list[LibraryEntry], paths: Paths) -> list[KeptSource]:
    """The kept checkpoints of a model.

    Args:
        model: As for :func:`moechat.hub.library.find_stores`.
        entries: Stores whose checkpoints count too.
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
            and _serves(source.path, variant)
            for repository, variant, commit in stores
        )
        or (ref is not None and _is_source(source.path, ref))
    ]


def record_variant(directory: Path, variant: str | None) -> None:
    """Record the variant that a directory of shards serves, so that removing another variant leaves it.

    Args:
        directory: The shards; several variants may share them.
        variant: The requested GGUF variant of the repository.

    Raises:
        OSError: The file cannot be written.
    """
    names = variants_of(directory) or ()
    if (variant or "") not in names:
        content = "".join(f"{name}\n" for name in (*names, variant or ""))
        (directory / _VARIANTS_FILE).write_text(content, "ascii")


def variants_of(directory: Path) -> tuple[str, ...] | None:
    """The variants that a directory of shards serves; ``None`` if an earlier version recorded none."""
    if "+" not in directory.name:  # safetensors
        return ("",)
    try:
        with open(directory / _VARIANTS_FILE, encoding="ascii") as file:
            return tuple(file.read(_MAX_VARIANTS_BYTES).splitlines()) or None
    except (OSError, UnicodeDecodeError):
        return None


def _serves(directory: Path, variant: str | None) -> bool:
    variants = variants_of(directory)
    return variants is None or (variant or "").lower() in map(str.lower, variants)


def _origin(directory: Path) -> tuple[str, str]:
    """Repository and abbreviated commit from the name of a directory of shards, ``org--name@commit[+files]``.

    The commit is empty for names of another form.
    """
    name, _, rest = directory.name.rpartition("@")
    return name.replace("--", "/", 1), rest.partition("+")[0] if name else ""


def _is_source(directory: Path, ref: ModelRef) -> bool:
    """Whether a directory holds shards of a model, at its commit if it has one."""
    name, commit = _origin(directory)
    if not commit or name.lower() != str(ref.repository).lower() or not _serves(directory, ref.variant):
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
    # Targets of links and unreadable paths are neither counted nor deleted.
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def disk_usage(directory: Path) -> int:
    """Disk space of the files below a directory in bytes; files that vanish meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
