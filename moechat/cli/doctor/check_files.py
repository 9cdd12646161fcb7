"""What ``moechat doctor`` looks into of files, settings and variables."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

from moechat.cli.doctor_report import Look, Report, size_text
from moechat.cli.redaction import HIDDEN, is_secret, option_variables, shown_variable
from moechat.cli.settings_file import variable_of
from moechat.config import user_paths
from moechat.errors import MoechatError

_VARIABLES = re.compile(
    r"(MOECHAT|HF|CUDA|OMP|MKL)_.*|TRITON_.*|NO_COLOR|TERM|LANG|(HTTPS?|ALL|NO)_PROXY", re.I
)
# A small model with its checkpoint's shards on the way.
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
    rows["free"] = size_text(free)
    if free < _LITTLE_DISK:
        report.advice(
            f"{size_text(free)} are free on the disk of the library",
            "`moechat rm` removes models; MOECHAT_HOME moves everything to another disk",
        )


def _settings(report: Report, rows: dict[str, str]) -> None:
    from moechat.cli.app import grammar
    from moechat.cli.setting_origins import check_settings
    from moechat.cli.settings_file import FILE, Settings, apply_settings, read_settings

    path = user_paths().config / FILE
    rows["file"] = str(path)
    group = grammar()
    settings = Settings(path)
    try:
        settings = read_settings(user_paths())
        if not path.exists():
            rows["file"] += " (there is none)"
        rows |= {name: _shown(name, value) for name, value in settings.general.items()}
        for command, values in settings.of.items():
            rows |= {f"{command}: {name}": _shown(name, value) for name, value in values.items()}
        apply_settings(group, settings)
    except MoechatError as error:
        report.problem(f"settings: {error}", error.hint or "correct it, or move it away")
        settings = Settings(path)  # what variables say is looked into all the same
    for problem in check_settings(group, settings, os.environ):
        report.problem(str(problem), problem.hint or "correct it")


def _shown(name: str, value: object) -> str:
    return HIDDEN if is_secret(variable_of(name), option_variables()) else str(value)


def _library(report: Report, rows: dict[str, str]) -> None:
    from moechat.cli.library import divide
    from moechat.hub.leftovers import list_leftovers, list_sources
    from moechat.hub.library import list_stores

    paths = user_paths()
    entries = list_stores(paths)
    for entry in entries:
        rows[entry.title] = "damaged" if entry.damaged else f"{entry.bits} bits, {size_text(entry.nbytes)}"
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
        rows["kept checkpoints"] = f"{len(sources)}, {size_text(sum(source.nbytes for source in sources))}"
    running, left = divide(list_leftovers(paths))
    if running:
        rows["running"] = (
            f"downloads and conversions, {size_text(sum(item.nbytes for item in running))} so far"
        )
    if left:
        report.advice(
            f"unfinished downloads and conversions take {size_text(sum(item.nbytes for item in left))}",
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
    from moechat.hub.failures import endpoint, has_token, is_offline, withholds_token

    rows["address"] = endpoint()
    rows["token"] = "there is one" if has_token() else "none"
    if withholds_token():
        rows["token"] = "none is sent: HF_HUB_DISABLE_IMPLICIT_TOKEN is set"
    if is_offline():
        rows["offline"] = "HF_HUB_OFFLINE is set"
        report.advice("HF_HUB_OFFLINE is set: no model can be downloaded", "unset it")


def _environment(report: Report, rows: dict[str, str]) -> None:
    options = option_variables()
    for name in sorted(os.environ):
        if _VARIABLES.fullmatch(name):
            rows[name] = shown_variable(name, os.environ[name], options)


def _conversations(report: Report, rows: dict[str, str]) -> None:
    import sqlite3
    from contextlib import closing

    from moechat.chat.schema import MIGRATIONS
    from moechat.chat.sessions import sessions_path

    path = sessions_path()
    rows["file"] = str(path)
    if not path.exists():
        rows["file"] += " (there is none)"
        return
    if path.is_dir():
        report.problem(f"{path} is a directory", "move it away; a new database is made in its place then")
        return
    # Beside a database that nobody has open there is no log, and then nothing else has to be written to read
    # it: not even the files that SQLite would make for those who share it.
    alone = not path.with_name(f"{path.name}-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=1)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            if version > len(MIGRATIONS):
                report.problem(
                    f"{path} was written by a newer moechat: it has form {version}, this version knows "
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
    rows["conversations"] = f"{count:,}, {size_text(path.stat().st_size)}"


FILES: dict[str, Look] = {
    "files": _files,
    "settings": _settings,
    "library": _library,
    "conversations": _conversations,
    "measurements": _measurements,
    "hub": _hub,
    "environment": _environment,
}
