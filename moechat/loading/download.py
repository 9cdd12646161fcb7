"""A model from the hub becomes a store: planned from headers, then fetched and converted shard by shard."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moechat.config import Paths
from moechat.errors import CheckpointError, DoesNotFitError, StoreDamagedError, UnsupportedModelError
from moechat.hub.library import KEPT
from moechat.hub.names import ModelRef
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.transfer import PART_SUFFIX, Transfer, is_whole
from moechat.loading.model import Progress, Report
from moechat.models.mapping import plan_checkpoint
from moechat.store.checkpoint import INDEX_FILE, SINGLE_FILE, is_kept, read_index
from moechat.store.convert import ConvertProgress, convert, finished_files
from moechat.store.files import explained, format_bytes
from moechat.store.lock import exclusive_lock
from moechat.store.outline import SideFile, StoreOutline, outline_store
from moechat.store.quantizer import choose_solver, make_packer
from moechat.store.source import CheckpointPlan
from moechat.store.store import Store
from moechat.store.supply import AnnouncedCheckpoint, Shard, ShardSupply, most_bytes_at_once
from moechat.store.workspace import workspace_path

_CONFIG = "config.json"
_ASIDE = ".aside"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_READERS = 8
_MANIFEST_ROOM = 2 << 20
_SAMPLE_NEURONS = 256
_SAMPLE_WEIGHTS = 1 << 20

Notice = Callable[[str], None]


@dataclass(frozen=True)
class DownloadPlan:
    """What a download takes, before its first shard.

    Attributes:
        title: Repository, revision and commit.
        licence: As the repository states it, or ``None``.
        bits: Of an expert weight.
        config: ``config.json``, for plans of memory; gone with the download.
        destination: The store's directory.
        files: Files that are fetched.
        weight_files: Shards among them.
        download_bytes: All of them.
        missing_bytes: What is still to come.
        store_bytes: The finished store.
        expert_bytes: Experts in it.
        disk_bytes: What the disk has to hold beyond what lies there already, at the fullest moment.
        free_bytes: Of the disk.
        convert_s: Estimated seconds of converting on this machine; ``None`` where nobody knows.
        finished: The store is here already, made of this very commit.
    """

    title: str
    licence: str | None
    bits: int
    config: Path
    destination: Path
    files: int
    weight_files: int
    download_bytes: int
    missing_bytes: int
    store_bytes: int
    expert_bytes: int
    disk_bytes: int
    free_bytes: int
    convert_s: float | None
    finished: bool

    def require_disk(self) -> None:
        """Refuse a disk that is too small.

        Raises:
            DoesNotFitError: The message has both numbers.
        """
        if self.disk_bytes > self.free_bytes:
            raise DoesNotFitError(
                f"{self.title} needs {format_bytes(self.disk_bytes)} more on the disk of "
                f"{self.destination.parent}, {format_bytes(self.free_bytes)} are free",
                hint=f"free {format_bytes(self.disk_bytes - self.free_bytes)}, choose fewer bits (--bits), "
                "or set MOECHAT_HOME to a directory on a larger disk",
            )


@dataclass(frozen=True)
class _Selection:
    """The files of a repository that a store is made of."""

    side: tuple[RemoteFile, ...]
    shards: dict[str, RemoteFile]
    index: dict[str, str]


class Download:
    """One model on its way from the hub into the library; see :func:`prepared`.

    Attributes:
        plan: What it takes.
    """

    def __init__(
        self,
        ref: ModelRef,
        remote: RemoteRepository,
        selection: _Selection,
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
                    shutil.rmtree(source / _ASIDE, ignore_errors=True)
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
        checkpoint = _announced(self._source, self._remote, self._selection, self._headers)
        plan = plan_checkpoint(checkpoint)
        shards = _HubShards(self._source, self._selection.shards, transfer, state)
        supply = ShardSupply(checkpoint, plan.dense_keys, shards, self._source / _ASIDE, keep=self._keep)

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
        selection = _select(remote, transfer, directory)
        headers = _read_headers(transfer, selection)
        checkpoint = _announced(directory, remote, selection, headers)
        plan = plan_checkpoint(checkpoint)
        needed, made = _plan(ref, remote, selection, checkpoint, plan, bits, paths, keep_source)
        yield Download(ref, remote, selection, headers, made, paths, keep_source, needed)


def source_path(paths: Paths, remote: RemoteRepository) -> Path:
    """Where shards of a repository at its commit lie while they are needed, or stay if they are kept."""
    name = f"{remote.repository.replace('/', '--')}@{remote.commit[:12]}"
    return paths.sources / name


def cached_file(remote: RemoteRepository, name: str) -> Path | None:
    """A file of the repository in the cache of huggingface_hub (``HF_HOME``), where another tool left it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(remote.repository, name, revision=remote.commit)
    return Path(found) if isinstance(found, str) else None


