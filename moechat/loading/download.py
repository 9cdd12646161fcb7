"""A model from the hub becomes a store: planned from headers, then fetched and converted shard by shard."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moechat.config import Paths
from moechat.hub.library import KEPT
from moechat.hub.names import ModelRef
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.transfer import Transfer, is_whole
from moechat.loading.download_plan import (
    ASIDE,
    DownloadPlan,
    Selection,
    announced,
    cached_file,
    make_plan,
    read_headers,
    select,
    source_path,
)
from moechat.loading.model import Progress, Report
from moechat.models.mapping import plan_checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.files import explained
from moechat.store.lock import exclusive_lock
from moechat.store.store import Store
from moechat.store.supply import ShardSupply

Notice = Callable[[str], None]


class Download:
    """One model on its way from the hub into the library; see :func:`prepared`.

    Attributes:
        plan: What it takes.
    """

    def __init__(
        self,
        ref: ModelRef,
        remote: RemoteRepository,
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
        self._remote = remote
        self._selection = selection
        self._headers = headers
        self._source = source_path(paths, remote)
        self._keep = keep_source or (self._source / KEPT).exists()
        self._needed = needed

    def run(self, report: Report, notice: Notice) -> Store:
        """Fetch and convert; what an interrupted run left is used.

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
                source.mkdir(exist_ok=True)
                if self._keep:
                    (source / KEPT).touch()
                store = self._fetch_and_convert(report, notice)
                if self._keep:
                    shutil.rmtree(source / ASIDE, ignore_errors=True)
                else:
                    shutil.rmtree(source, ignore_errors=True)
        return store

    def _fetch_and_convert(self, report: Report, notice: Notice) -> Store:
        state = _State(self.plan.download_bytes, report)
        state.done = self._skipped()
        transfer = Transfer(self._remote, state.advance, notice)
        for file in self._selection.side:
            state.detail = file.path
            transfer.fetch(file, self._source / file.path)
        checkpoint = announced(self._source, self._remote, self._selection, self._headers)
        plan = plan_checkpoint(checkpoint)
        shards = _HubShards(self._source, self._selection.shards, transfer, state)
        supply = ShardSupply(checkpoint, plan.dense_keys, shards, self._source / ASIDE, keep=self._keep)

        def on_convert(event: ConvertProgress) -> None:
            stage = {"waiting": "wait", "checking": "verify"}.get(event.stage, "download")
            if stage == "download":
                state.show(f"converting {event.detail}")
            else:
                report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))

        store = convert(
            checkpoint,
            plan,
            self.plan.destination,
            bits=self.plan.bits,
            source_name=self._ref.name,
            revision=self._remote.commit,
            progress=on_convert,
            supply=supply,
        )
        if self._keep:
            # Some may not have been needed any more by a conversion that was nearly finished.
            for name in self._selection.shards:
                shards.fetch_own(name)
        return store

    def _skipped(self) -> int:
        """Bytes that are neither here nor needed: their part of the store is finished."""
        side = sum(file.size for file in self._selection.side)
        needed = sum(self._selection.shards[name].size for name in self._needed)
        return self.plan.download_bytes - side - needed


class _State:
    """Where a download stands, for its reports."""

    def __init__(self, total: int, report: Report) -> None:
        self.done = 0
        self.detail = ""
        self._total = total
        self._report = report

    def advance(self, size: int) -> None:
        self.done += size
        self.show(self.detail)

    def show(self, detail: str) -> None:
        self._report(Progress("download", min(self.done, self._total), self._total, detail))


class _HubShards:
    """Shards from the hub, or from its cache on this machine; those of the cache are only read."""

    def __init__(
        self, directory: Path, files: dict[str, RemoteFile], transfer: Transfer, state: _State
    ) -> None:
        self._directory = directory
        self._files = files
        self._transfer = transfer
        self._state = state

    def fetch(self, name: str) -> Path:
        cached = self._cached(name)
        if cached is None:
            return self.fetch_own(name)
        self._state.advance(self._files[name].size)
        return cached

    def fetch_own(self, name: str) -> Path:
        """Into the directory, whatever the cache holds."""
        own = self._directory / name
        cached = self._cached(name)
        if cached is not None:
            shutil.copyfile(cached, own)
        self._transfer.fetch(self._files[name], own)
        return own

    def _cached(self, name: str) -> Path | None:
        self._state.detail = name
        if (self._directory / name).exists():
            return None
        cached = cached_file(self._transfer.remote, name)
        return cached if cached is not None and is_whole(cached, self._files[name]) else None

    def discard(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)


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
    transfer = Transfer(remote, lambda _size: None, notice)
    with tempfile.TemporaryDirectory(prefix="moechat-") as temporary:
        directory = Path(temporary)
        selection = select(remote, transfer, directory)
        headers = read_headers(transfer, selection)
        checkpoint = announced(directory, remote, selection, headers)
        plan = plan_checkpoint(checkpoint)
        needed, made = make_plan(ref, remote, selection, checkpoint, plan, bits, paths, keep_source)
        yield Download(ref, remote, selection, headers, made, paths, keep_source, needed)
