"""Streamed, resumable, atomic conversion of a checkpoint into a block store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import moechat
from moechat.errors import DoesNotFitError, StoreDamagedError, UnsupportedModelError, UsageError
from moechat.geometry import ExpertGeometry
from moechat.store.calibrated import Calibration
from moechat.store.checkpoint import Checkpoint
from moechat.store.conversion import Conversion, Report
from moechat.store.expert_refs import CheckpointPlan
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
    dense_format,
    mtp_ordinal,
)
from moechat.store.outline import DenseFile, ExpertsFile, StoreOutline, outline_store
from moechat.store.progress import ConvertProgress, ProgressCallback
from moechat.store.quantizer import CALIBRATED, choose_solver
from moechat.store.shard_supply import Supply
from moechat.store.store import Store
from moechat.store.workspace import Workspace, lock_path, read_journal, remove_leftovers

__all__ = ["ConvertProgress", "convert", "finished_files"]


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
    remarks: Mapping[str, str] | None = None,
    repair: Collection[str] | None = None,
) -> Store:
    """Convert ``checkpoint`` into a store at ``destination``.

    A finished store of the same source and bits is returned unchanged; if another process is making it, this
    one waits. Files finished by an interrupted run are kept. A damaged store, or one of another source, is
    replaced.

    Args:
        checkpoint: The source.
        plan: Its experts and dense tensors.
        destination: Directory of the store; its parent is created.
        bits: 2, 3, 4, 6, 8 or 16 bits per expert weight, or :data:`moechat.geometry.KEEP`.
        source_name: Origin of the weights, for display.
        revision: Commit of the hub repository, if any.
        quantizer: One of :data:`moechat.store.quantizer.QUANTIZERS`.
        progress: Called after every expert and every 8 MiB, from the calling thread. It may raise
            ``KeyboardInterrupt``.
        supply: Provides the parts of the source as they are needed; ``None`` if all are on this machine.
        calibration: Measures inputs of experts for the quantizer ``auto``; ``None``: quantise by the weights
            alone.
        remarks: Added to :attr:`Manifest.created_by`.
        repair: Make only these files of the finished store again; its other files are kept, after a look at
            their hashes. Until all is there, the store stays as it is.

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
    report = Report(progress, outline.total_bytes)
    with explained("converting", destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(lock_path(destination), report.waiting):
            old: Manifest | None = None
            if repair is None:
                finished = _finished_store(destination, checkpoint, outline.geometry, quantizer, solver)
                if finished is not None:
                    remove_leftovers(destination)
                    return finished
            else:
                old = _repairable(destination, checkpoint, outline)
            workspace = Workspace(destination, _job_key(checkpoint, plan, bits, solver))
            if old is not None and repair is not None:
                kept = {name: record for name, record in old.files.items() if name not in repair}
                workspace.adopt(destination, kept)
            try:
                conversion = Conversion(checkpoint, outline, workspace, solver, report, supply, calibration)
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
                checkpoint, plan, outline, workspace, conversion.solver, source_name, revision, remarks or {}
            )
            if old is not None:
                manifest = _repaired(old, manifest, destination)
            report.at("finishing", outline.total_bytes, "manifest")
            workspace.publish(MANIFEST_NAME, manifest.to_bytes())
            return Store.open(destination)


def finished_files(
    checkpoint: Checkpoint, plan: CheckpointPlan, destination: Path, *, bits: int, calibrated: bool
) -> frozenset[str]:
    """Files of the store that an interrupted :func:`convert` with these arguments has finished."""
    key = _job_key(checkpoint, plan, bits, choose_solver("auto", bits, calibrated=calibrated))
    return frozenset(read_journal(destination, key) or ())


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


def _repairable(destination: Path, checkpoint: Checkpoint, outline: StoreOutline) -> Manifest:
    """The manifest of the store that is repaired.

    Raises:
        StoreDamagedError: It cannot be read.
        UsageError: The source gives a store of another shape.
    """
    manifest = Manifest.read(destination / MANIFEST_NAME)
    if manifest.geometry != outline.geometry:
        raise UsageError(
            f"{destination} was not made from {checkpoint.title}: its experts have another shape or encoding",
            hint="name the checkpoint that it was made from with --from",
        )
    return manifest


def _repaired(old: Manifest, new: Manifest, destination: Path) -> Manifest:
    """The manifest of a repaired store: the old one if all files are bit by bit as it says.

    Files that another version of moechat makes may differ, which is right if the source is the same.

    Raises:
        UsageError: Files differ, and the source is not known to be the same.
    """
    if new.files == old.files:
        return old
    if new.source.fingerprint == old.source.fingerprint:
        return new
    changed = sorted(name for name in old.files if new.files.get(name) != old.files[name])
    raise UsageError(
        f"{destination} cannot be repaired from this checkpoint: {changed[0]} would become another file than "
        "it was, so the checkpoint is not the one that the store was made from, or it has changed",
        hint="name that checkpoint with --from, or remove the store and convert anew",
    )


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
    remarks: Mapping[str, str],
) -> Manifest:
    experts = [
        file for file in outline.files if isinstance(file, ExpertsFile) and mtp_ordinal(file.name) is None
    ]
    return Manifest(
        source=SourceRecord(source_name, revision, checkpoint.fingerprint(), plan.weight_type),
        created_by=build_versions() | dict(remarks),
        model_type=plan.model_type,
        geometry=outline.geometry,
        layers=tuple(LayerRecord(file.source.layer, file.source.module, file.name) for file in experts),
        quantisation=Quantisation.of(outline.geometry, solver),
        files=dict(workspace.finished),
        dense_format=dense_format(
            tensor.encoding
            for file in outline.files
            if isinstance(file, DenseFile)
            for tensor in file.tensors
            if tensor.encoding is not None
        ),
    )
