"""From a name to a verified store; a checkpoint is converted first."""

from __future__ import annotations

from moechat.config import user_paths
from moechat.errors import UsageError
from moechat.hub.library import note_use
from moechat.hub.names import ModelRef
from moechat.loading.model import Progress, Report
from moechat.models.mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.store import Store

_DEFAULT_BITS = 4


def open_store(ref: ModelRef, bits: int | None, report: Report) -> Store:
    """The verified store of a model; a checkpoint is converted first, unless that was done before.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    store = _find_store(ref, bits, report)
    store.ensure_verified(
        user_paths().state,
        lambda done, total, name: report(Progress("verify", done, total, name)),
    )
    store.hold()
    note_use(store.path, user_paths())
    return store


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
    checkpoint = Checkpoint.open(ref.checkpoint)
    manifest = destination / MANIFEST_NAME
    # When the checkpoint has changed since, the conversion below replaces the store once it is complete.
    if manifest.exists() and Manifest.read(manifest).source.fingerprint == checkpoint.fingerprint():
        return Store.open(destination)
    plan = plan_checkpoint(checkpoint)

    def on_convert(event: ConvertProgress) -> None:
        stage = "wait" if event.stage == "waiting" else "convert"
        report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))

    return convert(checkpoint, plan, destination, bits=wanted, source_name=ref.name, progress=on_convert)
