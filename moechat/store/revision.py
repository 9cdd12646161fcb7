"""Records in a finished store that a later commit of its source has the same weights."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from moechat.atomic_file import sync_directory
from moechat.store.files import explained, write_durably
from moechat.store.lock import exclusive_lock, unless_in_use
from moechat.store.manifest import MANIFEST_NAME
from moechat.store.store import Store
from moechat.store.workspace import lock_path, workspace_path


class _BusyError(Exception):
    """Another process is converting to the same destination."""


def record_revision(path: Path, revision: str, state_dir: Path) -> bool:
    """Write a revision into a store's manifest.

    This replaces the manifest file, whose lock marks the store as in use. So nothing is done while the store
    is in use or being converted. Verified files stay verified.

    Args:
        path: The store.
        revision: Commit of the source.
        state_dir: As for :meth:`Store.ensure_verified`.

    Returns:
        Whether the manifest now has the revision.

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
    # Written outside the store first: a store holds no file that its manifest does not list.
    workspace = workspace_path(path)
    workspace.mkdir(exist_ok=True)
    try:
        write_durably(workspace / MANIFEST_NAME, content)
        os.replace(workspace / MANIFEST_NAME, path / MANIFEST_NAME)
        sync_directory(path)
    finally:
        with suppress(OSError):
            workspace.rmdir()  # fails if an interrupted conversion left its work there
