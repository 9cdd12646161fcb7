"""``moechat rm``: deletes models, leftovers and kept checkpoints."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from moechat.cli.commands.library_list import split_running, title_of
from moechat.cli.terminal.consoles import can_ask, confirm, print_notice
from moechat.cli.terminal.load_progress import format_bytes
from moechat.config import Paths, user_paths
from moechat.errors import InUseError, ModelNotFoundError, MoechatError, UsageError
from moechat.hub.leftovers import (
    KeptSource,
    Leftover,
    find_leftovers,
    find_sources,
    is_kept_source,
    list_leftovers,
)
from moechat.hub.library import LibraryEntry, find_stores, forget_use
from moechat.hub.model_ref import DEMO


@dataclass(frozen=True)
class RemoveCommand:
    """Arguments of ``moechat rm``.

    Raises:
        UsageError: There is nothing to remove.
    """

    models: tuple[str, ...]
    bits: int | None = None
    leftovers: bool = False
    sources: bool = False
    yes: bool = False

    def __post_init__(self) -> None:
        if not self.models and (self.sources or not self.leftovers):
            raise UsageError("rm needs the name of a model", hint="`moechat list` shows them")


class _BusyError(InUseError):
    """A running download or conversion uses the directory."""


@dataclass
class _Work:
    """The directories to remove, by path.

    Attributes:
        entries: Stores.
        leftovers: Leftovers of interrupted work.
        sources: Kept checkpoints.
        staying: Kept checkpoints of the same models that are not removed.
        running: Directories in use, which are not removed.
    """

    entries: dict[Path, LibraryEntry]
    leftovers: dict[Path, Leftover]
    sources: dict[Path, KeptSource]
    staying: dict[Path, KeptSource]
    running: list[Leftover]


def remove_models(command: RemoveCommand) -> int:
    """Remove models; returns the exit status.

    ``--leftovers`` skips directories of running downloads with a notice.

    Raises:
        ModelNotFoundError: A model is missing; nothing was removed.
        UsageError: Confirmation is impossible, or the model is the demo.
        InUseError: A store is in use; the models after it stay. Or a running download uses a leftover of a
            named model; everything else was removed.
        StorageError: A store cannot be deleted; the models after it stay.
    """
    paths = user_paths()
    work = _collect(command, paths)
    for item in work.running:
        print_notice(f"skipped, because a running download or conversion uses it: {item.path}")
    if not (work.entries or work.leftovers or work.sources):
        print_notice("there are no other leftovers" if work.running else "there are no leftovers")
        return 0
    if not command.yes and not _confirmed(work, paths):
        print_notice("nothing was removed")
        return 1
    for entry in work.entries.values():
        _remove(entry, paths)
    busy: MoechatError | None = None
    kept = {source.path: Leftover(source.path, source.nbytes) for source in work.sources.values()}
    for item in [*work.leftovers.values(), *kept.values()]:
        try:
            _remove_leftover(item, even_if_kept=item.path in kept)
        except _BusyError as error:  # remove the others first
            busy = busy or error
    for source in work.staying.values():
        print_notice(_staying(source))
    if busy is not None:
        raise busy
    return 0


def _collect(command: RemoveCommand, paths: Paths) -> _Work:
    work = _Work({}, {}, {}, {}, [])
    for model in command.models:
        if model.lower() == DEMO:
            raise UsageError("the demo is part of moechat and takes 16 MB", hint="uninstall moechat instead")
        entries: list[LibraryEntry] = []
        missing: ModelNotFoundError | None = None
        try:
            entries = find_stores(model, command.bits, paths)
        except ModelNotFoundError as error:
            missing = error
        work.entries |= {entry.path: entry for entry in entries}
        # A converted directory may have the name of an alias, whose downloads are those of another model.
        is_local = bool(entries) and not any(entry.commit for entry in entries)
        own = [] if command.bits or is_local else find_leftovers(model, paths)
        work.leftovers |= {item.path: item for item in own}
        sources = [] if is_local else find_sources(model, entries, paths)
        kept = {source.path: source for source in sources}
        if command.sources:
            work.sources |= kept
        else:
            work.staying |= kept
        if missing is not None and not own and not (kept and command.sources):
            if kept:
                hint = "it has only a kept checkpoint: --sources removes that"
                raise ModelNotFoundError(str(missing), hint=hint)
            raise missing
    if command.leftovers:
        named = set(work.leftovers)
        others = [item for item in list_leftovers(paths) if item.path not in named]
        work.running, unused = split_running(others)
        work.leftovers |= {item.path: item for item in unused}
    return work


def _confirmed(work: _Work, paths: Paths) -> bool:
    if not can_ask():
        raise UsageError(
            "rm asks for confirmation, and there is no terminal", hint="--yes removes without asking"
        )
    total = 0
    for entry in work.entries.values():
        outside = _outside(entry, paths)
        if outside is None:
            total += entry.nbytes
            print_notice(f"{title_of(entry)}, {entry.form}, {format_bytes(entry.nbytes)}: {entry.path}")
        else:
            print_notice(f"{title_of(entry)}, {entry.form}: only the link {entry.path}, {outside} stays")
    for item in work.leftovers.values():
        total += item.nbytes
        print_notice(f"left by interrupted work, {format_bytes(item.nbytes)}: {item.path}")
    for source in work.sources.values():
        total += source.nbytes
        print_notice(f"the kept checkpoint of {source.title}, {format_bytes(source.nbytes)}: {source.path}")
    for source in work.staying.values():
        print_notice(_staying(source))
    return confirm(f"Remove {format_bytes(total)}?", default=False)


def _staying(source: KeptSource) -> str:
    return (
        f"the kept checkpoint of {source.title} stays, {format_bytes(source.nbytes)}: {source.path} "
        "(--sources removes it too)"
    )


def _outside(entry: LibraryEntry, paths: Paths) -> Path | None:
    """The target of a link in the library to a store elsewhere; ``None`` for other stores."""
    if not entry.path.is_symlink():
        return None
    target = entry.path.resolve()
    return None if target.is_relative_to(paths.models.resolve()) else target


def _remove(entry: LibraryEntry, paths: Paths) -> None:
    from moechat.hub.model_ref import MANIFEST
    from moechat.store.files import explained
    from moechat.store.lock import exclusive_lock, unless_in_use
    from moechat.store.store import remove_store
    from moechat.store.workspace import lock_path, remove_leftovers

    def busy() -> None:
        raise _in_use(entry, "is being converted right now")

    outside = _outside(entry, paths)
    with exclusive_lock(lock_path(entry.path), busy), unless_in_use(entry.path / MANIFEST) as free:
        if not free:
            raise _in_use(entry, "is in use by a running moechat")
        if entry.path.is_symlink():
            target = entry.path.resolve()
            if outside is None and os.path.exists(target):
                with exclusive_lock(lock_path(target), busy):
                    remove_store(target)
            with explained("removing", entry.path):
                entry.path.unlink()
        elif entry.path.exists():  # unless removed already through a link to it
            remove_store(entry.path)
        remove_leftovers(entry.path)
    if outside is not None:
        print_notice(f"removed the link {entry.path}; what it pointed to stays: {outside}")
        return
    forget_use(entry.path, paths)
    print_notice(f"removed {title_of(entry)}, {entry.form}: {format_bytes(entry.nbytes)} are free again")


def _in_use(entry: LibraryEntry, how: str) -> InUseError:
    return InUseError(f"{title_of(entry)} {how}", hint="end that program first, then remove it again")


def _remove_leftover(item: Leftover, *, even_if_kept: bool) -> None:
    from moechat.store.files import explained
    from moechat.store.lock import exclusive_lock

    def busy() -> None:
        raise _BusyError(
            f"{item.path} belongs to a running download or conversion",
            hint="end that program first",
        )

    with explained("removing", item.path), exclusive_lock(item.lock, busy):
        # A download may have finished and kept it while the user was asked.
        if not even_if_kept and is_kept_source(item.path):
            print_notice(f"skipped, because it is now a kept checkpoint: {item.path}")
            return
        shutil.rmtree(item.path, ignore_errors=not item.path.exists())  # removed with its store already
    print_notice(f"removed {item.path}: {format_bytes(item.nbytes)} are free again")
