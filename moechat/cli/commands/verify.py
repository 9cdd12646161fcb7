"""``moechat verify``: reads converted models again from the disk, and repairs damaged ones."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.cli.commands.library_list import title_of, write_json
from moechat.cli.terminal.consoles import can_ask, confirm, print_notice, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes, format_seconds
from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError, MoechatError, StoreDamagedError, UsageError
from moechat.hub.library import LibraryEntry, find_stores, list_stores, read_entry
from moechat.hub.model_ref import DEMO
from moechat.hub.names import resolve
from moechat.safe_text import one_line

DAMAGED = StoreDamagedError.exit_code


@dataclass(frozen=True)
class VerifyCommand:
    """Arguments of ``moechat verify``.

    Raises:
        UsageError: They contradict each other.
    """

    model: str | None
    bits: int | None = None
    repair: bool = False
    source: Path | None = None
    yes: bool = False
    quiet: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if self.source is not None and not self.repair:
            raise UsageError("--from is for repairs", hint="add --repair")
        if self.source is not None and self.model is None:
            raise UsageError("--from is the checkpoint of one model", hint="name the model")


@dataclass
class _Result:
    """What was found of one store."""

    title: str
    path: Path
    nbytes: int = 0
    seconds: float = 0.0
    status: str = "right"
    damage: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    hint: str | None = None

    @property
    def speed(self) -> float | None:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.title,
            "path": str(self.path),
            "status": self.status,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "bytes_per_s": self.speed,
            "damage": self.damage,
        }


def verify(command: VerifyCommand) -> int:
    """Verify models, and repair them if wished; returns the exit status.

    Raises:
        ModelNotFoundError: There is no such model, or no source to repair it from.
        MoechatError: A repair failed; the store is as it was.
    """
    paths = user_paths()
    chosen = _entries(command, paths)
    results = []
    for entry in chosen:
        with LoadProgress(quiet=command.quiet) as progress:
            result = _examine(entry, paths, progress)
            if result.damage and command.repair:
                progress.stop()
                _show(result, command)
                progress.start()
                _repair(entry, result, command, paths, progress)
        results.append(result)
        _show(result, command)
    if command.json:
        write_json([result.to_json() for result in results])
    elif not chosen:
        print_notice("the library is empty")
    return DAMAGED if any(result.status == "damaged" for result in results) else 0


def _entries(command: VerifyCommand, paths: Paths) -> list[LibraryEntry]:
    if command.model is None:
        return [entry for entry in list_stores(paths) if command.bits in (None, entry.bits)]
    if command.model.lower() != DEMO:
        try:
            return find_stores(command.model, command.bits, paths)
        except ModelNotFoundError as missing:
            try:
                ref = resolve(command.model, bits=command.bits, paths=paths)
            except MoechatError:
                raise missing from None
            if ref.store is None:
                raise
            return [read_entry(ref.store, paths)]
    store = resolve(DEMO, paths=paths).store
    assert store is not None
    return [read_entry(store, paths)]


def _examine(entry: LibraryEntry, paths: Paths, progress: LoadProgress) -> _Result:
    from moechat.loading.model import Progress
    from moechat.store.manifest import MANIFEST_NAME, Manifest
    from moechat.store.verified_files import VerifiedFiles

    result = _Result(title_of(entry), entry.path)
    started = time.monotonic()
    try:
        files = VerifiedFiles(entry.path, Manifest.read(entry.path / MANIFEST_NAME))
    except StoreDamagedError as error:
        result.status, result.hint = "damaged", error.hint
        reason = str(error)
        result.damage = [
            {"file": str(entry.path / MANIFEST_NAME), "reason": reason, "layer": None, "experts": []}
        ]
        result.lines = [reason]
        return result
    found = files.examine(
        paths.state,
        lambda done, total, name: progress(Progress("verify", done, total, f"{result.title}: {name}")),
    )
    result.nbytes, result.seconds = files.total_bytes, time.monotonic() - started
    if found:
        result.status, result.hint = "damaged", files.damaged("").hint
        result.damage = [damage.to_json() for damage in found]
        result.lines = [damage.message for damage in found]
    return result


def _repair(
    entry: LibraryEntry, result: _Result, command: VerifyCommand, paths: Paths, progress: LoadProgress
) -> None:
    """Make the damaged files again, and read the store once more.

    Raises:
        MoechatError: It is not possible; the store is as it was.
    """
    from moechat.fetch.download_plan import DownloadPlan
    from moechat.fetch.repair import repair

    if entry.damaged or _in_package(entry):
        raise StoreDamagedError(result.lines[0], hint=result.hint)
    damaged = {str(Path(damage["file"]).relative_to(entry.path)) for damage in result.damage}

    def agree(plan: DownloadPlan) -> bool:
        progress.stop()
        print_notice(
            f"{plan.remote.title}: up to {format_bytes(plan.download_bytes)} are downloaded again, for "
            f"{len(damaged)} damaged {'files' if len(damaged) > 1 else 'file'}"
        )
        if not command.yes:
            if not can_ask():
                raise UsageError(
                    "a repair from the hub asks before it downloads, and there is no terminal",
                    hint="--yes downloads without asking",
                )
            if not confirm("Download them now?", default=True):
                return False
        progress.start()
        return True

    source = command.source or _checkpoint_of(command.model)
    notice = (lambda _text: None) if command.quiet else progress.notice
    # Where the library has a symbolic link, its target is repaired and the link is kept.
    done = repair(
        entry.path.resolve(), damaged, source=source, paths=paths, agree=agree, report=progress, notice=notice
    )
    if done is None:
        print_notice("nothing was downloaded; the store is as it was")
        return
    after = _examine(read_entry(entry.path, paths), paths, progress)
    if after.damage:
        result.lines, result.damage = after.lines, after.damage
        return
    result.status = "repaired"
    result.nbytes, result.seconds = after.nbytes, after.seconds


def _checkpoint_of(model: str | None) -> Path | None:
    """The checkpoint on this machine that a model was named by."""
    if model is None:
        return None
    try:
        return resolve(model).checkpoint
    except MoechatError:
        return None


def _in_package(entry: LibraryEntry) -> bool:
    return resolve(DEMO).store == entry.path


def _show(result: _Result, command: VerifyCommand) -> None:
    if command.json or (command.quiet and result.status != "damaged"):
        return
    if result.status != "damaged":
        words = "right" if result.status == "right" else "repaired and right"
        speed = "" if result.speed is None else f", {format_bytes(result.speed)}/s"
        size = f"{format_bytes(result.nbytes)} in {format_seconds(result.seconds)}{speed}"
        write_output(sys.stdout, one_line(f"{result.title}: {words} ({size})") + "\n")
        return
    write_output(sys.stdout, one_line(f"{result.title}: damaged") + "\n")
    for line in result.lines:
        write_output(sys.stdout, f"  {one_line(line)}\n")
    if result.hint is not None and not command.repair:
        print_notice(f"hint: {result.hint}")
