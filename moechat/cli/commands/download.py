"""``moechat download``: what a model takes, then the model; ``moechat run`` does it for one not here."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.chat.neutral import one_line
from moechat.cli.library import write_json
from moechat.cli.options import BITS
from moechat.cli.progress import LoadProgress, format_bytes, format_seconds
from moechat.cli.terminal import ask, neutralise, print_notice, write_output
from moechat.config import user_paths
from moechat.errors import DoesNotFitError, MoechatError, StoreDamagedError, UsageError
from moechat.hub.failures import is_offline, offline_error
from moechat.hub.names import ModelRef, hub_model, stored_commit
from moechat.hub.remote import look_up

if TYPE_CHECKING:
    from moechat import Progress
    from moechat.loading.download import Download
    from moechat.loading.download_plan import DownloadPlan
    from moechat.loading.model import Report

# What a home connection may give; the time is said to be at this rate, as nobody knows the real one before.
_RATE_BITS = 100_000_000
_TOO_LITTLE = 1 << 20
_DEFAULT_BITS = 4


@dataclass(frozen=True)
class DownloadCommand:
    """What was asked for.

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
        if self.bits not in BITS:
            raise UsageError(f"--bits is {self.bits}; this version knows {', '.join(map(str, BITS))}")


def download(command: DownloadCommand) -> int:
    """Plan, fetch, convert; returns the exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    _work(command, question=None)
    return 0


def download_to_run(model: str, bits: int | None, *, yes: bool, quiet: bool) -> bool:
    """Bring a model here because it is about to run; returns whether the user wanted that.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    command = DownloadCommand(model, _DEFAULT_BITS if bits is None else bits, quiet=quiet)
    return _work(command, question=None if yes else "Download and convert it now?", to_run=True)


def _work(command: DownloadCommand, question: str | None, *, to_run: bool = False) -> bool:
    ref = hub_model(command.model)
    here = ref.library_path(user_paths().models, command.bits)
    if is_offline():
        _say_what_is_here_offline(ref, here, command)
        return True
    say = (lambda _text: None) if command.quiet else print_notice
    remote = look_up(str(ref.repository), ref.revision, say)  # before seconds of importing torch
    if not (command.keep_source or command.dry_run or command.json) and _is_made_of(here, remote.commit):
        _say_here(remote.title, command)
        return True
    with LoadProgress(quiet=command.quiet) as progress:
        progress.say("reading what the model is made of")
        from moechat.loading.download import prepared

        notice = (lambda _text: None) if command.quiet else progress.notice
        with prepared(
            ref, remote, command.bits, user_paths(), keep_source=command.keep_source, notice=notice
        ) as work:
            if command.dry_run:
                progress.stop()
                if command.json:
                    write_json(_plan_json(work.plan, "planned"))
                else:
                    write_output(sys.stdout, _described(work.plan) + "\n")
                return True
            return _run(work, command, question, progress, to_run=to_run)


def _run(
    work: Download, command: DownloadCommand, question: str | None, progress: LoadProgress, *, to_run: bool
) -> bool:
    plan = work.plan
    if plan.finished:
        progress.stop()
        work.note()
        _say_here(plan.remote.title, command)
        if command.json:
            write_json(_plan_json(plan, "already here"))
        return True
    if not command.quiet or question is not None:
        progress.stop()
        for line in _described(plan).split("\n"):
            print_notice(line)
    plan.require_disk()
    if question is not None and not ask(question, default=True):
        print_notice("nothing was downloaded")
        return False
    facts = _plan_json(plan, "finished") if command.json else None  # its config.json goes with the download
    progress.start()
    started = time.monotonic()
    reached = _Reached(progress)
    try:
        work.run(reached, progress.notice if not command.quiet else lambda _text: None)
    except BaseException as error:
        progress.stop()
        if not command.quiet and not isinstance(error, Exception):  # Ctrl-C, or a signal
            print_notice(reached.text)
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


class _Reached:
    """Passes reports on, and knows the last one of what has come."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "download":
            self._last = progress
        self._report(progress)

    @property
    def text(self) -> str:
        """What is kept of a download that was stopped."""
        if self._last is None:
            return "stopped; the same command begins again"
        done, total = format_bytes(self._last.done), format_bytes(self._last.total or 0)
        return f"stopped: {done} of {total} are here or converted; the same command goes on"


def _say_what_is_here_offline(ref: ModelRef, here: Path, command: DownloadCommand) -> None:
    """Without a network a model that is here will do.

    Raises:
        OfflineError: It is not here, or more was asked for.
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
    _say_here(f"{ref.name} ({commit[:12]})", command)
    if not command.quiet:
        print_notice("(HF_HUB_OFFLINE is set: nobody was asked for a newer one)")


def _is_made_of(store: Path, commit: str) -> bool:
    """Whether a store is here, of that commit and not obviously damaged; without importing torch."""
    if stored_commit(store) != commit:
        return False
    from moechat.store.store import Store

    try:
        Store.open(store)
    except StoreDamagedError:
        return False
    return True


def _say_here(title: str, command: DownloadCommand) -> None:
    if not command.quiet:
        print_notice(f"{title} with {command.bits} bits is here already: moechat run {command.model}")


def _described(plan: DownloadPlan) -> str:
    """What it takes, a line for each thing."""
    licence = f", licence {one_line(plan.remote.licence)}" if plan.remote.licence else ""
    lines = [
        f"{plan.remote.title}{licence}",
        f"download  {_to_come(plan)}",
        f"store     {format_bytes(plan.store_bytes)} with {plan.bits} bits, in {plan.destination}",
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
        least: The least that it runs with; ``None`` where nobody knows.
        everything: About what keeps all of it in memory.
        available: What there is.
    """

    least: int | None
    everything: int | None
    available: int


def _memory(plan: DownloadPlan) -> _Memory:
    import moechat
    from moechat.hardware.memory import available_bytes

    least: int | None = None
    try:
        moechat.plan(str(plan.config), bits=plan.bits, ram=_TOO_LITTLE)
    except DoesNotFitError as error:
        least = error.least_bytes
    except MoechatError:  # a plan is more than a download needs
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
    return plan.missing_bytes * 8 / _RATE_BITS


def _time(plan: DownloadPlan) -> str:
    parts = [f"{format_seconds(_download_seconds(plan))} of downloading at 100 Mbit/s"]
    if plan.convert_s is not None:
        overlap = "; they overlap" if plan.overlaps else ""
        parts.append(f"about {format_seconds(plan.convert_s)} of converting on this machine{overlap}")
    return ", ".join(parts)


def _plan_json(plan: DownloadPlan, status: str) -> dict[str, Any]:
    """The same for programs; bytes and seconds, as they were before anything came."""
    memory = _memory(plan)
    return {
        "status": status,
        "name": plan.name,
        "repository": plan.remote.repository,
        "revision": plan.remote.revision,
        "commit": plan.remote.commit,
        "licence": plan.remote.licence,
        "bits": plan.bits,
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
        "destination": str(plan.destination),
        "finished": plan.finished or status == "finished",
    }
