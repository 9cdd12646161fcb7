"""Plans a download, its sizes and times, from the configuration and the headers of the shards alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moechat.calibration.duration import calibrated_seconds
from moechat.config import Paths
from moechat.errors import DoesNotFitError, StoreDamagedError
from moechat.fetch.file_selection import CONFIG, Selection, cached_file, source_path
from moechat.fetch.repository import RemoteRepository
from moechat.fetch.transfer import PART_SUFFIX
from moechat.geometry import KEEP, ExpertGeometry
from moechat.hardware.identity import existing_parent
from moechat.hub.leftovers import disk_usage
from moechat.hub.library import KEEP_MARK
from moechat.hub.model_ref import ModelRef
from moechat.models.outlining import configured_top_k, read_config
from moechat.store.convert import finished_files
from moechat.store.expert_refs import CheckpointPlan
from moechat.store.files import format_bytes
from moechat.store.outline import ExpertsFile, PlannedFile, SideFile, StoreOutline, outline_store
from moechat.store.peak_disk import peak_disk_bytes
from moechat.store.quantizer import make_packer
from moechat.store.shard_supply import FetchedShard, ShardSupply
from moechat.store.side_files import has_tokenizer
from moechat.store.store import Store
from moechat.store.streamed_checkpoint import StreamedCheckpoint
from moechat.store.workspace import workspace_path

SAVED_DENSE = ".aside"  # directory for dense tensors of discarded shards
_MANIFEST_ROOM = 2 << 20
_SAMPLE_NEURONS = 256
_SAMPLE_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class DownloadPlan:
    """Sizes and times of a download, known before its first shard.

    Attributes:
        name: The model's name for ``moechat run``.
        remote: Repository and commit.
        geometry: Shape and encoding of the experts in the store.
        source_format: The format of the checkpoint's quantised weights, for people; ``None``: they are plain.
        config: ``config.json``, for memory plans; deleted after the download.
        destination: The store's directory.
        files: Number of files to fetch.
        weight_files: Number of shards among them.
        download_bytes: Size of all files.
        missing_bytes: Bytes still to fetch.
        store_bytes: Size of the finished store.
        expert_bytes: Size of its experts.
        disk_bytes: Peak of additional disk space.
        ahead_bytes: The same with prefetching.
        free_bytes: Free disk space.
        reads_ahead: Prefetch the next shard while others are converted: there is disk space for it.
        overlaps: Prefetching saves time.
        convert_s: Estimated seconds of conversion on this machine; ``None`` if unknown.
        finished: The store exists already, with the same weights.
        calibrated: Experts are quantised with inputs measured on a text.
        has_tokenizer: The repository has a tokenizer, so the model can read and write text.
        uncalibrated: Why experts are not calibrated, if they could be.
    """

    name: str
    remote: RemoteRepository
    geometry: ExpertGeometry
    source_format: str | None
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
    calibrated: bool
    has_tokenizer: bool
    uncalibrated: str | None = None

    @property
    def bits(self) -> int:
        """Bits per expert weight, or :data:`moechat.geometry.KEEP`."""
        return self.geometry.wanted

    def require_disk(self) -> None:
        """Check the disk space.

        Raises:
            DoesNotFitError: There is too little; the message names both sizes.
        """
        if self.disk_bytes > self.free_bytes:
            raise DoesNotFitError(
                f"{self.remote.title} needs {format_bytes(self.disk_bytes)} more on the disk of "
                f"{self.destination.parent}, {format_bytes(self.free_bytes)} are free",
                hint=f"free {format_bytes(self.disk_bytes - self.free_bytes)}, choose fewer bits (--bits), "
                "or set MOECHAT_HOME to a directory on a larger disk",
            )


# The names of the shards that are still needed, and the plan.
Planned = tuple[frozenset[str], DownloadPlan]


def make_plan(
    ref: ModelRef,
    remote: RemoteRepository,
    selection: Selection,
    checkpoint: StreamedCheckpoint,
    plan: CheckpointPlan,
    bits: int,
    paths: Paths,
    keep_source: bool,
    *,
    calibrated: bool,
) -> Planned:
    """Plan a download.

    Args:
        ref: The requested model.
        remote: Its repository.
        selection: The files to fetch.
        checkpoint: The checkpoint described by their headers.
        plan: Its experts and dense tensors.
        bits: Bits per expert weight, or :data:`moechat.geometry.KEEP`.
        paths: The user's directories.
        keep_source: Keep the shards.
        calibrated: Calibrate; see :func:`choose_calibration`.

    Returns:
        The names of the shards that are still needed, and the plan.
    """
    destination = ref.library_path(paths.models, bits)
    source = source_path(paths, remote, selection)
    keep = keep_source or (source / KEEP_MARK).exists()
    sizes = {name: file.size for name, file in selection.shards.items()}
    outline = outline_store(checkpoint, plan, bits)
    reads = plan.reads_by_layer() if calibrated else {}
    supply = ShardSupply(
        checkpoint, plan.dense_keys, _NoSource(), source / SAVED_DENSE, keep=keep, reads=reads
    )
    side_bytes = sum(file.size for file in selection.side)
    # Configuration and tokenizer of a GGUF model are generated, not fetched.
    store_bytes = outline.total_bytes + side_bytes - (0 if selection.is_gguf else _side_bytes_in(outline))
    done = finished_files(checkpoint, plan, destination, bits=bits, calibrated=calibrated)
    missing = [file for file in outline.files if file.name not in done]
    needed = frozenset(sizes if keep else (name for file in missing for name in supply.shards_to_fetch(file)))
    present = {name: _bytes_present(source / name) for name in sizes}
    present_bytes = sum(present[name] for name in needed)
    present_bytes += sum(_bytes_present(source / file.path) for file in selection.side)
    total = side_bytes + sum(sizes.values())
    cached = {
        name
        for name in needed
        if not (source / name).exists() and cached_file(remote, name) is not None and not keep
    }
    missing_bytes = side_bytes + sum(sizes[name] for name in needed - cached) - present_bytes
    order = supply.order(missing)

    def disk(ahead: bool) -> int:
        if keep:
            most = total + store_bytes
        else:
            written = outline.total_bytes - sum(file.nbytes for file in missing)
            most = side_bytes * 2 + peak_disk_bytes(
                order, supply, ahead=ahead, written=written, present=present, read_in_place=cached
            )
        return max(0, most + _MANIFEST_ROOM - taken)

    taken = disk_usage(workspace_path(destination)) + disk_usage(source)
    free = shutil.disk_usage(existing_parent(paths.models)).free
    with_ahead = disk(ahead=True)
    reads_ahead = with_ahead <= free
    incomplete = {name for name in needed - cached if present[name] < sizes[name]}
    finished = _is_finished(destination, checkpoint) and (not keep_source or missing_bytes <= 0)
    made = DownloadPlan(
        name=ref.name,
        remote=remote,
        geometry=outline.geometry,
        source_format=checkpoint.source_format,
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
        overlaps=reads_ahead and not finished and _is_fetched_later(supply, order, incomplete),
        convert_s=0.0 if finished else _convert_seconds(checkpoint, plan, bits, calibrated=calibrated),
        finished=finished,
        calibrated=calibrated,
        has_tokenizer=has_tokenizer([*(file.path for file in selection.side), *os.listdir(checkpoint.path)]),
    )
    return needed, made


def choose_calibration(make: Callable[[bool], Planned], possible: bool) -> Planned:
    """The plan with calibration, if it is possible and the disk has room for it, else the one without.

    Layers in the order of the model can need more shards at once than in the order of the shards.

    Args:
        make: :func:`make_plan`, given whether to calibrate.
        possible: The model can be calibrated.
    """
    if not possible:
        return make(False)
    calibrated = make(True)
    more = calibrated[1].disk_bytes - calibrated[1].free_bytes
    if more <= 0:
        return calibrated
    plain = make(False)
    if plain[1].disk_bytes > plain[1].free_bytes:
        return calibrated
    reason = f"calibration would need {format_bytes(more)} more on the disk"
    return plain[0], replace(plain[1], uncalibrated=reason)


class _NoSource:
    """Stands in for a source of shards while planning, where it is never called."""

    def fetch(self, name: str) -> FetchedShard:
        raise AssertionError(f"planning fetches {name}")

    def expect(self, name: str | None) -> None:
        raise AssertionError(f"planning expects {name}")

    def discard(self, name: str) -> None:
        raise AssertionError(f"planning discards {name}")


def _side_bytes_in(outline: StoreOutline) -> int:
    return sum(file.nbytes for file in outline.files if isinstance(file, SideFile))


def _is_fetched_later(supply: ShardSupply, order: list[PlannedFile], incomplete: set[str]) -> bool:
    """Whether a shard is still incomplete when the first layer can be converted."""
    first = next((file for file in order if isinstance(file, ExpertsFile)), None)
    return first is not None and not incomplete <= set(supply.shards_of(first))


def _bytes_present(path: Path) -> int:
    for candidate in (path, path.with_name(path.name + PART_SUFFIX)):
        try:
            return candidate.stat().st_size
        except OSError:
            continue
    return 0


def _is_finished(destination: Path, checkpoint: StreamedCheckpoint) -> bool:
    try:
        store = Store.open(destination)
    except StoreDamagedError:  # it will be replaced
        return False
    return store.manifest.source.fingerprint == checkpoint.fingerprint()


def _convert_seconds(
    checkpoint: StreamedCheckpoint, plan: CheckpointPlan, bits: int, *, calibrated: bool
) -> float | None:
    """Estimate by timing small samples; ``None`` where values are copied."""
    if bits in (16, KEEP):
        return None
    if calibrated:
        return calibrated_seconds(plan, bits, configured_top_k(read_config(checkpoint.path)))
    whole = plan.geometry(bits)
    geometry = replace(
        whole,
        num_experts=1,
        intermediate_size=min(whole.intermediate_size, _SAMPLE_NEURONS),
        hidden_size=min(whole.hidden_size, _SAMPLE_WEIGHTS // _SAMPLE_NEURONS),
        has_bias=False,
    )
    neurons, columns = geometry.intermediate_size, geometry.hidden_size
    values = np.random.default_rng(0).standard_normal((neurons, columns), dtype=np.float32)
    out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
    pack = make_packer(geometry, "least-squares")
    times = []
    for _ in range(2):
        start = time.perf_counter()
        pack((values, values if geometry.gate.gated else None, np.ascontiguousarray(values.T)), None, out)
        times.append(time.perf_counter() - start)
    all_weights = whole.expert_weights * whole.num_experts * len(plan.layers)
    return min(times) * all_weights / geometry.expert_weights
