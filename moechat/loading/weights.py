"""Loads the dense weights of a store into a skeleton, and packs them if their form requires it."""

from __future__ import annotations

import torch

from moechat.config import user_paths
from moechat.loading.model import Progress, Report
from moechat.models.dense import EncodedTensorSource, load_dense
from moechat.models.dense_form import DenseForm
from moechat.models.packed import keep_layers, kept_bytes, pack_layers
from moechat.models.packed_file import PackedFile
from moechat.models.skeleton import Skeleton
from moechat.offload.placement import ModelPlacement
from moechat.store.store import DENSE_PREFIX, Store


def load_weights(
    store: Store,
    skeleton: Skeleton,
    form: DenseForm,
    dtype: torch.dtype,
    placement: ModelPlacement,
    report: Report,
    *,
    source: EncodedTensorSource | None = None,
) -> None:
    """Load the dense weights of a store into a skeleton.

    Packed layers are saved in a file in the cache directory for later starts.

    Args:
        store: The store.
        skeleton: On the meta device.
        form: Form of each weight.
        dtype: Type that the dense part computes in.
        placement: Owner of the memory of packed layers.
        report: Called with the progress of packing.
        source: Tensors of the store; ``None``: all its dense ones.

    Raises:
        CheckpointError: A weight is missing or has another shape than the configuration says.
        DoesNotFitError: The packed weights do not fit.
        StoreDamagedError: A file became shorter meanwhile, or its disk fails.
    """
    tensors = store.dense if source is None else source
    load_dense(skeleton, tensors, form)
    store.require_readable()
    if not form.quantised and not form.kept_linears:
        return
    records = store.manifest.files.items()
    hashes = {name: record.sha256 for name, record in records if name.startswith(DENSE_PREFIX)}
    file = PackedFile.of(user_paths().cache / "dense", hashes, form, dtype)
    memory = placement.packed_memory(file.nbytes + kept_bytes(form), form, dtype)
    keep_layers(skeleton, tensors, form, memory, at=file.nbytes)
    if not form.quantised:
        return
    used = sorted({bits for name in form.quantised for _, _, bits in form.parts_of(name)}, key=str)
    detail = f"dense weights in {' and '.join(map(str, used))} bits"

    def packed(done: int, total: int) -> None:
        store.require_readable()  # before the packed layers are written for later starts
        report(Progress("load", done, total, detail))

    pack_layers(
        skeleton,
        tensors,
        form,
        file,
        packed,
        memory,
    )
