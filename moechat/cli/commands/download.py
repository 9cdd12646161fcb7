"""``moechat download``: shows sizes and times, then downloads; ``moechat run`` uses it for missing models."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.download_offer import find_offer, open_download
from moechat.cli.commands.download_text import describe, plan_json
from moechat.cli.commands.library_list import write_json
from moechat.cli.terminal.consoles import confirm, print_notice, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes, format_seconds
from moechat.config import user_paths
from moechat.errors import MoechatError, StoreDamagedError, UsageError
from moechat.fetch.finished_shards import remove_shards
from moechat.fetch.hub_client import is_offline
from moechat.fetch.hub_errors import offline_error
from moechat.geometry import DEFAULT_BITS, KEEP
from moechat.hub.model_ref import USUAL_FORMS, ModelRef, hub_model, stored_commit
from moechat.hub.names import resolve
from moechat.options import BITS
from moechat.validation import require_choice

if TYPE_CHECKING:
    from moechat import Progress
    from moechat.fetch.download import Download
    from moechat.fetch.sources import Choice
    from moechat.loading.model import Report


@dataclass(frozen=True)
class DownloadCommand:
    """Arguments of ``moechat download``, and the options of loading of a run that needs the model.

    Raises:
        UsageError: A value is out of range.
    """

    model: str
    bits: int | None = None
    dry_run: bool = False
    keep_source: bool = False
    quiet: bool = False
    json: bool = False
    load: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bits is not None:
            require_choice("--bits", self.bits, BITS)


def download(command: DownloadCommand) -> int:
    """Plan, fetch, convert; returns the exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    _work(command, question=None)
    return 0


def download_to_run(model: str, load: Mapping[str, Any], *, yes: bool, quiet: bool) -> bool:
    """Download a model before running it; returns whether the user agreed.

    Args:
        model: Its name.
        load: The options of loading that were given.
        yes: Do not ask.
        quiet: Show errors only.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    command = DownloadCommand(model, load.get("bits"), quiet=quiet, load=load)
    return _work(command, question=None if yes else "Download and convert it now?", to_run=True)


def _work(command: DownloadCommand, question: str | None, *, to_run: bool = False) -> bool:
    ref = hub_model(command.model)
    if is_offline():
        _check_offline(ref, command)
        return True
    say = (lambda _text: None) if command.quiet else print_notice
    offer = find_offer(command.model, ref, say)  # before seconds of importing torch
    if not (command.keep_source or command.dry_run or command.json):
        for title, bits in offer.stores_here(user_paths().models, command.bits, _is_made_of):
            remove_shards(ref, user_paths())
            _print_present(title, bits, command)
            return True
    with LoadProgress(quiet=command.quiet) as progress, ExitStack() as stack:
        notice = (lambda _text: None) if command.quiet else progress.notice
        if offer.sources:
            progress.say("choosing a source for this machine")
        choice = offer.choose(command.bits, command.load)
        progress.say("reading the model's headers")
        work, taken = open_download(
            offer,
            choice,
            command.bits,
            stack,
            keep_source=command.keep_source,
            notice=notice,
        )
        if command.dry_run:
            progress.stop()
            if command.json:
                write_json(plan_json(work.plan, "planned", taken, command.load))
            else:
                write_output(sys.stdout, describe(work.plan, taken, command.load) + "\n")
            return True
        return _run(work, taken, command, question, progress, to_run=to_run)


def _run(
    work: Download,
    choice: Choice | None,
    command: DownloadCommand,
    question: str | None,
    progress: LoadProgress,
    *,
    to_run: bool,
) -> bool:
    plan = work.plan
    if to_run and not plan.has_tokenizer:
        raise UsageError(
            f"{plan.remote.title} has no tokenizer, so it can neither read nor write text",
            hint=f"choose another repository of this model; moechat download {shlex.quote(command.model)} "
            "fetches it all the same",
        )
    if plan.finished:
        progress.stop()
        work.record_finished()
        _print_present(plan.remote.title, plan.bits, command)
        if command.json:
            write_json(plan_json(plan, "already here", choice, command.load))
        return True
    if not command.quiet or question is not None:
        progress.stop()
        for line in describe(plan, choice, command.load).split("\n"):
            print_notice(line)
    plan.require_disk()
    if question is not None and not confirm(question, default=True):
        print_notice("nothing was downloaded")
        return False
    facts = (
        plan_json(plan, "finished", choice, command.load) if command.json else None
    )  # the download deletes its config.json
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
            print_notice(f"moechat run {shlex.quote(_name_to_run(command, plan.remote.title))} talks to it")
    if facts is not None:
        write_json(facts)
    return True


def _name_to_run(command: DownloadCommand, title: str) -> str:
    """The user's name for the model, or its title if a converted directory has that name in the library."""
    try:
        ref = resolve(command.model, bits=command.bits)
    except MoechatError:  # the name matches several stores
        return title
    return title if ref.repository is None else command.model


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


def _check_offline(ref: ModelRef, command: DownloadCommand) -> None:
    """Without a network, accept a model in the library.

    Raises:
        OfflineError: It is not there, or an option needs the network.
    """
    forms = USUAL_FORMS if command.bits is None else (command.bits,)
    stores = {bits: ref.library_path(user_paths().models, bits) for bits in forms}
    commits = {bits: stored_commit(store) for bits, store in stores.items()}
    here = [bits for bits, commit in commits.items() if commit and _is_made_of(stores[bits], commit)]
    if not here or command.keep_source or command.dry_run or command.json:
        raise offline_error(str(ref.repository), ref.revision, command.bits or DEFAULT_BITS)
    _print_present(f"{ref.name} ({str(commits[here[0]])[:12]})", here[0], command)
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


def _print_present(title: str, bits: int, command: DownloadCommand) -> None:
    if not command.quiet:
        form = "" if bits == KEEP else f" with {bits} bits"
        name = shlex.quote(_name_to_run(command, title.partition(" ")[0]))
        print_notice(f"{title}{form} is here already: moechat run {name}")
