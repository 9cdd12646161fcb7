"""Downloads a model into a store: plans from headers, then fetches and converts shard by shard."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from moechat.calibration.calibration import calibrates, calibration_of
from moechat.config import Paths
from moechat.fetch.download_plan import SAVED_DENSE, DownloadPlan, choose_calibration, make_plan
from moechat.fetch.file_selection import (
    WEIGHTS_ID_FILE,
    Selection,
    cached_file,
    checkpoint_from_headers,
    read_headers,
    select_files,
    source_path,
    weights_id,
)
from moechat.fetch.finished_shards import remove_shards
from moechat.fetch.prefetch import BackgroundCall, PrefetchingSource
from moechat.fetch.repository import RemoteFile, RemoteRepository
from moechat.fetch.transfer import PART_SUFFIX, Transfer, is_whole
from moechat.hub.leftovers import record_variant
from moechat.hub.library import KEEP_MARK
from moechat.hub.model_ref import ModelRef
from moechat.loading.model import Progress, Report
from moechat.models.assets import require_assets
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.files import called, explained
from moechat.store.kept import choose_bits
from moechat.store.lock import exclusive_lock
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.quantizer import CALIBRATED, quantizer_of
from moechat.store.range_sums import RangeSums
from moechat.store.revision import record_revision
from moechat.store.shard_supply import FetchedShard, ShardSupply
from moechat.store.store import Store
from moechat.store.streamed_checkpoint import Shard

Notice = Callable[[str], None]
_COPY_CHUNK = 8 << 20


class Download:
    """The download of one model into the library; see :func:`prepare_download`.

    Attributes:
        plan: Sizes, times and destination.
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
        """Use :func:`prepare_download`."""
        self.plan = plan
        self._ref = ref
        self._transfer = transfer
        self._selection = selection
        self._headers = headers
        self._source = source_path(paths, transfer.remote, selection)
        self._keep_requested = keep_source
        self._keep = keep_source or (self._source / KEEP_MARK).exists()
        self._paths = paths
        self._needed = needed

    def run(self, report: Report, notice: Notice, *, repair: Collection[str] | None = None) -> Store:
        """Fetch and convert, resuming an interrupted run. Call once.

        Files are fetched in a background thread, which has ended when this returns or raises (see
        :class:`BackgroundCall` for the exception). Callbacks run in the calling thread and may raise
        ``KeyboardInterrupt``.

        Args:
            report: Receives progress: stage ``download``, or ``wait`` while another process downloads the
                model.
            notice: Receives messages about lost connections.
            repair: Make only these files of the finished store again, see
                :func:`moechat.store.convert.convert`.

        Raises:
            MoechatError: See :mod:`moechat.errors`; another run resumes.
        """
        source = self._source
        with explained("downloading", source):
            source.parent.mkdir(parents=True, exist_ok=True)
            lock = source.parent / f".{source.name}.lock"
            waiting = Progress("wait", 0, None, "another process is downloading this model")
            with exclusive_lock(lock, lambda: report(waiting)):
                # The process that held the lock may have been started with --keep-source.
                self._keep = self._keep or (source / KEEP_MARK).exists()
                source.mkdir(exist_ok=True)
                (source / WEIGHTS_ID_FILE).write_text(weights_id(self._selection), "ascii")
                record_variant(source, self._ref.variant)
                with BackgroundCall(self._transfer.stop.stop) as background:
                    store = self._fetch_and_convert(background, report, notice, repair)
                if self._keep:
                    (source / KEEP_MARK).touch()
                    shutil.rmtree(source / SAVED_DENSE, ignore_errors=True)
                else:
                    shutil.rmtree(source, ignore_errors=True)
        return store

    def record_finished(self) -> None:
        """Update a store that is finished already.

        Records the requested commit, which has the same weights. Shards that an interrupted run left are kept
        on request; else they are removed, unless a conversion with other bits may need them.

        Raises:
            MoechatError: The store cannot be written, or is damaged.
        """
        record_revision(self.plan.destination, self._transfer.remote.commit, self._paths.state)
        if self._keep_requested and self._source.is_dir():
            with explained("keeping shards", self._source):
                (self._source / KEEP_MARK).touch()
        elif not self._keep:
            remove_shards(self._ref, self._paths)

    def _fetch_and_convert(
        self,
        background: BackgroundCall,
        report: Report,
        notice: Notice,
        repair: Collection[str] | None,
    ) -> Store:
        state = _State(self.plan.download_bytes, report)
        state.done = self._skipped_bytes()
        transfer = replace(
            self._transfer,
            advance=background.in_owner_thread(state.advance),
            notice=background.in_owner_thread(notice),
        )
        for file in self._selection.side:
            state.on_wait(file.path)
            background.start(partial(transfer.fetch, file, self._source / file.path))
            background.wait()
        checkpoint = checkpoint_from_headers(self._source, transfer.remote, self._selection, self._headers)
        old = None if repair is None else Manifest.read(self.plan.destination / MANIFEST_NAME)
        plan = plan_checkpoint(checkpoint, heads=old is None or old.mtp is not None)
        require_assets(checkpoint.path)
        shards = _HubShards(self._source, self._selection.shards, transfer, checkpoint.shards)
        source = PrefetchingSource(shards, background, state.on_wait, ahead=self.plan.reads_ahead)
        calibration, quantizer = None, "auto"
        if old is not None:
            made_by = old.quantisation.solver
            quantizer = quantizer_of(made_by)
            if made_by == CALIBRATED:
                calibration = calibration_of(checkpoint, plan, self.plan.bits, notice)
        elif self.plan.calibrated:
            calibration = calibration_of(checkpoint, plan, self.plan.bits, notice)
        elif self.plan.uncalibrated is not None:
            notice(f"experts are quantised without calibration: {self.plan.uncalibrated}")
        supply = ShardSupply(
            checkpoint,
            plan.dense_keys,
            source,
            self._source / SAVED_DENSE,
            keep=self._keep,
            reads={} if calibration is None else plan.reads_by_layer(),
        )

        def on_convert(event: ConvertProgress) -> None:
            if event.stage == "notice":
                notice(event.detail)
                return
            stage = {"waiting": "wait", "checking": "verify"}.get(event.stage, "download")
            if stage != "download":
                report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))
                return
            state.detail = f"converting {event.detail}"
            background.run_callbacks()
            state.show()

        store = convert(
            checkpoint,
            plan,
            self.plan.destination,
            bits=self.plan.bits,
            source_name=self._ref.name,
            revision=transfer.remote.commit,
            quantizer=quantizer,
            progress=on_convert,
            supply=supply,
            calibration=calibration,
            repair=repair,
        )
        if self._keep:
            # A resumed conversion does not fetch the shards of finished layers.
            for name in self._selection.shards:
                state.on_wait(name)
                background.start(partial(shards.fetch_into_directory, name))
                background.wait()
        return store

    def _skipped_bytes(self) -> int:
        """Bytes of shards that are not needed, because their part of the store is finished."""
        side = sum(file.size for file in self._selection.side)
        needed = sum(self._selection.shards[name].size for name in self._needed)
        return self.plan.download_bytes - side - needed


