"""``moechat rm``: models of the library, and what lies beside them, for good."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from moechat.cli.library import divide, size_text, title_of
from moechat.cli.terminal import ask, can_ask, print_notice
from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError, MoechatError, UsageError
from moechat.hub.leftovers import (
    KeptSource,
    Leftover,
    find_leftovers,
    find_sources,
    is_kept_source,
    list_leftovers,
)
from moechat.hub.library import LibraryEntry, find_stores, forget_use
from moechat.hub.names import DEMO


@dataclass(frozen=True)
class RemoveCommand:
    """What is to be removed.

    Raises:
        UsageError: Nothing is.
    """

    models: tuple[str, ...]
    bits: int | None = None
    leftovers: bool = False
    sources: bool = False
    yes: bool = False

    def __post_init__(self) -> None:
        if not self.models and (self.sources or not self.leftovers):
            raise UsageError("rm needs the name of a model", hint="`moechat list` shows them")


class _BusyError(MoechatError):
    """A download or a conversion that is running works on it."""


@dataclass
class _Work:
    """What will be removed, and what of the same models stays."""

    entries: dict[Path, LibraryEntry]
    left: dict[Path, Leftover]
    sources: dict[Path, KeptSource]
    staying: dict[Path, KeptSource]
    running: list[Leftover]


def remove_models(command: RemoveCommand) -> int:
    """Remove stores; returns the exit status.

    What a running download works on is no leftover: ``--leftovers`` says so and goes on.

    Raises:
        ModelNotFoundError: One of them is not there; nothing has been removed then.
        UsageError: Nobody can be asked, or the demo is meant.
        MoechatError: A store is in use, or cannot be deleted; what is named after it stays as well. Or a
            running download works on what was left of a model that is named; all else has been removed then.
    """
    paths = user_paths()
    work = _collect(command, paths)
    for item in work.running:
        print_notice(f"left alone, as a download or a conversion that is running works on it: {item.path}")
    if not (work.entries or work.left or work.sources):
        print_notice("there are no other leftovers" if work.running else "there are no leftovers")
        return 0
    if not command.yes and not _agreed(work, paths):
        print_notice("nothing was removed")
        return 1
    for entry in work.entries.values():
        _remove(entry, paths)
    busy: MoechatError | None = None
    kept = {source.path: Leftover(source.path, source.nbytes) for source in work.sources.values()}
    for item in [*work.left.values(), *kept.values()]:
        try:
            _remove_leftover(item, even_if_kept=item.path in kept)
        except _BusyError as error:  # the others can go all the same
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
            raise UsageError(
                "the demo is a part of moechat and takes 16 MB", hint="uninstall moechat instead"
            )
        own = [] if command.bits else find_leftovers(model, paths)
        work.left |= {item.path: item for item in own}
        entries: list[LibraryEntry] = []
        missing: ModelNotFoundError | None = None
        try:
            entries = find_stores(model, command.bits, paths)
        except ModelNotFoundError as error:
            missing = error
        work.entries |= {entry.path: entry for entry in entries}
        kept = {source.path: source for source in find_sources(model, entries, paths)}
        if command.sources:
            work.sources |= kept
        else:
            work.staying |= kept
        if missing is not None and not own and not (kept and command.sources):
            if kept:
                hint = "it has only the checkpoint that was kept: --sources removes that"
                raise ModelNotFoundError(str(missing), hint=hint)
            raise missing
    if command.leftovers:
        named = set(work.left)
        work.running, free = divide([item for item in list_leftovers(paths) if item.path not in named])
        work.left |= {item.path: item for item in free}
    return work


def _agreed(work: _Work, paths: Paths) -> bool:
    if not can_ask():
        raise UsageError(
            "rm asks on a terminal, and there is none", hint="say --yes to remove without asking"
        )
    total = 0
    for entry in work.entries.values():
        outside = _outside(entry, paths)
        if outside is None:
            total += entry.nbytes
            print_notice(f"{title_of(entry)}, {entry.bits} bits, {size_text(entry.nbytes)}: {entry.path}")
        else:
            print_notice(f"{title_of(entry)}, {entry.bits} bits: only the link {entry.path}, {outside} stays")
    for item in work.left.values():
        total += item.nbytes
        print_notice(f"left by interrupted work, {size_text(item.nbytes)}: {item.path}")
    for source in work.sources.values():
        total += source.nbytes
        print_notice(f"the kept checkpoint of {source.title}, {size_text(source.nbytes)}: {source.path}")
    for source in work.staying.values():
        print_notice(_staying(source))
    return ask(f"Remove {size_text(total)}?", default=False)


def _staying(source: KeptSource) -> str:
    return (
        f"the kept checkpoint of {source.title} stays, {size_text(source.nbytes)}: {source.path} "
        "(--sources removes it too)"
    )


def _outside(entry: LibraryEntry, paths: Paths) -> Path | None:
    """Where a store lies that is only linked from the library."""
    if not entry.path.is_symlink():
        return None
    target = entry.path.resolve()
    return None if target.is_relative_to(paths.models.resolve()) else target


def _remove(entry: LibraryEntry, paths: Paths) -> None:
    from moechat.hub.names import MANIFEST
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
        elif entry.path.exists():  # not gone together with a link to it
            remove_store(entry.path)
        remove_leftovers(entry.path)
    if outside is not None:
        print_notice(f"removed the link {entry.path}; what it pointed to stays: {outside}")
        return
    forget_use(entry.path, paths)
    print_notice(f"removed {title_of(entry)}, {entry.bits} bits: {size_text(entry.nbytes)} are free again")


def _in_use(entry: LibraryEntry, how: str) -> MoechatError:
    return MoechatError(f"{title_of(entry)} {how}", hint="end that program first, then remove it again")


def _remove_leftover(item: Leftover, *, even_if_kept: bool) -> None:
    from moechat.store.files import explained
    from moechat.store.lock import exclusive_lock

    def busy() -> None:
        raise _BusyError(
            f"{item.path} belongs to a download or a conversion that is running",
            hint="end that program first",
        )

    with explained("removing", item.path), exclusive_lock(item.lock, busy):
        # A download may have ended, and kept it, while the question stood.
        if not even_if_kept and is_kept_source(item.path):
            print_notice(f"left alone, as it is a kept checkpoint by now: {item.path}")
            return
        shutil.rmtree(item.path, ignore_errors=not item.path.exists())  # gone with its store already
    print_notice(f"removed {item.path}: {size_text(item.nbytes)} are free again")
