"""A model from the hub becomes a store: planned from headers, then fetched and converted shard by shard."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from moechat.config import Paths
from moechat.hub.leftovers import note_variant
from moechat.hub.library import KEPT
from moechat.hub.names import ModelRef
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.transfer import PART_SUFFIX, Transfer, is_whole
from moechat.loading.download_plan import ASIDE, DownloadPlan, make_plan
from moechat.loading.model import Progress, Report
from moechat.loading.read_ahead import Background, ReadAhead
from moechat.loading.selection import (
    MARK,
    Selection,
    announced,
    cached_file,
    read_headers,
    select,
    source_path,
    weights_mark,
)
from moechat.models.mapping import plan_checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.files import called, explained
from moechat.store.lock import exclusive_lock
from moechat.store.renewal import note_revision
from moechat.store.store import Store
from moechat.store.supply import ShardSupply

Notice = Callable[[str], None]
_COPY_CHUNK = 8 << 20


class Download:
    """One model on its way from the hub into the library; see :func:`prepared`.

    Attributes:
        plan: What it takes.
    """

    def __init__(
        self,
        ref: ModelRef,
        transfer: Transfer,
        selection: Selection,
        headers: dict[str, bytes],
        plan: DownloadPlan,
        paths: Paths,
        keep_source: bool,
        needed: frozenset[str],
    ) -> None:
        """Use :func:`prepared`."""
        self.plan = plan
        self._ref = ref
        self._transfer = transfer
        self._selection = selection
        self._headers = headers
        self._source = source_path(paths, transfer.remote, selection)
        self._asked_to_keep = keep_source
        self._keep = keep_source or (self._source / KEPT).exists()
        self._state = paths.state
        self._needed = needed

    def run(self, report: Report, notice: Notice) -> Store:
        """Fetch and convert, once; what an interrupted run left is used.

        Files come in a thread of their own, which has ended when this returns or raises (see
        :class:`Background` for the one exception). Callbacks run in the calling thread, and may raise
        ``KeyboardInterrupt``.

        Args:
            report: Called with stage ``download`` all the time, ``wait`` while another process works on it.
            notice: Called with lines about lost connections.

        Raises:
            MoechatError: See :mod:`moechat.errors`; a later call continues.
        """
        source = self._source
        with explained("downloading", source):
            source.parent.mkdir(parents=True, exist_ok=True)
            lock = source.parent / f".{source.name}.lock"
            waiting = Progress("wait", 0, None, "another process is downloading this model")
            with exclusive_lock(lock, lambda: report(waiting)):
                # Whoever worked on it before may have been asked to keep it.
                self._keep = self._keep or (source / KEPT).exists()
                source.mkdir(exist_ok=True)
                (source / MARK).write_text(weights_mark(self._selection), "ascii")
                note_variant(source, self._ref.variant)
                with Background(self._transfer.stop.stop) as background:
                    store = self._fetch_and_convert(background, report, notice)
                if self._keep:
                    (source / KEPT).touch()
                    shutil.rmtree(source / ASIDE, ignore_errors=True)
                else:
                    shutil.rmtree(source, ignore_errors=True)
        return store

    def note(self) -> None:
        """Where nothing is left to do: let the store know that the commit asked for has the same weights,
        and shards that were asked for stay, though the run that fetched them did not come to its end.

        Raises:
            MoechatError: It cannot be written, or is damaged.
        """
        note_revision(self.plan.destination, self._transfer.remote.commit, self._state)
        if self._asked_to_keep and self._source.is_dir():
            with explained("keeping shards", self._source):
                (self._source / KEPT).touch()

    def _fetch_and_convert(self, background: Background, report: Report, notice: Notice) -> Store:
        state = _State(self.plan.download_bytes, report)
        state.done = self._skipped()
        transfer = replace(
            self._transfer, advance=background.relayed(state.advance), notice=background.relayed(notice)
        )
        for file in self._selection.side:
            state.waits_for(file.path)
            background.begin(partial(transfer.fetch, file, self._source / file.path))
            background.wait()
        checkpoint = announced(self._source, transfer.remote, self._selection, self._headers)
        plan = plan_checkpoint(checkpoint)
        shards = _HubShards(self._source, self._selection.shards, transfer)
        ahead = ReadAhead(shards, background, state.waits_for, ahead=self.plan.reads_ahead)
        supply = ShardSupply(checkpoint, plan.dense_keys, ahead, self._source / ASIDE, keep=self._keep)

        def on_convert(event: ConvertProgress) -> None:
            stage = {"waiting": "wait", "checking": "verify"}.get(event.stage, "download")
            if stage != "download":
                report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))
                return
            state.detail = f"converting {event.detail}"
            background.listen()
            state.show()

        store = convert(
            checkpoint,
            plan,
            self.plan.destination,
            bits=self.plan.bits,
            source_name=self._ref.name,
            revision=transfer.remote.commit,
            progress=on_convert,
            supply=supply,
        )
        if self._keep:
            # Some may not have been needed any more by a conversion that was nearly finished.
            for name in self._selection.shards:
                state.waits_for(name)
                background.begin(partial(shards.fetch_own, name))
                background.wait()
        return store

    def _skipped(self) -> int:
        """Bytes that are neither here nor needed: their part of the store is finished."""
        side = sum(file.size for file in self._selection.side)
        needed = sum(self._selection.shards[name].size for name in self._needed)
        return self.plan.download_bytes - side - needed


class _State:
    """Where a download stands, for its reports; it belongs to the thread that makes them.

    Attributes:
        done: Bytes that have come, or need not.
        detail: What is waited for or converted.
    """

    def __init__(self, total: int, report: Report) -> None:
        self.done = 0
        self.detail = ""
        self._total = total
        self._report = report

    def advance(self, size: int) -> None:
        self.done += size
        self.show()

    def waits_for(self, name: str) -> None:
        self.detail = name
        self.show()

    def show(self) -> None:
        self._report(Progress("download", min(self.done, self._total), self._total, self.detail))


class _HubShards:
    """Shards from the hub, or from its cache on this machine; those of the cache are only read."""

    def __init__(self, directory: Path, files: dict[str, RemoteFile], transfer: Transfer) -> None:
        self._directory = directory
        self._files = files
        self._transfer = transfer
        self._whole: set[str] = set()  # checked by this run

    def fetch(self, name: str) -> Path:
        cached = self._cached(name)
        if cached is None:
            self.fetch_own(name)
            return self._directory / name
        self._transfer.advance(self._files[name].size)
        return cached

    def fetch_own(self, name: str) -> None:
        """Into the directory, whatever the cache holds."""
        own = self._directory / name
        cached = self._cached(name)
        if cached is not None:
            # Under the name of what is not whole yet: it goes on from there, as after any other end.
            part = own.with_name(own.name + PART_SUFFIX)
            part.unlink(missing_ok=True)
            with open(cached, "rb") as source, open(part, "wb") as target:
                while data := source.read(_COPY_CHUNK):
                    self._transfer.stop.check()
                    target.write(data)
        if name not in self._whole or not own.exists():
            self._transfer.fetch(self._files[name], own)
            self._whole.add(name)

    def expect(self, name: str | None) -> None:
        """It comes when it is asked for."""

    def discard(self, name: str) -> None:
        self._whole.discard(name)
        (self._directory / name).unlink(missing_ok=True)

    def _cached(self, name: str) -> Path | None:
        if (self._directory / name).exists():
            return None
        cached = cached_file(self._transfer.remote, name)
        whole = cached is not None and is_whole(cached, self._files[name], self._transfer.stop.check)
        return cached if whole else None


def _once(notice: Notice) -> Notice:
    """Say the same thing of several files once: headers are read many at a time."""
    said: set[str] = set()

    def say(text: str) -> None:
        _, _, what = text.partition(": ")
        if what not in said:
            said.add(what)
            notice(text)

    return say


@contextmanager
def prepared(
    ref: ModelRef, remote: RemoteRepository, bits: int, paths: Paths, *, keep_source: bool, notice: Notice
) -> Iterator[Download]:
    """Find out from configuration and headers alone what a download takes, and that its result can be used.

    Args:
        ref: The name asked for.
        remote: What the hub says of it.
        bits: Of an expert weight.
        paths: The user's directories.
        keep_source: Shards stay.
        notice: Called with lines about lost connections.

    Raises:
        UnsupportedModelError: moechat cannot run the model.
        CheckpointError: The repository is malformed.
        MoechatError: The hub cannot be read.
    """
    transfer = Transfer(remote, lambda _size: None, _once(notice))
    with (
        tempfile.TemporaryDirectory(prefix="moechat-") as temporary,
        called(Path(temporary), remote.title),
    ):
        directory = Path(temporary)
        selection = select(remote, transfer, directory, ref.variant)
        headers = read_headers(transfer, selection)
        checkpoint = announced(directory, remote, selection, headers)
        plan = plan_checkpoint(checkpoint)
        needed, made = make_plan(ref, remote, selection, checkpoint, plan, bits, paths, keep_source)
        yield Download(ref, transfer, selection, headers, made, paths, keep_source, needed)
