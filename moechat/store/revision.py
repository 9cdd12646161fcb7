"""A finished store learns that a later commit has the same weights."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from moechat.store.files import DurableFile, explained, sync_directory
from moechat.store.lock import exclusive_lock, unless_in_use
from moechat.store.manifest import MANIFEST_NAME
from moechat.store.store import Store
from moechat.store.workspace import lock_path, workspace_path


class _BusyError(Exception):
    """Somebody converts to the same place."""


def note_revision(path: Path, revision: str, state_dir: Path) -> bool:
    """Let a store's manifest name a revision.

    It replaces the manifest, whose inode tells others that the store is in use: so nothing is done while it
    is. Verified files stay verified. Beside a conversion nothing is done either.

    Args:
        path: The store.
        revision: Of the source.
        state_dir: As for :meth:`Store.ensure_verified`.

    Returns:
        Whether the manifest names it now.

    Raises:
        MoechatError: The store is damaged, or cannot be written to.
    """

    def busy() -> None:
        raise _BusyError

    with suppress(_BusyError), explained("updating", path), exclusive_lock(lock_path(path), busy):
        store = Store.open(path)
        if store.manifest.source.revision == revision:
            return True
        with unless_in_use(path / MANIFEST_NAME) as free:
            if not free:
                return False
            verified = store.is_verified(state_dir)
            changed = replace(store.manifest, source=replace(store.manifest.source, revision=revision))
            _replace_manifest(path, changed.to_bytes())
            if verified:
                Store.open(path).note_verified(state_dir)
            return True
    return False


def _replace_manifest(path: Path, content: bytes) -> None:
    # Written beside the store, in which nothing may lie that its manifest does not list.
    beside = workspace_path(path)
    beside.mkdir(exist_ok=True)
    try:
        with DurableFile(beside / MANIFEST_NAME) as file:
            file.write(content)
            file.commit()
        os.replace(beside / MANIFEST_NAME, path / MANIFEST_NAME)
        sync_directory(path)
    finally:
        with suppress(OSError):
            beside.rmdir()  # unless a conversion has left its work there