class _State:
    """The progress of a download; used by the calling thread only.

    Attributes:
        done: Bytes that arrived or are not needed.
        detail: The current file or conversion step.
    """

    def __init__(self, total: int, report: Report) -> None:
        self.done = 0
        self.detail = ""
        self._total = total
        self._report = report

    def advance(self, size: int) -> None:
        self.done += size
        self.show()

    def on_wait(self, name: str) -> None:
        self.detail = name
        self.show()

    def show(self) -> None:
        self._report(Progress("download", min(self.done, self._total), self._total, self.detail))


class _HubShards:
    """Fetches shards from the hub; reads those in the cache of huggingface_hub in place."""

    def __init__(
        self,
        directory: Path,
        files: dict[str, RemoteFile],
        transfer: Transfer,
        shards: Mapping[str, Shard],
    ) -> None:
        self._directory = directory
        self._files = files
        self._transfer = transfer
        # Of what has been checked in this process.
        self._sums: dict[str, RangeSums] = {}
        self._shards = shards

    def fetch(self, name: str) -> FetchedShard:
        cached = self._cached(name)
        if cached is None:
            self.fetch_into_directory(name)
            return FetchedShard(self._directory / name, self._sums[name].found)
        path, sums = cached
        self._transfer.advance(self._files[name].size)
        return FetchedShard(path, sums.found)

    def fetch_into_directory(self, name: str) -> None:
        """Fetch a shard into the directory, copying it from the cache if it is there."""
        own = self._directory / name
        cached = self._cached(name)
        if cached is not None:
            # Copied to the name of an unfinished download, so that an interrupted copy is resumed.
            part = own.with_name(own.name + PART_SUFFIX)
            part.unlink(missing_ok=True)
            with open(cached[0], "rb") as source, open(part, "wb") as target:
                while data := source.read(_COPY_CHUNK):
                    self._transfer.stop.check()
                    target.write(data)
        if name not in self._sums or not own.exists():
            sums = self._new_sums(name)
            self._transfer.fetch(self._files[name], own, sums)
            self._sums[name] = sums

    def expect(self, name: str | None) -> None:
        """Do nothing: shards are fetched when needed."""

    def discard(self, name: str) -> None:
        self._sums.pop(name, None)
        (self._directory / name).unlink(missing_ok=True)

    def _cached(self, name: str) -> tuple[Path, RangeSums] | None:
        if (self._directory / name).exists():
            return None
        cached, sums = cached_file(self._transfer.remote, name), self._new_sums(name)
        if cached is None or not is_whole(cached, self._files[name], self._transfer.stop.check, sums):
            return None
        return cached, sums

    def _new_sums(self, name: str) -> RangeSums:
        return RangeSums(self._shards[name].ranges)


