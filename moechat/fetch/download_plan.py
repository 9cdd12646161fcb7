"""What a download takes, from the configuration and the headers of its shards alone."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moechat.config import Paths
from moechat.errors import DoesNotFitError, StoreDamagedError
from moechat.hardware.identity import existing_parent
from moechat.hub.leftovers import disk_usage
from moechat.hub.library import KEPT
from moechat.hub.names import ModelRef
from moechat.hub.remote import RemoteRepository
from moechat.hub.transfer import PART_SUFFIX
from moechat.loading.selection import CONFIG, Selection, cached_file, source_path
from moechat.store.announced import AnnouncedCheckpoint
from moechat.store.convert import finished_files
from moechat.store.disk_room import most_bytes_at_once
from moechat.store.files import format_bytes
from moechat.store.outline import ExpertsFile, PlannedFile, SideFile, StoreOutline, outline_store
from moechat.store.quantizer import choose_solver, make_packer
from moechat.store.source import CheckpointPlan
from moechat.store.store import Store
from moechat.store.supply import ShardSupply
from moechat.store.workspace import workspace_path

ASIDE = ".aside"
_MANIFEST_ROOM = 2 << 20
_SAMPLE_NEURONS = 256
_SAMPLE_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class DownloadPlan:
    """What a download takes, before its first shard.

    Attributes:
        name: The model as ``moechat run`` takes it.
        remote: Repository and commit.
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
        ahead_bytes: The same if the next shard comes while others are converted.
        free_bytes: Of the disk.
        reads_ahead: The next shard comes while others are converted: the disk has room for it.
        overlaps: It does, and there is one for which that saves time.
        convert_s: Estimated seconds of converting on this machine; ``None`` where nobody knows.
        finished: The store is here already, made of this very commit.
    """

    name: str
    remote: RemoteRepository
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
    ahead_bytes: int
    free_bytes: int
    reads_ahead: bool
    overlaps: bool
    convert_s: float | None
    finished: bool

    def require_disk(self) -> None:
        """Refuse a disk that is too small.

        Raises:
            DoesNotFitError: The message has both numbers.
        """
        if self.disk_bytes > self.free_bytes:
            raise DoesNotFitError(
                f"{self.remote.title} needs {format_bytes(self.disk_bytes)} more on the disk of "
                f"{self.destination.parent}, {format_bytes(self.free_bytes)} are free",
                hint=f"free {format_bytes(self.disk_bytes - self.free_bytes)}, choose fewer bits (--bits), "
                "or set MOECHAT_HOME to a directory on a larger disk",
            )


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
    source = source_path(paths, remote, selection)
    keep = keep_source or (source / KEPT).exists()
    sizes = {name: file.size for name, file in selection.shards.items()}
    outline = outline_store(checkpoint, plan, bits)
    supply = ShardSupply(checkpoint, plan.dense_keys, _Nowhere(), source / ASIDE, keep=keep)
    side_bytes = sum(file.size for file in selection.side)
    # Of a GGUF model configuration and tokenizer are made, not fetched.
    store_bytes = outline.total_bytes + side_bytes - (0 if selection.is_gguf else _side_bytes_in(outline))
    done = finished_files(checkpoint, plan, destination, bits=bits)
    missing = [file for file in outline.files if file.name not in done]
    needed = frozenset(sizes if keep else (name for file in missing for name in supply.shards_to_fetch(file)))
    lying = {name: _bytes_here(source / name) for name in sizes}
    here = sum(lying[name] for name in needed)
    here += sum(_bytes_here(source / file.path) for file in selection.side)
    total = side_bytes + sum(sizes.values())
    cached = {
        name
        for name in needed
        if not (source / name).exists() and cached_file(remote, name) is not None and not keep
    }
    missing_bytes = side_bytes + sum(sizes[name] for name in needed - cached) - here
    order = supply.order(missing)

    def disk(ahead: bool) -> int:
        if keep:
            most = total + store_bytes
        else:
            written = outline.total_bytes - sum(file.nbytes for file in missing)
            most = side_bytes * 2 + most_bytes_at_once(
                order, supply, ahead=ahead, written=written, lying=lying, elsewhere=cached
            )
        return max(0, most + _MANIFEST_ROOM - taken)

    taken = disk_usage(workspace_path(destination)) + disk_usage(source)
    free = shutil.disk_usage(existing_parent(paths.models)).free
    with_ahead = disk(ahead=True)
    reads_ahead = with_ahead <= free
    to_come = {name for name in needed - cached if lying[name] < sizes[name]}
    finished = _is_finished(destination, checkpoint) and (not keep_source or missing_bytes <= 0)
    made = DownloadPlan(
        name=ref.name,
        remote=remote,
        bits=bits,
        config=checkpoint.path / CONFIG,
        destination=destination,
        files=len(selection.side) + len(sizes),
        weight_files=len(sizes),
        download_bytes=total,
        missing_bytes=0 if finished else max(0, missing_bytes),
        store_bytes=store_bytes,
        expert_bytes=len(plan.layers) * outline.geometry.layer_bytes,
        disk_bytes=0 if finished else disk(reads_ahead),
        ahead_bytes=0 if finished else with_ahead,
        free_bytes=free,
        reads_ahead=reads_ahead,
        overlaps=reads_ahead and not finished and _comes_later(supply, order, to_come),
        convert_s=0.0 if finished else _convert_seconds(plan, bits),
        finished=finished,
    )
    return needed, made


class _Nowhere:
    """No shards: for plans."""

    def fetch(self, name: str) -> Path:
        raise AssertionError(f"a plan brings no shard, and not {name}")

    def expect(self, name: str | None) -> None:
        raise AssertionError(f"a plan expects no shard, and not {name}")

    def discard(self, name: str) -> None:
        raise AssertionError(f"a plan has no shard to let go, and not {name}")


def _side_bytes_in(outline: StoreOutline) -> int:
    return sum(file.nbytes for file in outline.files if isinstance(file, SideFile))


def _comes_later(supply: ShardSupply, order: list[PlannedFile], to_come: set[str]) -> bool:
    """Whether a shard is still to come when the first layer can be converted."""
    first = next((file for file in order if isinstance(file, ExpertsFile)), None)
    return first is not None and not to_come <= set(supply.shards_of(first))


def _bytes_here(path: Path) -> int:
    for candidate in (path, path.with_name(path.name + PART_SUFFIX)):
        try:
            return candidate.stat().st_size
        except OSError:
            continue
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
