"""Streamed, resumable, atomic conversion of a checkpoint into a block store."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import moechat
from moechat.errors import (
    CheckpointError,
    DoesNotFitError,
    StoreDamagedError,
    UnsupportedModelError,
    UsageError,
)
from moechat.geometry import ExpertGeometry
from moechat.store.calibrated import Calibration, LayerPacker
from moechat.store.checkpoint import Checkpoint
from moechat.store.expert_refs import CheckpointPlan, ExpertRef
from moechat.store.files import explained
from moechat.store.lock import exclusive_lock
from moechat.store.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    LayerRecord,
    Manifest,
    Quantisation,
    SourceRecord,
    build_versions,
)
from moechat.store.outline import (
    DenseFile,
    ExpertsFile,
    PlannedFile,
    SideFile,
    StoreOutline,
    outline_store,
)
from moechat.store.progress import ConvertProgress, ProgressCallback
from moechat.store.quantizer import CALIBRATED, Biases, Matrices, Packer, choose_solver, make_packer
from moechat.store.shard_supply import Supply
from moechat.store.store import Store
from moechat.store.workspace import Workspace, lock_path, read_journal, remove_leftovers

__all__ = ["ConvertProgress", "convert", "finished_files"]

_COPY_CHUNK = 8 << 20


def convert(
    checkpoint: Checkpoint,
    plan: CheckpointPlan,
    destination: Path,
    *,
    bits: int,
    source_name: str,
    revision: str | None = None,
    quantizer: str = "auto",
    progress: ProgressCallback | None = None,
    supply: Supply | None = None,
    calibration: Calibration | None = None,
) -> Store:
    """Convert ``checkpoint`` into a store at ``destination``.

    A finished store of the same source and bits is returned unchanged; if another process is making it, this
    one waits. Files finished by an interrupted run are kept. A damaged store, or one of another source, is
    replaced.

    Args:
        checkpoint: The source.
        plan: Its experts and dense tensors.
        destination: Directory of the store; its parent is created.
        bits: 2, 3, 4, 8 or 16 bits per expert weight.
        source_name: Origin of the weights, for display.
        revision: Commit of the hub repository, if any.
        quantizer: One of :data:`moechat.store.quantizer.QUANTIZERS`.
        progress: Called after every expert and every 8 MiB, from the calling thread. It may raise
            ``KeyboardInterrupt``.
        supply: Provides the parts of the source as they are needed; ``None`` if all are on this machine.
        calibration: Measures inputs of experts for the quantizer ``auto``; ``None``: quantise by the weights
            alone.

    Returns:
        The open store.

    Raises:
        CheckpointError: Source and plan contradict each other, weights are not finite, or the source changes
            during the conversion.
        UnsupportedModelError: Experts have a type that cannot be read, or a newer moechat wrote the existing
            store.
        DoesNotFitError: The disk is too small, or became full; a later call resumes.
        UsageError: A value is out of range, or ``destination`` exists and is not a store.
        MoechatError: A file system operation failed.
    """
    destination = Path(destination)
    outline = outline_store(checkpoint, plan, bits)
    solver = choose_solver(quantizer, bits, calibrated=calibration is not None)
    if solver != CALIBRATED:
        calibration = None
    report = _Report(progress, outline.total_bytes)
    with explained("converting", destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(lock_path(destination), report.waiting):
            finished = _finished_store(destination, checkpoint, outline.geometry, quantizer, solver)
            if finished is not None:
                remove_leftovers(destination)
                return finished
            workspace = Workspace(destination, _job_key(checkpoint, plan, bits, solver))
            try:
                conversion = _Conversion(checkpoint, outline, workspace, solver, report, supply, calibration)
                conversion.run()
                checkpoint.require_unchanged()
            except UnsupportedModelError:
                # The same source cannot succeed later; a changed source starts from the beginning.
                workspace.discard()
                raise
            except DoesNotFitError:
                if not workspace.finished:
                    workspace.discard()
                raise
            manifest = _manifest(
                checkpoint, plan, outline, workspace, conversion.solver, source_name, revision
            )
            report.at("finishing", outline.total_bytes, "manifest")
            workspace.publish(MANIFEST_NAME, manifest.to_bytes())
            return Store.open(destination)


def finished_files(
    checkpoint: Checkpoint, plan: CheckpointPlan, destination: Path, *, bits: int, calibrated: bool
) -> frozenset[str]:
    """Files of the store that an interrupted :func:`convert` with these arguments has finished."""
    key = _job_key(checkpoint, plan, bits, choose_solver("auto", bits, calibrated=calibrated))
    return frozenset(read_journal(destination, key) or ())


class _Report:
    """Sends progress to the caller's callback, if there is one."""

    def __init__(self, callback: ProgressCallback | None, total: int) -> None:
        self._callback = callback
        self._total = total

    def at(self, stage: str, done: int, detail: str) -> None:
        if self._callback is not None:
            self._callback(ConvertProgress(stage, done, self._total, detail))

    def waiting(self) -> None:
        self.at("waiting", 0, "another process is converting this model")


