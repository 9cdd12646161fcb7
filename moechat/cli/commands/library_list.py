"""``moechat list``: the models in the library, kept checkpoints and unfinished downloads."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from moechat.cli.config.settings_file import read_settings
from moechat.cli.terminal.consoles import print_notice, write_output
from moechat.cli.terminal.load_progress import format_bytes
from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError
from moechat.hub.leftovers import (
    KeptSource,
    Leftover,
    list_leftovers,
    list_sources,
)
from moechat.hub.library import LibraryEntry, display_names, list_stores, read_entry
from moechat.hub.model_ref import DEMO, repository_of
from moechat.hub.names import resolve
from moechat.safe_text import one_line

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def list_models(*, json: bool) -> int:
    """Show the library and the user's presets, and the demo unless as JSON; returns the exit status."""
    paths = user_paths()
    entries, sources = list_stores(paths), list_sources(paths)
    presets = read_settings(paths).presets
    if json:
        stores = [{**entry_json(entry), "kind": "store"} for entry in entries]
        own = [_preset_json(name, values) for name, values in presets.items()]
        write_json(stores + own + [_source_json(source) for source in sources])
        return 0
    if not entries:
        print_notice(
            "the library is empty: `moechat run demo` works at once, `moechat download MODEL` adds one"
        )
    rows = [
        (title_of(entry, name), entry.form, format_bytes(entry.nbytes), _age(entry))
        for entry, name in zip(entries, display_names(entries), strict=True)
    ]
    rows += [
        (f"{DEMO} (in the package)", entry.form, format_bytes(entry.nbytes), _age(entry))
        for entry in _demo(paths)
    ]
    rows += [
        (one_line(f"{name} (your preset)"), one_line(_preset_model(values)), "", "")
        for name, values in presets.items()
    ]
    if rows:
        write_output(sys.stdout, _table([("name", "experts", "size", "last used"), *rows]))
    for source in sources:
        text = f"the checkpoint of {source.title} is kept, {format_bytes(source.nbytes)}: {source.path}"
        print_notice(one_line(text))
    running, left = split_running(list_leftovers(paths))
    if running:
        print_notice(f"downloads and conversions that are running take {_total(running)} so far")
    if left:
        print_notice(
            f"unfinished downloads and conversions take {_total(left)}: they go on with the same command, "
            "`moechat rm --leftovers` removes them"
        )
    return 0


def _demo(paths: Paths) -> list[LibraryEntry]:
    """The store of the demo; none if this installation lacks it."""
    try:
        store = resolve(DEMO, paths=paths).store
    except ModelNotFoundError:
        return []
    assert store is not None
    return [read_entry(store, paths)]


def split_running(items: list[Leftover]) -> tuple[list[Leftover], list[Leftover]]:
    """Directories of running downloads and conversions, and those of interrupted ones."""
    running = [item for item in items if _is_running(item)]
    return running, [item for item in items if item not in running]


def _total(items: list[Leftover]) -> str:
    return format_bytes(sum(item.nbytes for item in items))


def _is_running(item: Leftover) -> bool:
    from moechat.store.lock import unless_in_use

    with unless_in_use(item.lock) as free:
        return not free


def entry_json(entry: LibraryEntry) -> dict[str, Any]:
    """The JSON form of a store."""
    return {
        "name": entry.name,
        "repository": repository_of(entry.source) if entry.commit else None,
        "commit": entry.commit,
        "model_type": entry.model_type or None,
        "bits": entry.bits or None,
        "experts": None if entry.damaged else entry.form,
        "bytes": entry.nbytes,
        "used": entry.used,
        "path": str(entry.path),
        "damaged": entry.damaged,
    }


def _preset_model(values: Mapping[str, Any]) -> str:
    remote = values.get("remote")
    return f"{values.get('model', '?')}" + (f" of {remote}" if remote is not None else "")


def _preset_json(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of a preset, with the keys of a store."""
    empty = dict.fromkeys(("repository", "commit", "model_type", "bits", "experts", "bytes", "used", "path"))
    return {"name": name, **empty, "damaged": False, "kind": "preset", "model": values.get("model")}


def _source_json(source: KeptSource) -> dict[str, Any]:
    """The JSON form of a kept checkpoint, with the keys of a store."""
    return {
        "name": source.title,
        "repository": source.repository,
        "commit": source.commit,
        "model_type": None,
        "bits": None,
        "experts": None,
        "bytes": source.nbytes,
        "used": None,
        "path": str(source.path),
        "damaged": False,
        "kind": "checkpoint",
    }


def write_json(value: Any) -> None:
    """Write a JSON value to stdout."""
    plain = sys.stdout.isatty() or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    write_output(sys.stdout, jsonlib.dumps(value, indent=1, ensure_ascii=plain) + "\n")


def title_of(entry: LibraryEntry, name: str | None = None) -> str:
    """The name of a store to show, on one line, with a note if it is damaged."""
    name = name or entry.title
    if not entry.damaged:
        return one_line(name)
    return one_line(f"{name} (damaged{f': {entry.reason}' if entry.reason else ''})")


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
    """Align columns, numbers to the right; without rich, whose import takes longer than all the rest."""
    right = (1, 2)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
