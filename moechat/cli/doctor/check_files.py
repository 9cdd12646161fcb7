"""Sections of ``moechat doctor`` on files, settings and environment variables."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.cli.config.own_tables import is_private
from moechat.cli.config.setting_checks import check_settings
from moechat.cli.config.settings_file import FILE, Settings, apply_settings, read_settings, variable_of
from moechat.cli.doctor.findings import Look, Report
from moechat.cli.doctor.redaction import HIDDEN, is_secret, shown_variable
from moechat.cli.terminal.load_progress import format_bytes
from moechat.config import user_paths
from moechat.errors import MoechatError

if TYPE_CHECKING:
    from moechat.cli.lazy_group import LazyGroup

_VARIABLES = re.compile(
    r"(MOECHAT|HF|CUDA|OMP|MKL)_.*|TRITON_.*|NO_COLOR|TERM|LANG|(HTTPS?|ALL|NO)_PROXY", re.I
)
# Enough for a small model and the shards of its checkpoint during conversion.
_LITTLE_DISK = 20 << 30


def _files(report: Report, rows: dict[str, str]) -> None:
    from moechat.hardware.identity import disk_of, existing_parent

    paths = user_paths()
    for name in ("data", "state", "cache", "config"):
        directory: Path = getattr(paths, name)
        rows[name] = str(directory)
        parent = existing_parent(directory)
        if not os.access(parent, os.W_OK):
            report.problem(f"{parent} cannot be written", "change its permissions, or set MOECHAT_HOME")
    disk = disk_of(paths.models)
    free = shutil.disk_usage(existing_parent(paths.models)).free
    rows["disk"] = ", ".join(part for part in (disk.file_system, disk.device) if part) or "unknown"
    rows["free"] = format_bytes(free)
    if free < _LITTLE_DISK:
        report.advice(
            f"{format_bytes(free)} are free on the disk of the library",
            "`moechat rm` removes models; MOECHAT_HOME moves everything to another disk",
        )


def _library(report: Report, rows: dict[str, str]) -> None:
    from moechat.cli.commands.library_list import split_running
    from moechat.hub.leftovers import list_leftovers, list_sources
    from moechat.hub.library import list_stores

    paths = user_paths()
    entries = list_stores(paths)
    for entry in entries:
        rows[entry.title] = "damaged" if entry.damaged else f"{entry.form}, {format_bytes(entry.nbytes)}"
        if entry.reason is not None:
            report.problem(
                f"the store {entry.path.name} cannot be read: {entry.reason}",
                f"look at {entry.path}; moechat rm {shlex.quote(entry.path.name)} removes it",
            )
        elif entry.damaged:
            report.problem(
                f"the store {entry.path.name} is damaged",
                f"moechat rm {shlex.quote(entry.path.name)}, then download it again",
            )
    if not entries:
        rows["models"] = "none but the demo"
    sources = list_sources(paths)
    if sources:
        rows["kept checkpoints"] = f"{len(sources)}, {format_bytes(sum(source.nbytes for source in sources))}"
    running, left = split_running(list_leftovers(paths))
    if running:
        rows["running"] = (
            f"downloads and conversions, {format_bytes(sum(item.nbytes for item in running))} so far"
        )
    if left:
        report.advice(
            f"unfinished downloads and conversions take {format_bytes(sum(item.nbytes for item in left))}",
            "they go on with the command that was interrupted; `moechat rm --leftovers` removes them",
        )


def _measurements(report: Report, rows: dict[str, str]) -> None:
    from moechat.hardware.measured_file import load_measured

    notes: list[str] = []
    profile = load_measured(notes.append)
    for note in notes:
        report.advice(note, "moechat profile measures anew")
    if profile is None:
        rows["this machine"] = "not measured"
        report.advice(
            "this machine has not been measured", "`moechat profile` takes half a minute; plans then fit it"
        )
    else:
        rows["this machine"] = f"measured {profile.created[:10]}: {profile.title}"


def _hub(report: Report, rows: dict[str, str]) -> None:
    from moechat.fetch.hub_client import (
        endpoint,
        has_token,
        is_offline,
        withholds_token,
    )

    rows["address"] = endpoint()
    rows["token"] = "there is one" if has_token() else "none"
    if withholds_token():
        rows["token"] = "none is sent: HF_HUB_DISABLE_IMPLICIT_TOKEN is set"
    if is_offline():
        rows["offline"] = "HF_HUB_OFFLINE is set"
        report.advice("HF_HUB_OFFLINE is set: no model can be downloaded", "unset it")


def _conversations(report: Report, rows: dict[str, str]) -> None:
    import sqlite3
    from contextlib import closing

    from moechat.history.database_schema import MIGRATIONS
    from moechat.history.session_database import sessions_path

    path = sessions_path()
    rows["file"] = str(path)
    if not path.exists():
        rows["file"] += " (there is none)"
        return
    if path.is_dir():
        report.problem(f"{path} is a directory", "move it away; a new database is made in its place then")
        return
    # Without a write-ahead log no process has the database open; "immutable" then keeps SQLite from creating
    # its own files beside it.
    unused = not path.with_name(f"{path.name}-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if unused else ''}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=1)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            if version > len(MIGRATIONS):
                report.problem(
                    f"{path} was written by a newer moechat: it has schema {version}, this version knows "
                    f"{len(MIGRATIONS)}",
                    "use that version; until then chats are not kept",
                )
                return
            (count,) = connection.execute("SELECT count(*) FROM conversations").fetchone()
    except sqlite3.Error as error:
        report.problem(
            f"the conversations in {path} cannot be read: {error}",
            "move that file away; a new one is made then",
        )
        return
    rows["conversations"] = f"{count:,}, {format_bytes(path.stat().st_size)}"


def file_sections(commands: LazyGroup, variables: Collection[str]) -> dict[str, Look]:
    """The sections on files, settings and variables, by title.

    Args:
        commands: All commands of the program.
        variables: Names of the environment variables that set their options.
    """

    def shown(name: str, value: object) -> str:
        return HIDDEN if is_secret(variable_of(name), variables) else str(value)

    def settings_section(report: Report, rows: dict[str, str]) -> None:
        path = user_paths().config / FILE
        rows["file"] = str(path)
        settings = Settings(path)
        try:
            settings = read_settings(user_paths())
            if not path.exists():
                rows["file"] += " (there is none)"
            rows |= {name: shown(name, value) for name, value in settings.general.items()}
            for command, values in settings.of.items():
                rows |= {f"{command}: {name}": shown(name, value) for name, value in values.items()}
            for table, named in (("presets", settings.presets), ("remotes", settings.remotes)):
                for own, values in named.items():
                    rows |= {
                        f"{table}.{own}: {name}": HIDDEN if is_private(name) else str(value)
                        for name, value in values.items()
                    }
            apply_settings(commands, settings)
        except MoechatError as error:
            report.problem(f"settings: {error}", error.hint or "correct it, or move it away")
            settings = Settings(path)  # environment variables are still checked
        for problem in check_settings(commands, settings, os.environ):
            report.problem(str(problem), problem.hint or "correct it")

    def environment_section(report: Report, rows: dict[str, str]) -> None:
        for name in sorted(os.environ):
            if _VARIABLES.fullmatch(name):
                rows[name] = shown_variable(name, os.environ[name], variables)

    return {
        "files": _files,
        "settings": settings_section,
        "library": _library,
        "conversations": _conversations,
        "measurements": _measurements,
        "hub": _hub,
        "environment": environment_section,
    }
