"""``moechat download``: shows sizes and times, then downloads; ``moechat run`` uses it for missing models."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.chat.terminal.safe_text import one_line
from moechat.cli.commands.library_list import write_json
from moechat.cli.terminal.consoles import confirm, neutralise, print_notice, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes, format_seconds
from moechat.config import user_paths
from moechat.errors import DoesNotFitError, MoechatError, StoreDamagedError
from moechat.fetch.hub_client import is_offline
from moechat.fetch.hub_errors import offline_error
from moechat.fetch.repository import fetch_repository
from moechat.hub.model_ref import ModelRef, hub_model, stored_commit
from moechat.options import BITS
from moechat.validation import require_choice

if TYPE_CHECKING:
    from moechat import Progress
    from moechat.fetch.download import Download
    from moechat.fetch.download_plan import DownloadPlan
    from moechat.loading.model import Report

_BITS_PER_SECOND = 100_000_000  # assumed rate, named with the estimated time
_TOO_SMALL_BUDGET = 1 << 20  # makes planning name the least
_DEFAULT_BITS = 4


@dataclass(frozen=True)
class DownloadCommand:
    """Arguments of ``moechat download``.

    Raises:
        UsageError: A value is out of range.
    """

    model: str
    bits: int = _DEFAULT_BITS
    dry_run: bool = False
    keep_source: bool = False
    quiet: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        require_choice("--bits", self.bits, BITS)


def download(command: DownloadCommand) -> int:
    """Plan, fetch, convert; returns the exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    _work(command, question=None)
    return 0


def download_to_run(model: str, bits: int | None, *, yes: bool, quiet: bool) -> bool:
    """Download a model before running it; returns whether the user agreed.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    command = DownloadCommand(model, _DEFAULT_BITS if bits is None else bits, quiet=quiet)
    return _work(command, question=None if yes else "Download and convert it now?", to_run=True)


def _work(command: DownloadCommand, question: str | None, *, to_run: bool = False) -> bool:
    ref = hub_model(command.model)
    here = ref.library_path(user_paths().models, command.bits)
    if is_offline():
        _check_offline(ref, here, command)
        return True
    say = (lambda _text: None) if command.quiet else print_notice
    remote = fetch_repository(str(ref.repository), ref.revision, say)  # before seconds of importing torch
    if not (command.keep_source or command.dry_run or command.json) and _is_made_of(here, remote.commit):
        _print_present(remote.title, command)
        return True
    with LoadProgress(quiet=command.quiet) as progress:
        progress.say("reading the model's headers")
        from moechat.fetch.download import prepare_download

        notice = (lambda _text: None) if command.quiet else progress.notice
        with prepare_download(
            ref, remote, command.bits, user_paths(), keep_source=command.keep_source, notice=notice
        ) as work:
            if command.dry_run:
                progress.stop()
                if command.json:
                    write_json(_plan_json(work.plan, "planned"))
                else:
                    write_output(sys.stdout, _describe(work.plan) + "\n")
                return True
            return _run(work, command, question, progress, to_run=to_run)


def _run(
    work: Download, command: DownloadCommand, question: str | None, progress: LoadProgress, *, to_run: bool
) -> bool:
    plan = work.plan
    if plan.finished:
        progress.stop()
        work.record_finished()
        _print_present(plan.remote.title, command)
        if command.json:
            write_json(_plan_json(plan, "already here"))
        return True
    if not command.quiet or question is not None:
        progress.stop()
        for line in _describe(plan).split("\n"):
            print_notice(line)
    plan.require_disk()
    if question is not None and not confirm(question, default=True):
        print_notice("nothing was downloaded")
        return False
    facts = _plan_json(plan, "finished") if command.json else None  # the download deletes its config.json
    progress.start()
    started = time.monotonic()
    last = _LastProgress(progress)
    try:
        work.run(last, progress.notice if not command.quiet else lambda _text: None)
    except BaseException as error:
        progress.stop()
        if not command.quiet and not isinstance(error, Exception):  # Ctrl-C, or a signal
            print_notice(last.text)
        raise
    progress.stop()
    if not command.quiet:
        took = format_seconds(time.monotonic() - started)
        print_notice(f"{plan.remote.title} is here after {took}, in {plan.destination}")
        if not to_run:
            print_notice(f"moechat run {shlex.quote(command.model)} talks to it")
    if facts is not None:
        write_json(facts)
    return True


class _LastProgress:
    """Forwards reports and remembers the last one on the download."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "download":
            self._last = progress
        self._report(progress)

    @property
    def text(self) -> str:
        """A message on what a stopped download keeps."""
        if self._last is None:
            return "stopped; the same command begins again"
        done, total = format_bytes(self._last.done), format_bytes(self._last.total or 0)
        return f"stopped: {done} of {total} are here or converted; the same command goes on"


def _check_offline(ref: ModelRef, here: Path, command: DownloadCommand) -> None:
    """Without a network, accept a model in the library.

    Raises:
        OfflineError: It is not there, or an option needs the network.
    """
    commit = stored_commit(here)
    if (
        commit is None
        or command.keep_source
        or command.dry_run
        or command.json
        or not _is_made_of(here, commit)
    ):
        raise offline_error(str(ref.repository), ref.revision, command.bits)
    _print_present(f"{ref.name} ({commit[:12]})", command)
    if not command.quiet:
        print_notice("(HF_HUB_OFFLINE is set: the hub was not checked for a newer version)")


