"""Removes what a download left that was killed after its store was finished."""

from __future__ import annotations

import shutil
from contextlib import suppress
from glob import escape
from pathlib import Path

from moechat.config import Paths
from moechat.errors import MoechatError
from moechat.hub.leftovers import find_leftovers, is_kept_source, variants_of
from moechat.hub.model_ref import ModelRef
from moechat.store.lock import exclusive_lock
from moechat.store.workspace import remove_stale_leftovers


class _BusyError(Exception):
    """Another process downloads the model."""


def remove_shards(ref: ModelRef, paths: Paths) -> None:
    """Remove shards of a model whose store is finished, and the lock files beside them.

    Those that another process uses, or an unfinished conversion with other bits or of another type may need,
    stay; so do kept checkpoints. What cannot be removed stays too: ``moechat rm --leftovers`` says why.

    Args:
        ref: The model.
        paths: The user's directories.
    """
    models = paths.models
    names = {item.path.stem for item in find_leftovers(ref.name, paths) if item.path.parent == models}
    # A lock without a directory beside it is no leftover for the list.
    names |= {lock.stem for lock in models.glob(f".{escape(ref.slug)}-*.lock")}
    for finished in (models / name.removeprefix(".") for name in names):
        if finished.is_dir():
            remove_stale_leftovers(finished)
    left = [item.path for item in find_leftovers(ref.name, paths)]
    if any(path.parent != paths.sources for path in left):
        return
    locks = {path.parent / f".{path.name}.lock" for path in left}
    locks |= set(paths.sources.glob(f".{escape(ref.slug)}@*.lock"))
    for lock in locks:
        with suppress(_BusyError, OSError, MoechatError), exclusive_lock(lock, _refuse):
            _remove(lock.with_name(lock.name[1:].removesuffix(".lock")))


def _remove(source: Path) -> None:
    variants = variants_of(source)
    if variants is not None and len(variants) == 1 and not is_kept_source(source):
        shutil.rmtree(source, ignore_errors=True)


def _refuse() -> None:
    raise _BusyError
