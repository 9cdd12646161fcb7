"""Opens and verifies the store of a model; converts a checkpoint first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from moechat.calibration.calibration import calibration_of
from moechat.config import user_paths
from moechat.errors import StoreDamagedError, StoreFormatError, UsageError
from moechat.geometry import DEFAULT_BITS, KEEP
from moechat.hub.library import record_use
from moechat.hub.model_ref import ModelRef
from moechat.loading.budget_check import refuse_small_budget
from moechat.loading.model import Progress, Report
from moechat.models.assets import require_assets
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf_source import all_parts, gguf_fingerprint, opened_gguf
from moechat.options import LoadOptions
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.kept import choose_bits, may_be_kept
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.quantizer import CALIBRATED, quantizer_of
from moechat.store.store import Store
from moechat.store.workspace import remove_stale_leftovers

# In the manifest of a store whose source was quantised: why it does not keep that encoding.
_NOT_KEPT = "not_kept"
_TRIES = 3  # attempts to open a store that other processes replace meanwhile


def open_store(ref: ModelRef, bits: int | None, report: Report, options: LoadOptions | None = None) -> Store:
    """Open and verify the store of a model; a checkpoint is converted first, if it was not before.

    Args:
        ref: The model.
        bits: Bits of an expert weight that the user wants; ``None``: those of a finished store, else see
            :func:`moechat.store.kept.choose_bits`.
        report: Receives progress.
        options: With a budget for loading that is checked before a conversion; ``None``: nothing is.

    Raises:
        DoesNotFitError: A conversion would be in vain: the budget is too small.
        MoechatError: See :mod:`moechat.errors`.
    """
    for _ in range(_TRIES):
        store = _find_store(ref, bits, report, options)
        store.hold()
        store.ensure_verified(
            user_paths().state,
            lambda done, total, name: report(Progress("verify", done, total, name)),
        )
        if store.is_in_place():
            record_use(store.path, user_paths())
            remove_stale_leftovers(store.path)
            return store
        store.release()
    raise _replaced(store)


def repair_store(path: Path, damaged: Collection[str], source: Path, report: Report) -> Store:
    """Make damaged files of a store again from the checkpoint that it was made from.

    Args:
        path: The store.
        damaged: Names of the files.
        source: The checkpoint: a directory, or a GGUF file.
        report: Receives progress.

    Raises:
        UsageError: The store was made from something else.
        MoechatError: See :mod:`moechat.errors`. The store is as it was.
    """
    if source.is_file():
        with opened_gguf(source) as opened:
            return _repaired(opened, path, damaged, report)
    return _repaired(Checkpoint.open(source), path, damaged, report)


def _repaired(checkpoint: Checkpoint, path: Path, damaged: Collection[str], report: Report) -> Store:
    manifest = Manifest.read(path / MANIFEST_NAME)
    plan = plan_checkpoint(checkpoint, heads=manifest.mtp is not None)
    bits, made_by = manifest.geometry.wanted, manifest.quantisation.solver

    def notice(text: str) -> None:
        report(Progress("notice", 0, None, text))

    return convert(
        checkpoint,
        plan,
        path,
        bits=bits,
        source_name=manifest.source.name,
        revision=manifest.source.revision,
        quantizer=quantizer_of(made_by),
        progress=_on_convert(report),
        calibration=calibration_of(checkpoint, plan, bits, notice) if made_by == CALIBRATED else None,
        remarks={key: text for key, text in manifest.created_by.items() if key == _NOT_KEPT},
        repair=damaged,
    )


def _on_convert(report: Report) -> Callable[[ConvertProgress], None]:
    def show(event: ConvertProgress) -> None:
        stage = {"waiting": "wait", "notice": "notice"}.get(event.stage, "convert")
        report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))

    return show


def require_in_place(store: Store) -> None:
    """Check after loading that no other process has replaced the store meanwhile.

    Raises:
        StoreDamagedError: One has, so files of both may have been loaded.
    """
    if not store.is_in_place():
        raise _replaced(store)


def _replaced(store: Store) -> StoreDamagedError:
    return StoreDamagedError(
        f"{store.path} was replaced by another process while it was loaded", hint="run the same command again"
    )


def _find_store(ref: ModelRef, bits: int | None, report: Report, options: LoadOptions | None) -> Store:
    if ref.store is not None:
        store = Store.open(ref.store)
        if bits is not None and bits != store.geometry.wanted:
            raise UsageError(
                f"{ref.name} is stored with {store.geometry.title}, not {bits} bits",
                hint="name the checkpoint that it was made from to convert it anew",
            )
        return store
    assert ref.checkpoint is not None
    if ref.checkpoint.is_file():
        # Reading a GGUF file's header and vocabulary takes seconds, so look for a current store first.
        fingerprint = gguf_fingerprint(all_parts(ref.checkpoint))
        found = _current(ref, bits, fingerprint, encoded=True)
        if found is not None:
            return found
        with opened_gguf(ref.checkpoint) as opened:
            return _converted(opened, ref, bits, report, options)
    checkpoint = Checkpoint.open(ref.checkpoint)
    encoded = may_be_kept(checkpoint)
    found = _current(ref, bits, checkpoint.fingerprint(), encoded=encoded)
    return found or _converted(checkpoint, ref, bits, report, options)


def _current(ref: ModelRef, bits: int | None, fingerprint: str, *, encoded: bool) -> Store | None:
    """The store that a conversion would make, if it is here and its source has not changed since.

    A changed source makes :func:`_converted` replace the store once the new one is complete. If the user has
    not chosen the bits, and the source may have an encoding that a store can keep (``encoded``), a store that
    quantised it anew counts only if it could not.
    """
    for candidate in (bits,) if bits is not None else (KEEP, DEFAULT_BITS):
        destination = ref.library_path(user_paths().models, candidate)
        manifest = destination / MANIFEST_NAME
        if not manifest.exists():
            continue
        with suppress(StoreFormatError):  # replaced too
            read = Manifest.read(manifest)
            wanted = bits is not None or candidate == KEEP or not encoded
            if read.source.fingerprint == fingerprint and (wanted or _NOT_KEPT in read.created_by):
                return Store.open(destination)
    return None


def _converted(
    checkpoint: Checkpoint, ref: ModelRef, wanted: int | None, report: Report, options: LoadOptions | None
) -> Store:
    plan = plan_checkpoint(checkpoint)
    require_assets(checkpoint.path)
    bits, lost = choose_bits(wanted, plan)
    if options is not None:
        refuse_small_budget(checkpoint, plan.geometry(bits), options)
    destination = ref.library_path(user_paths().models, bits)
    if lost:
        report(Progress("notice", 0, None, lost))

    def notice(text: str) -> None:
        report(Progress("notice", 0, None, text))

    return convert(
        checkpoint,
        plan,
        destination,
        bits=bits,
        source_name=ref.name,
        progress=_on_convert(report),
        calibration=calibration_of(checkpoint, plan, bits, notice),
        remarks=None if plan.kept else {_NOT_KEPT: plan.not_kept or "it is not quantised"},
    )