def _is_made_of(store: Path, commit: str) -> bool:
    """Whether a store of this commit exists and is not obviously damaged; without importing torch."""
    if stored_commit(store) != commit:
        return False
    from moechat.store.store import Store

    try:
        Store.open(store)
    except StoreDamagedError:
        return False
    return True


def _print_present(title: str, command: DownloadCommand) -> None:
    if not command.quiet:
        print_notice(f"{title} with {command.bits} bits is here already: moechat run {command.model}")


def _describe(plan: DownloadPlan) -> str:
    """Sizes, places and times, one per line."""
    source = f" (the files have {one_line(plan.source_format)})" if plan.source_format else ""
    licence = f", licence {one_line(plan.remote.licence)}" if plan.remote.licence else ""
    lines = [
        f"{plan.remote.title}{licence}",
        f"download  {_to_come(plan)}",
        f"store     {format_bytes(plan.store_bytes)} with {plan.bits} bits{source}, in {plan.destination}",
        f"disk      {_disk(plan)}",
        f"memory    {_memory_text(plan)}",
        f"time      {_time(plan)}",
    ]
    return neutralise("\n".join(lines))


def _to_come(plan: DownloadPlan) -> str:
    others = plan.files - plan.weight_files
    files = (
        f"{plan.weight_files} file{'s' if plan.weight_files != 1 else ''} of weights and {others} "
        f"other{'s' if others != 1 else ''}"
    )
    if plan.finished:
        return f"nothing: all of the {files} is here, converted"
    done = plan.download_bytes - plan.missing_bytes
    total = format_bytes(plan.download_bytes)
    if not done:
        return f"{total} in {files}"
    return f"{format_bytes(plan.missing_bytes)}; {format_bytes(done)} of the {total} in {files} are done"


def _disk(plan: DownloadPlan) -> str:
    text = f"{format_bytes(plan.disk_bytes)} while it is made; {format_bytes(plan.free_bytes)} free"
    if plan.disk_bytes <= plan.free_bytes < plan.ahead_bytes:
        text += f" ({format_bytes(plan.ahead_bytes)} would let it download while it converts)"
    return text


@dataclass(frozen=True)
class _Memory:
    """Memory for the model on the CPU, in bytes.

    Attributes:
        least: The least budget it runs with; ``None`` if unknown.
        everything: Approximate budget to keep all experts in memory.
        available: Available memory.
    """

    least: int | None
    everything: int | None
    available: int


def _memory(plan: DownloadPlan) -> _Memory:
    import moechat
    from moechat.hardware.memory import available_bytes

    least: int | None = None
    try:
        moechat.plan(str(plan.config), bits=plan.bits, ram=_TOO_SMALL_BUDGET)
    except DoesNotFitError as error:
        least = error.least_bytes
    except MoechatError:  # the download works without a memory plan
        pass
    return _Memory(least, None if least is None else least + plan.expert_bytes, available_bytes())


def _memory_text(plan: DownloadPlan) -> str:
    memory = _memory(plan)
    available = f"{format_bytes(memory.available)} are available"
    if memory.least is None or memory.everything is None:
        return available
    everything = format_bytes(memory.everything)
    return f"runs with {format_bytes(memory.least)}, all in memory with about {everything}; {available}"


def _download_seconds(plan: DownloadPlan) -> float:
    return plan.missing_bytes * 8 / _BITS_PER_SECOND


def _time(plan: DownloadPlan) -> str:
    parts = [f"{format_seconds(_download_seconds(plan))} of downloading at 100 Mbit/s"]
    if plan.convert_s is not None:
        overlap = "; they overlap" if plan.overlaps else ""
        parts.append(f"about {format_seconds(plan.convert_s)} of converting on this machine{overlap}")
    return ", ".join(parts)


def _plan_json(plan: DownloadPlan, status: str) -> dict[str, Any]:
    """The plan as JSON, in bytes and seconds, as before the download."""
    memory = _memory(plan)
    return {
        "status": status,
        "name": plan.name,
        "repository": plan.remote.repository,
        "revision": plan.remote.revision,
        "commit": plan.remote.commit,
        "licence": plan.remote.licence,
        "bits": plan.bits,
        "source_format": plan.source_format,
        "files": plan.files,
        "weight_files": plan.weight_files,
        "download_bytes": plan.download_bytes,
        "missing_bytes": plan.missing_bytes,
        "store_bytes": plan.store_bytes,
        "disk_bytes": plan.disk_bytes,
        "free_bytes": plan.free_bytes,
        "ram_least_bytes": memory.least,
        "ram_all_bytes": memory.everything,
        "ram_available_bytes": memory.available,
        "download_s": _download_seconds(plan),
        "convert_s": plan.convert_s,
        "overlap": plan.overlaps,
        "calibrated": plan.calibrated,
        "destination": str(plan.destination),
        "finished": plan.finished or status == "finished",
    }