def _select(remote: RemoteRepository, transfer: Transfer, directory: Path) -> _Selection:
    """Choose the files, by an allow-list; configuration and index are fetched for it."""
    files = remote.files
    if _CONFIG not in files:
        raise CheckpointError(
            f"{remote.title} has no {_CONFIG}: it is no transformers model",
            hint=_other_formats(remote),
        )
    transfer.fetch(files[_CONFIG], directory / _CONFIG)
    side = {_CONFIG: files[_CONFIG], **{name: file for name, file in files.items() if is_kept(name)}}
    index: dict[str, str] = {}
    if SINGLE_FILE in files:
        names = [SINGLE_FILE]
    elif INDEX_FILE in files:
        transfer.fetch(files[INDEX_FILE], directory / INDEX_FILE)
        side[INDEX_FILE] = files[INDEX_FILE]
        index = read_index(directory)
        names = sorted(set(index.values()))
    else:
        raise UnsupportedModelError(
            f"{remote.title} has no safetensors weights{_seen(remote)}", hint=_other_formats(remote)
        )
    missing = [name for name in names if name not in files]
    if missing:
        raise CheckpointError(
            f"{remote.title} lacks {missing[0]} ({len(missing)} of {len(names)} shards are missing)",
            hint="its makers have not finished uploading it, or removed a part",
        )
    odd = [
        file.path for file in (*side.values(), *(files[name] for name in names)) if not _is_described(file)
    ]
    if odd:
        raise CheckpointError(f"the hub gives no size or hash for {odd[0]} of {remote.title}")
    return _Selection(tuple(side.values()), {name: files[name] for name in names}, index)


def _is_described(file: RemoteFile) -> bool:
    return file.size >= 0 and bool(file.identity)


def _seen(remote: RemoteRepository) -> str:
    pickle = next((name for name in sorted(remote.files) if name.lower().endswith(_PICKLES)), None)
    if pickle is not None:
        return f": they are pickles ({pickle}), which can run code when they are read"
    gguf = next((name for name in sorted(remote.files) if name.lower().endswith(".gguf")), None)
    return f": it holds GGUF files ({gguf})" if gguf else ""


def _other_formats(remote: RemoteRepository) -> str:
    return (
        f"take the repository of {remote.repository.partition('/')[2]} that has config.json and .safetensors"
    )


def _read_headers(transfer: Transfer, selection: _Selection) -> dict[str, bytes]:
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            return dict(
                zip(
                    selection.shards,
                    pool.map(transfer.read_header, selection.shards.values()),
                    strict=True,
                )
            )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _announced(
    directory: Path, remote: RemoteRepository, selection: _Selection, headers: dict[str, bytes]
) -> AnnouncedCheckpoint:
    shards = {
        name: Shard(directory / name, headers[name], file.size) for name, file in selection.shards.items()
    }
    # Licence and card count here: all of it is one commit.
    files = {file.path: [file.size, file.identity] for file in (*selection.side, *selection.shards.values())}
    return AnnouncedCheckpoint(directory, shards, selection.index, [remote.repository, remote.commit, files])


