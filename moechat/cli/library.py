"""``moechat list`` and ``moechat rm``: the library of models on this machine."""

from __future__ import annotations

import json as jsonlib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.cli.terminal import ask, can_ask, neutralise, print_notice, write_output
from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError, MoechatError, UsageError
from moechat.hub.library import (
    Leftover,
    LibraryEntry,
    find_leftovers,
    find_stores,
    forget_use,
    list_leftovers,
    list_stores,
)
from moechat.hub.names import DEMO

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def list_models(*, json: bool) -> int:
    """Show the library; returns the exit status."""
    paths = user_paths()
    entries = list_stores(paths)
    if json:
        write_json([entry_json(entry) for entry in entries])
        return 0
    if not entries:
        print_notice(
            "the library is empty: `moechat run demo` works at once, `moechat download MODEL` adds one"
        )
    else:
        rows = [("name", "bits", "size", "last used")]
        rows += [
            (_title(entry), str(entry.bits or "?"), size_text(entry.nbytes), _age(entry)) for entry in entries
        ]
        write_output(sys.stdout, _table(rows))
    left = list_leftovers(paths)
    if left:
        total = size_text(sum(item.nbytes for item in left))
        print_notice(
            f"unfinished downloads and conversions take {total}: they go on with the same command, "
            "`moechat rm --leftovers` removes them"
        )
    return 0


@dataclass(frozen=True)
class RemoveCommand:
    """What is to be removed.

    Raises:
        UsageError: Nothing is.
    """

    models: tuple[str, ...]
    bits: int | None = None
    leftovers: bool = False
    yes: bool = False

    def __post_init__(self) -> None:
        if not self.models and not self.leftovers:
            raise UsageError("rm needs the name of a model", hint="`moechat list` shows them")


def remove_models(command: RemoveCommand) -> int:
    """Remove stores; returns the exit status.

    Raises:
        ModelNotFoundError: One of them is not there; nothing has been removed then.
        UsageError: Nobody can be asked, or the demo is meant.
        MoechatError: One is in use, or cannot be deleted.
    """
    paths = user_paths()
    entries: dict[Path, LibraryEntry] = {}
    leftovers: dict[Path, Leftover] = {}
    for model in command.models:
        if model.lower() == DEMO:
            raise UsageError(
                "the demo is a part of moechat and takes 16 MB", hint="uninstall moechat instead"
            )
        own = [] if command.bits else find_leftovers(model, paths)
        leftovers |= {item.path: item for item in own}
        try:
            entries |= {entry.path: entry for entry in find_stores(model, command.bits, paths)}
        except ModelNotFoundError:
            if not own:
                raise
    if command.leftovers:
        leftovers |= {item.path: item for item in list_leftovers(paths)}
    left = list(leftovers.values())
    if not entries and not left:
        print_notice("there are no leftovers")
        return 0
    if not command.yes and not _agreed(list(entries.values()), left):
        print_notice("nothing was removed")
        return 1
    for entry in entries.values():
        _remove(entry, paths)
    for item in left:
        _remove_leftover(item)
    return 0


def _agreed(entries: list[LibraryEntry], left: list[Leftover]) -> bool:
    if not can_ask():
        raise UsageError(
            "rm asks on a terminal, and there is none", hint="say --yes to remove without asking"
        )
    for entry in entries:
        print_notice(f"{_title(entry)}, {entry.bits} bits, {size_text(entry.nbytes)}: {entry.path}")
    for item in left:
        print_notice(f"left by interrupted work, {size_text(item.nbytes)}: {item.path}")
    total = sum(entry.nbytes for entry in entries) + sum(item.nbytes for item in left)
    return ask(f"Remove {size_text(total)}?", default=False)


def _remove(entry: LibraryEntry, paths: Paths) -> None:
    from moechat.hub.names import MANIFEST
    from moechat.store.lock import exclusive_lock, unless_in_use
    from moechat.store.store import remove_store
    from moechat.store.workspace import lock_path, remove_leftovers

    def busy() -> None:
        raise _in_use(entry, "is being converted right now")

    with exclusive_lock(lock_path(entry.path), busy), unless_in_use(entry.path / MANIFEST) as free:
        if not free:
            raise _in_use(entry, "is in use by a running moechat")
        remove_store(entry.path)
        remove_leftovers(entry.path)
    forget_use(entry.path, paths)
    print_notice(f"removed {_title(entry)}, {entry.bits} bits: {size_text(entry.nbytes)} are free again")


def _in_use(entry: LibraryEntry, how: str) -> MoechatError:
    return MoechatError(f"{_title(entry)} {how}", hint="end that program first, then remove it again")


def _remove_leftover(item: Leftover) -> None:
    from moechat.store.files import explained
    from moechat.store.lock import exclusive_lock

    def busy() -> None:
        raise MoechatError(
            f"{item.path} belongs to a download or a conversion that is running",
            hint="end that program first",
        )

    name = item.path.name
    if name.startswith("."):  # .NAME.partial belongs to NAME, whose lock is .NAME.lock
        name = name[1:].rpartition(".")[0]
    with explained("removing", item.path), exclusive_lock(item.path.parent / f".{name}.lock", busy):
        shutil.rmtree(item.path, ignore_errors=not item.path.exists())  # gone with its store already
    print_notice(f"removed {item.path}: {size_text(item.nbytes)} are free again")


def entry_json(entry: LibraryEntry) -> dict[str, Any]:
    """One store, for programs."""
    return {
        "name": entry.name,
        "repository": entry.source.partition("@")[0] if entry.commit else None,
        "commit": entry.commit,
        "model_type": entry.model_type or None,
        "bits": entry.bits or None,
        "bytes": entry.nbytes,
        "used": entry.used,
        "path": str(entry.path),
        "damaged": entry.damaged,
    }


def write_json(value: Any) -> None:
    """One JSON value on stdout."""
    plain = sys.stdout.isatty() or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    write_output(sys.stdout, jsonlib.dumps(value, indent=1, ensure_ascii=plain) + "\n")


def size_text(count: int) -> str:
    """``1.5 GiB``."""
    from moechat.cli.progress import format_bytes

    return format_bytes(count)


def _title(entry: LibraryEntry) -> str:
    return f"{entry.title} (damaged)" if entry.damaged else entry.title


def _age(entry: LibraryEntry) -> str:
    if entry.used is None:
        return "never"
    seconds = max(0.0, time.time() - entry.used)
    for size, name in ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns, numbers to the right; without rich, which would take longer to import than all the rest."""
    right = (1, 2)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(neutralise("  ".join(cells).rstrip()))
    return "\n".join(lines) + "\n"