class _Conversion:
    """Writes the files that are missing from a workspace.

    Attributes:
        solver: The solver of the experts; after :meth:`run` the one that was used.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        outline: StoreOutline,
        workspace: Workspace,
        solver: str,
        report: _Report,
        supply: Supply | None,
        calibration: Calibration | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._outline = outline
        self._workspace = workspace
        self.solver = solver
        self._report = report
        self._supply = supply
        self._calibration = calibration
        self._experts = [file for file in outline.files if isinstance(file, ExpertsFile)]
        self._provided = ""
        self._done = 0

    def run(self) -> None:
        self._workspace.recheck(self._outline, lambda name, size: self._advance(size, "checking", name))
        self._done = sum(record.bytes for record in self._workspace.finished.values())
        self._workspace.require_disk(self._outline)
        missing = [file for file in self._outline.files if file.name not in self._workspace.finished]
        pack: LayerPacker | None = None
        for planned in missing if self._supply is None else self._supply.order(missing):
            if isinstance(planned, ExpertsFile) and self._calibration is not None:
                calibration, self._calibration = self._calibration, None
                self._provide(planned)
                if not calibration.run(self._convert_layer):
                    self.solver = choose_solver("auto", self._outline.geometry.bits, calibrated=False)
            if planned.name in self._workspace.finished:
                continue  # written during the calibration
            if isinstance(planned, ExpertsFile) and pack is None:
                pack = _numbered(make_packer(self._outline.geometry, self.solver))
            self._write(planned, pack)

    def _convert_layer(self, ordinal: int, make: Callable[[], LayerPacker]) -> NDArray[np.uint8]:
        """See :data:`moechat.store.calibrated.ConvertLayer`."""
        planned = self._experts[ordinal]
        if planned.name not in self._workspace.finished:
            self._write(planned, make())
            later = (file for file in self._experts[ordinal:] if file.name not in self._workspace.finished)
            if (following := next(later, None)) is not None:
                self._provide(following)
        shape = self._outline.geometry.layer_shape
        path = self._workspace.path(planned.name)
        return np.memmap(path, np.uint8, "r", offset=len(planned.header), shape=shape)

    def _provide(self, planned: PlannedFile) -> None:
        """Make what a file is written from readable; again for the same file, do nothing."""
        if self._supply is not None and self._provided != planned.name:
            self._supply.provide(planned)
            self._provided = planned.name
        self._checkpoint.require_unchanged()

    def _write(self, planned: PlannedFile, pack: LayerPacker | None) -> None:
        self._provide(planned)
        with self._workspace.create(planned.name) as file:
            if isinstance(planned, ExpertsFile):
                assert pack is not None
                self._write_experts(planned, file.write, pack)
            elif isinstance(planned, DenseFile):
                self._write_dense(planned, file.write)
            else:
                self._copy(planned, file.write)
            size, digest = file.commit()
        self._require_size(planned, size)
        self._workspace.record(planned.name, size, digest)
        if self._supply is not None:
            self._supply.note_written(planned)

    def _advance(self, size: int, stage: str, detail: str) -> None:
        self._done += size
        self._report.at(stage, self._done, detail)

    def _require_size(self, planned: PlannedFile, size: int) -> None:
        if size != planned.nbytes:
            raise CheckpointError(
                f"{planned.name} became {size} bytes instead of {planned.nbytes}: the source has changed"
            )

    def _copy(self, planned: SideFile, write: Callable[[bytes], None]) -> None:
        with open(planned.source, "rb") as source:
            while data := source.read(_COPY_CHUNK):
                write(data)
                self._advance(len(data), "files", planned.name)

    def _write_dense(self, planned: DenseFile, write: Callable[[bytes], None]) -> None:
        write(planned.header)
        self._advance(len(planned.header), "dense", planned.name)
        for tensor in planned.tensors:
            for data in self._checkpoint.tensors.chunks(tensor.name):
                write(data)
                self._advance(len(data), "dense", tensor.name)

    def _write_experts(
        self, planned: ExpertsFile, write: Callable[[object], None], pack: LayerPacker
    ) -> None:
        write(planned.header)
        self._advance(len(planned.header), "experts", f"layer {planned.source.layer}")
        buffer = _page_aligned(self._outline.geometry)
        count = len(planned.source.experts)
        for number, expert in enumerate(planned.source.experts):
            matrices, biases = self._read(expert)
            try:
                pack(number, matrices, biases, buffer)
            except ValueError as problem:
                raise CheckpointError(
                    f"expert {number} of layer {planned.source.layer} ({expert.gate.key}) cannot be "
                    f"quantised: {problem}"
                ) from problem
            write(buffer)
            self._checkpoint.release(expert)
            detail = f"layer {planned.source.layer}, expert {number + 1} of {count}"
            self._advance(buffer.nbytes, "experts", detail)

    def _read(self, expert: ExpertRef) -> tuple[Matrices, Biases | None]:
        source = self._checkpoint
        matrices = (source.matrix(expert.gate), source.matrix(expert.up), source.matrix(expert.down))
        if expert.gate_bias is None or expert.up_bias is None or expert.down_bias is None:
            return matrices, None
        biases = (
            source.vector(expert.gate_bias),
            source.vector(expert.up_bias),
            source.vector(expert.down_bias),
        )
        return matrices, biases


def _numbered(pack: Packer) -> LayerPacker:
    """The packer of a layer that packs all experts alike."""
    return lambda _number, matrices, biases, out: pack(matrices, biases, out)


def _page_aligned(geometry: ExpertGeometry) -> NDArray[np.uint8]:
    """Uninitialised ``[blocks, record_bytes]`` for one expert, aligned to a page."""
    shape = (geometry.blocks_per_expert, geometry.record_bytes)
    memory = mmap.mmap(-1, geometry.expert_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.ndarray(shape, dtype=np.uint8, buffer=memory)


def _finished_store(
    destination: Path, checkpoint: Checkpoint, geometry: ExpertGeometry, quantizer: str, solver: str
) -> Store | None:
    """The store at ``destination`` if it matches the request; ``None`` if it is to be created or replaced."""
    if not destination.exists():
        return None
    if not (destination / MANIFEST_NAME).exists() and (
        not destination.is_dir() or any(destination.iterdir())
    ):
        raise UsageError(
            f"{destination} exists and is not a store", hint="move it away, or choose another directory"
        )
    try:
        store = Store.open(destination)
    except StoreDamagedError:
        return None
    same = (
        store.manifest.source.fingerprint == checkpoint.fingerprint()
        and store.geometry == geometry
        and (quantizer == "auto" or store.manifest.quantisation.solver == solver)
    )
    return store if same else None


def _job_key(checkpoint: Checkpoint, plan: CheckpointPlan, bits: int, solver: str) -> str:
    """Hash of everything that the bytes of the store depend on."""
    parts = [FORMAT_VERSION, moechat.__version__, checkpoint.fingerprint(), bits, solver, repr(plan)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _manifest(
    checkpoint: Checkpoint,
    plan: CheckpointPlan,
    outline: StoreOutline,
    workspace: Workspace,
    solver: str,
    source_name: str,
    revision: str | None,
) -> Manifest:
    experts = [file for file in outline.files if isinstance(file, ExpertsFile)]
    return Manifest(
        source=SourceRecord(source_name, revision, checkpoint.fingerprint(), plan.weight_type),
        created_by=build_versions(),
        model_type=plan.model_type,
        geometry=outline.geometry,
        layers=tuple(LayerRecord(file.source.layer, file.source.module, file.name) for file in experts),
        quantisation=Quantisation.of(outline.geometry.bits, solver),
        files=dict(workspace.finished),
    )
