"""What a download takes, from the configuration and the headers of its shards alone."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moechat.config import Paths
from moechat.errors import CheckpointError, DoesNotFitError, StoreDamagedError, UnsupportedModelError
from moechat.hardware.identity import existing_parent
from moechat.hub.library import KEPT
from moechat.hub.names import ModelRef
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.transfer import PART_SUFFIX, Transfer
from moechat.store.checkpoint import INDEX_FILE, SINGLE_FILE, is_kept, read_index
from moechat.store.convert import finished_files
from moechat.store.files import format_bytes
from moechat.store.outline import SideFile, StoreOutline, outline_store
from moechat.store.quantizer import choose_solver, make_packer
from moechat.store.source import CheckpointPlan
from moechat.store.store import Store
from moechat.store.supply import AnnouncedCheckpoint, Shard, ShardSupply, most_bytes_at_once
from moechat.store.workspace import workspace_path

_CONFIG = "config.json"
ASIDE = ".aside"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_READERS = 8
_MANIFEST_ROOM = 2 << 20
_SAMPLE_NEURONS = 256
_SAMPLE_WEIGHTS = 1 << 20


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
class Selection:
    """The files of a repository that a store is made of."""

    side: tuple[RemoteFile, ...]
    shards: dict[str, RemoteFile]
    index: dict[str, str]


def source_path(paths: Paths, remote: RemoteRepository) -> Path:
    """Where shards of a repository at its commit lie while they are needed, or stay if they are kept."""
    name = f"{remote.repository.replace('/', '--')}@{remote.commit[:12]}"
    return paths.sources / name


def cached_file(remote: RemoteRepository, name: str) -> Path | None:
    """A file of the repository in the cache of huggingface_hub (``HF_HOME``), where another tool left it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(remote.repository, name, revision=remote.commit)
    return Path(found) if isinstance(found, str) else None


def select(remote: RemoteRepository, transfer: Transfer, directory: Path) -> Selection:
    """Choose the files, by an allow-list; configuration and index are fetched into ``directory`` for it.

    Raises:
        CheckpointError: A file is missing, or the hub does not describe it.
        UnsupportedModelError: There are no safetensors weights.
        MoechatError: The hub cannot be read.
    """
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
    return Selection(tuple(side.values()), {name: files[name] for name in names}, index)


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


def read_headers(transfer: Transfer, selection: Selection) -> dict[str, bytes]:
    """The first bytes of every shard, several at once; see :meth:`Transfer.read_header`."""
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


def announced(
    directory: Path, remote: RemoteRepository, selection: Selection, headers: dict[str, bytes]
) -> AnnouncedCheckpoint:
    """The checkpoint as far as its headers tell, identified by repository, commit and hashes."""
    shards = {
        name: Shard(directory / name, headers[name], file.size) for name, file in selection.shards.items()
    }
    # Licence and card count here: all of it is one commit.
    files = {file.path: [file.size, file.identity] for file in (*selection.side, *selection.shards.values())}
    return AnnouncedCheckpoint(directory, shards, selection.index, [remote.repository, remote.commit, files])


def make_plan(
    ref: ModelRef,
    remote: RemoteRepository,
    selection: Selection,
    checkpoint: AnnouncedCheckpoint,
    plan: CheckpointPlan,
    bits: int,
    paths: Paths,
    keep_source: bool,
) -> tuple[frozenset[str], DownloadPlan]:
    """Names of the shards that are still needed, and what it all takes."""
    destination = ref.library_path(paths.models, bits)
    source = source_path(paths, remote)
    keep = keep_source or (source / KEPT).exists()
    sizes = {name: file.size for name, file in selection.shards.items()}
    outline = outline_store(checkpoint, plan, bits)
    supply = ShardSupply(checkpoint, plan.dense_keys, _Nowhere(), source / ASIDE, keep=keep)
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
        free_bytes=shutil.disk_usage(existing_parent(paths.models)).free,
        convert_s=_convert_seconds(plan, bits),
        finished=finished,
    )
    return needed, made


class _Nowhere:
    """No shards: for plans."""

    def fetch(self, name: str) -> Path:
        raise AssertionError(f"a plan brings no shard, and not {name}")

    def discard(self, name: str) -> None:
        raise AssertionError(f"a plan has no shard to let go, and not {name}")


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