def _plan(
    ref: ModelRef,
    remote: RemoteRepository,
    selection: _Selection,
    checkpoint: AnnouncedCheckpoint,
    plan: CheckpointPlan,
    bits: int,
    paths: Paths,
    keep_source: bool,
) -> tuple[frozenset[str], DownloadPlan]:
    destination = ref.library_path(paths.models, bits)
    source = source_path(paths, remote)
    keep = keep_source or (source / KEPT).exists()
    sizes = {name: file.size for name, file in selection.shards.items()}
    outline = outline_store(checkpoint, plan, bits)
    supply = ShardSupply(checkpoint, plan.dense_keys, _Nowhere(), source / _ASIDE, keep=keep)
    side_bytes = sum(file.size for file in selection.side)
    store_bytes = outline.total_bytes + side_bytes - _side_bytes_in(outline)
    done = finished_files(checkpoint, plan, destination, bits=bits)
    missing = [file for file in outline.files if file.name not in done]
    needed = frozenset(sizes if keep else (name for file in missing for name in supply.shards_to_fetch(file)))
    here = sum(_bytes_here(source / name) for name in needed)
    here += sum(_bytes_here(source / file.path) for file in selection.side)
    total = side_bytes + sum(sizes.values())
    if keep:
        most = total + store_bytes
    else:
        most = side_bytes * 2 + most_bytes_at_once(
            supply.order(outline.files), supply, _dense_bytes(checkpoint, plan), sizes
        )
    cached = [
        name
        for name in needed
        if not (source / name).exists() and cached_file(remote, name) is not None and not keep
    ]
    missing_bytes = side_bytes + sum(sizes[name] for name in needed if name not in cached) - here
    taken = _disk_usage(workspace_path(destination)) + _disk_usage(source)
    finished = _is_finished(destination, checkpoint) and (not keep_source or missing_bytes <= 0)
    made = DownloadPlan(
        title=remote.title,
        licence=remote.licence,
        bits=bits,
        config=checkpoint.path / _CONFIG,
        destination=destination,
        files=len(selection.side) + len(sizes),
        weight_files=len(sizes),
        download_bytes=total,
        missing_bytes=max(0, missing_bytes),
        store_bytes=store_bytes,
        expert_bytes=len(plan.layers) * outline.geometry.layer_bytes,
        disk_bytes=0 if finished else max(0, most + _MANIFEST_ROOM - taken),
        free_bytes=_free(paths.models),
        convert_s=_convert_seconds(plan, bits),
        finished=finished,
    )
    return needed, made


class _Nowhere:
    """No shards: for plans."""

    def fetch(self, name: str) -> Path:
        raise NotImplementedError(name)

    def discard(self, name: str) -> None:
        raise NotImplementedError(name)


def _side_bytes_in(outline: StoreOutline) -> int:
    return sum(file.nbytes for file in outline.files if isinstance(file, SideFile))


def _dense_bytes(checkpoint: AnnouncedCheckpoint, plan: CheckpointPlan) -> dict[str, int]:
    dense = frozenset(plan.dense_keys)
    return {
        name: sum(entry.nbytes for key, entry in shard.tensors.items() if key in dense)
        for name, shard in checkpoint.shards.items()
    }


def _bytes_here(path: Path) -> int:
    for candidate in (path, path.with_name(path.name + PART_SUFFIX)):
        try:
            return candidate.stat().st_size
        except OSError:
            continue
    return 0


def _disk_usage(directory: Path) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _free(directory: Path) -> int:
    """Bytes free where a directory is, or will be."""
    for place in (directory, *directory.parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return 0


def _is_finished(destination: Path, checkpoint: AnnouncedCheckpoint) -> bool:
    try:
        store = Store.open(destination)
    except StoreDamagedError:  # it will be replaced
        return False
    return store.manifest.source.fingerprint == checkpoint.fingerprint()


def _convert_seconds(plan: CheckpointPlan, bits: int) -> float | None:
    """Estimate by quantising a little; nothing to estimate where values are copied, or a GPU does it."""
    if choose_solver("auto", bits) != "native":
        return None
    geometry = replace(
        plan.geometry(bits),
        num_experts=1,
        intermediate_size=min(plan.intermediate_size, _SAMPLE_NEURONS),
        hidden_size=min(plan.hidden_size, _SAMPLE_WEIGHTS // _SAMPLE_NEURONS),
        has_bias=False,
    )
    neurons, columns = geometry.intermediate_size, geometry.hidden_size
    values = np.random.default_rng(0).standard_normal((neurons, columns), dtype=np.float32)
    out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
    pack = make_packer(geometry, "native")
    times = []
    for _ in range(2):
        start = time.perf_counter()
        pack((values, values, np.ascontiguousarray(values.T)), None, out)
        times.append(time.perf_counter() - start)
    all_weights = 3 * plan.intermediate_size * plan.hidden_size * plan.num_experts * len(plan.layers)
    return min(times) * all_weights / (3 * neurons * columns)