def _without_repeats(notice: Notice) -> Notice:
    """Drop messages that repeat for another file: several headers are read at a time."""
    shown: set[str] = set()

    def show(text: str) -> None:
        _, _, reason = text.partition(": ")
        if reason not in shown:
            shown.add(reason)
            notice(text)

    return show


@contextmanager
def prepare_download(
    ref: ModelRef,
    remote: RemoteRepository,
    bits: int | None,
    paths: Paths,
    *,
    keep_source: bool,
    notice: Notice,
) -> Iterator[Download]:
    """Plan a download from configuration and headers alone, and check that the model is supported.

    Args:
        ref: The requested model.
        remote: Its repository.
        bits: Bits per expert weight that the user wants; ``None``: see
            :func:`moechat.store.kept.choose_bits`.
        paths: The user's directories.
        keep_source: Keep the shards.
        notice: Receives messages about lost connections, and what a conversion loses.

    Raises:
        UnsupportedModelError: The model is not supported.
        CheckpointError: The repository is malformed.
        MoechatError: The hub cannot be read.
    """
    transfer = Transfer(remote, lambda _size: None, _without_repeats(notice))
    with (
        tempfile.TemporaryDirectory(prefix="moechat-") as temporary,
        called(Path(temporary), remote.title),
    ):
        directory = Path(temporary)
        selection = select_files(remote, transfer, directory, ref.variant)
        headers = read_headers(transfer, selection)
        checkpoint = checkpoint_from_headers(directory, remote, selection, headers)
        plan = plan_checkpoint(checkpoint)
        chosen, lost = choose_bits(bits, plan)
        if lost:
            notice(lost)
        files = {file.path for file in selection.side}.union(os.listdir(checkpoint.path))
        needed, made = choose_calibration(
            lambda calibrated: make_plan(
                ref, remote, selection, checkpoint, plan, chosen, paths, keep_source, calibrated=calibrated
            ),
            calibrates(plan, chosen, files),
        )
        yield Download(ref, transfer, selection, headers, made, paths, keep_source, needed)
