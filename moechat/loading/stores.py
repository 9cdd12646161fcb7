"""Opens and verifies the store of a model; converts a checkpoint first."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from moechat.calibration.calibration import calibration_of
from moechat.config import user_paths
from moechat.errors import StoreDamagedError, StoreFormatError, UsageError
from moechat.hub.library import record_use
from moechat.hub.model_ref import ModelRef
from moechat.loading.model import Progress, Report
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf_source import all_parts, gguf_fingerprint, opened_gguf
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.store import Store

_DEFAULT_BITS = 4
_TRIES = 3  # attempts to open a store that other processes replace meanwhile


def open_store(ref: ModelRef, bits: int | None, report: Report) -> Store:
    """Open and verify the store of a model; a checkpoint is converted first, if it was not before.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    for _ in range(_TRIES):
        store = _find_store(ref, bits, report)
        store.hold()
        store.ensure_verified(
            user_paths().state,
            lambda done, total, name: report(Progress("verify", done, total, name)),
        )
        if store.is_in_place():
            record_use(store.path, user_paths())
            return store
        store.release()
    raise _replaced(store)


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


def _find_store(ref: ModelRef, bits: int | None, report: Report) -> Store:
    if ref.store is not None:
        store = Store.open(ref.store)
        if bits is not None and bits != store.geometry.bits:
            raise UsageError(
                f"{ref.name} is stored with {store.geometry.bits} bits, not {bits}",
                hint="name the checkpoint that it was made from to convert it anew",
            )
        return store
    assert ref.checkpoint is not None
    wanted = _DEFAULT_BITS if bits is None else bits
    destination = ref.library_path(user_paths().models, wanted)
    manifest = destination / MANIFEST_NAME
    # When the checkpoint has changed since, the conversion below replaces the store once it is complete.
    stored = None
    if manifest.exists():
        with suppress(StoreFormatError):  # replaced too
            stored = Manifest.read(manifest).source.fingerprint
    if ref.checkpoint.is_file():
        # Reading a GGUF file's header and vocabulary takes seconds, so look for a current store first.
        if stored is not None and stored == gguf_fingerprint(all_parts(ref.checkpoint)):
            return Store.open(destination)
        with opened_gguf(ref.checkpoint) as opened:
            return _converted(opened, ref, destination, wanted, report)
    checkpoint = Checkpoint.open(ref.checkpoint)
    if stored is not None and stored == checkpoint.fingerprint():
        return Store.open(destination)
    return _converted(checkpoint, ref, destination, wanted, report)


def _converted(checkpoint: Checkpoint, ref: ModelRef, destination: Path, bits: int, report: Report) -> Store:
    plan = plan_checkpoint(checkpoint)

    def on_convert(event: ConvertProgress) -> None:
        stage = {"waiting": "wait", "notice": "notice"}.get(event.stage, "convert")
        report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))

    def notice(text: str) -> None:
        report(Progress("notice", 0, None, text))

    return convert(
        checkpoint,
        plan,
        destination,
        bits=bits,
        source_name=ref.name,
        progress=on_convert,
        calibration=calibration_of(checkpoint, plan, bits, notice),
    )
