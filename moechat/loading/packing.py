"""What packing the dense weights of a store needs, wherever they go."""

from __future__ import annotations

import torch

from moechat.config import user_paths
from moechat.loading.model import Progress, Report
from moechat.models.dense_form import DenseForm
from moechat.models.packed import PackCallback
from moechat.models.packed_file import PackedFile
from moechat.store.store import DENSE_PREFIX, Store


def packed_file(store: Store, form: DenseForm, dtype: torch.dtype) -> PackedFile:
    """The file in the cache directory that keeps a store's packed layers.

    Args:
        store: Of the weights.
        form: Which layers are packed, and in how many bits.
        dtype: Of the model.
    """
    hashes = {
        name: record.sha256 for name, record in store.manifest.files.items() if name.startswith(DENSE_PREFIX)
    }
    return PackedFile.of(user_paths().cache / "dense", hashes, form, dtype)


def packing_progress(form: DenseForm, report: Report) -> PackCallback:
    """Tells how far packing has come."""
    detail = f"dense weights in {form.bits} bits"
    return lambda done, total: report(Progress("load", done, total, detail))
