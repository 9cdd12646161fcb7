"""``moechat download``: what a model takes, then the model; ``moechat run`` does it for one not here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.cli.options import BITS
from moechat.cli.progress import LoadProgress, format_bytes, format_seconds
from moechat.cli.terminal import ask, neutralise, print_notice, write_output
from moechat.config import user_paths
from moechat.errors import DoesNotFitError, MoechatError, StoreDamagedError, UsageError
from moechat.hub.names import hub_model, stored_commit
from moechat.hub.remote import look_up

if TYPE_CHECKING:
    from moechat.loading.download import Download
    from moechat.loading.download_plan import DownloadPlan

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
    return _work(command, question=None if yes else "Download and convert it now?")


def _work(command: DownloadCommand, question: str | None) -> bool:
    ref = hub_model(command.model)
    remote = look_up(str(ref.repository), ref.revision)  # before seconds of importing torch
    here = ref.library_path(user_paths().models, command.bits)
    if not (command.keep_source or command.dry_run) and _is_made_of(here, remote.commit):
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
                write_output(sys.stdout, _described(work.plan) + "\n")
                return True
            return _run(work, command, question, progress)


def _run(work: Download, command: DownloadCommand, question: str | None, progress: LoadProgress) -> bool:
    plan = work.plan
    if plan.finished:
        progress.stop()
        _say_here(plan.title, command)
        return True
    if not command.quiet or question is not None:
        progress.stop()
        for line in _described(plan).split("\n"):
            print_notice(line)
    plan.require_disk()
    if question is not None and not ask(question, default=True):
        print_notice("nothing was downloaded")
        return False
    progress.start()
    work.run(progress, progress.notice if not command.quiet else lambda _text: None)
    return True


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
    licence = f", licence {plan.licence}" if plan.licence else ""
    others = plan.files - plan.weight_files
    lines = [
        f"{plan.title}{licence}",
        f"download  {format_bytes(plan.missing_bytes)} in {plan.weight_files} files of weights and {others} "
        f"others{_already(plan)}",
        f"store     {format_bytes(plan.store_bytes)} with {plan.bits} bits, in {plan.destination}",
        f"disk      {format_bytes(plan.disk_bytes)} while it is made; {format_bytes(plan.free_bytes)} free",
        f"memory    {_memory(plan)}",
        f"time      {_time(plan)}",
    ]
    return neutralise("\n".join(lines))


def _already(plan: DownloadPlan) -> str:
    here = plan.download_bytes - plan.missing_bytes
    if plan.finished:
        return ": all of it is here, converted"
    return f"; {format_bytes(here)} of {format_bytes(plan.download_bytes)} are done" if here else ""


def _memory(plan: DownloadPlan) -> str:
    """The least that the model runs with on the CPU, what keeps all of it in memory, and what there is."""
    import moechat
    from moechat.hardware.memory import available_bytes

    least: int | None = None
    try:
        moechat.plan(str(plan.config), bits=plan.bits, ram=_TOO_LITTLE)
    except DoesNotFitError as error:
        least = error.least_bytes
    except MoechatError:  # a plan is more than a download needs
        pass
    available = f"{format_bytes(available_bytes())} are available"
    if least is None:
        return available
    everything = format_bytes(least + plan.expert_bytes)
    return f"runs with {format_bytes(least)}, all in memory with about {everything}; {available}"


def _time(plan: DownloadPlan) -> str:
    seconds = plan.missing_bytes * 8 / _RATE_BITS
    parts = [f"{format_seconds(seconds)} of downloading at 100 Mbit/s"]
    if plan.convert_s is not None:
        parts.append(f"about {format_seconds(plan.convert_s)} of converting on this machine")
    return ", ".join(parts)
