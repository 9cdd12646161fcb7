"""The work directory of a conversion: finished files survive a crash, unfinished ones are discarded.

``<parent>/.<name>.partial/store/`` grows file by file; ``.partial/journal.json`` records a file once it is
durable. So recorded files are complete, and the next run deletes all others. When all files are complete,
``store`` is renamed to ``<parent>/<name>``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from moechat.atomic_file import sync_directory
from moechat.errors import DoesNotFitError, InUseError, MoechatError
from moechat.store.files import format_bytes, hash_file, write_durably
from moechat.store.lock import exclusive_lock
from moechat.store.manifest import FileRecord
from moechat.store.outline import StoreOutline
from moechat.store.pipelined_file import PipelinedFile
from moechat.store.safetensors_file import strict_json
from moechat.store.store import removal_path

_JOURNAL, _STORE = "journal.json", "store"
_FILE_SYSTEM_BLOCK = 4096
_DISK_SLACK = 1 << 20  # manifest, journal, directories


def lock_path(destination: Path) -> Path:
    """The lock file of a conversion, next to the directories that are renamed, never inside."""
    return destination.parent / f".{destination.name}.lock"


def workspace_path(destination: Path) -> Path:
    """The work directory of a conversion to ``destination``."""
    return destination.parent / f".{destination.name}.partial"


def remove_leftovers(destination: Path) -> None:
    """Delete leftovers of interrupted conversions and removals of ``destination``. Requires the lock."""
    shutil.rmtree(workspace_path(destination), ignore_errors=True)
    shutil.rmtree(removal_path(destination), ignore_errors=True)


def remove_stale_leftovers(destination: Path) -> None:
    """Delete what a conversion could not delete because the disk failed, beside a finished store.

    Work that a later conversion can go on with stays, as does everything of a running one.
    """
    lock, workspace, removed = (place(destination) for place in (lock_path, workspace_path, removal_path))
    if not (lock.exists() or workspace.exists() or removed.exists()):
        return
    with suppress(OSError, MoechatError), exclusive_lock(lock, _give_up):
        shutil.rmtree(removed, ignore_errors=True)
        if not (workspace / _STORE).exists():
            shutil.rmtree(workspace, ignore_errors=True)


def _give_up() -> None:
    raise InUseError("a conversion is running")


class Workspace:
    """The work directory of one conversion. Requires the lock.

    Attributes:
        finished: Files that are complete and durable.
    """

    def __init__(self, destination: Path, key: str) -> None:
        """Open or create the work directory.

        Args:
            destination: The future store.
            key: Hash of everything the files depend on; a work directory with another key is emptied.

        Raises:
            OSError: The directory cannot be created.
        """
        self._destination = destination
        self._root = workspace_path(destination)
        self._store = self._root / _STORE
        self._key = key
        self.finished: dict[str, FileRecord] = {}
        self._recording = Lock()
        shutil.rmtree(removal_path(destination), ignore_errors=True)
        recorded = read_journal(destination, key)
        if recorded is None:
            self.discard()
            self._store.mkdir(parents=True)
            sync_directory(self._root)
            sync_directory(self._root.parent)
            self._write_journal()
        else:
            self._store.mkdir(exist_ok=True)
            self.finished = recorded

    def adopt(self, store: Path, files: Mapping[str, FileRecord]) -> None:
        """Take files of a finished store over, as if this conversion had made them.

        :meth:`recheck` reads and compares them. They are linked where the file system can, and nothing is
        written to them.

        Args:
            store: The store; it stays as it is.
            files: Its files by name, with what its manifest says of them.

        Raises:
            OSError: A file can be neither linked nor copied.
        """
        for name, record in files.items():
            path = self._store / name
            if self.finished.get(name) == record and path.exists():
                continue
            path.unlink(missing_ok=True)
            path.parent.mkdir(exist_ok=True)
            try:
                os.link(store / name, path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                shutil.copyfile(store / name, path)
            self.finished[name] = record
        self._write_journal()

    def recheck(self, outline: StoreOutline, advance: Callable[[str, int], None]) -> None:
        """Keep the recorded files that are still complete and needed; delete everything else.

        Args:
            outline: Files of the future store.
            advance: Called with the file name and a number of bytes while a kept file is hashed.
        """
        sizes = {file.name: file.nbytes for file in outline.files}
        whole: dict[str, FileRecord] = {}
        for name, record in self.finished.items():
            path = self._store / name
            try:
                if sizes.get(name) == record.bytes == path.stat().st_size:
                    digest = hash_file(path, partial(advance, name))
                    if digest == record.sha256:
                        whole[name] = record
            except OSError:
                continue
        for directory, _, names in os.walk(self._store, topdown=False):
            for name in names:
                path = Path(directory, name)
                if str(path.relative_to(self._store)) not in whole:
                    path.unlink()
            if directory != str(self._store) and not os.listdir(directory):
                os.rmdir(directory)
        if whole != self.finished:
            self.finished = whole
            self._write_journal()

    def require_disk(self, outline: StoreOutline) -> None:
        """Check that the missing files fit on the disk.

        Raises:
            DoesNotFitError: They do not; the message has both numbers.
        """
        missing = [file.nbytes for file in outline.files if file.name not in self.finished]
        needed = sum(-(-size // _FILE_SYSTEM_BLOCK) * _FILE_SYSTEM_BLOCK for size in missing) + _DISK_SLACK
        free = shutil.disk_usage(self._root).free
        if needed > free:
            raise DoesNotFitError(
                f"the store needs {format_bytes(needed)} on the disk of {self._root.parent}, "
                f"{format_bytes(free)} are free",
                hint=f"free {format_bytes(needed - free)}, choose fewer bits, or move MOECHAT_HOME",
            )

    def create(self, name: str, mode: int = 0o644) -> PipelinedFile:
        """Create a file of the store; pass the result of its ``commit`` to :meth:`record`.

        Args:
            name: Its name in the store.
            mode: Permissions, which the process's umask restricts.
        """
        path = self._store / name
        if path.parent != self._store:
            path.parent.mkdir(exist_ok=True)
            sync_directory(self._store)
        return PipelinedFile(path, mode)

    def path(self, name: str) -> Path:
        """Path of a finished file until the store is published."""
        return self._store / name

    def record(self, name: str, size: int, sha256: str) -> None:
        """Record a committed file as finished. Threads may write and record different files."""
        with self._recording:
            self.finished[name] = FileRecord(size, sha256)
            self._write_journal()

    def publish(self, manifest_name: str, manifest: bytes) -> None:
        """Write the manifest, move the store to its destination, remove the work directory.

        An existing store is replaced; after a crash in between the destination is missing or the new store.
        """
        write_durably(self._store / manifest_name, manifest)
        if self._destination.exists():
            os.rename(self._destination, removal_path(self._destination))
        os.rename(self._store, self._destination)
        try:
            sync_directory(self._destination.parent)
        finally:
            # The store is in its place: nothing of this directory would be used again.
            shutil.rmtree(removal_path(self._destination), ignore_errors=True)
            self.discard()

    def discard(self) -> None:
        """Delete the work directory."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _write_journal(self) -> None:
        files = {name: asdict(record) for name, record in self.finished.items()}
        write_durably(self._root / _JOURNAL, json.dumps({"key": self._key, "files": files}).encode())


def read_journal(destination: Path, key: str) -> dict[str, FileRecord] | None:
    """Files recorded as finished; ``None`` if there is no journal of this conversion."""
    try:
        content = strict_json((workspace_path(destination) / _JOURNAL).read_bytes())
        if not isinstance(content, dict) or content["key"] != key:
            return None
        return {name: _record(item) for name, item in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _record(item: Mapping[str, Any]) -> FileRecord:
    size, digest = item["bytes"], item["sha256"]
    if type(size) is not int or not isinstance(digest, str):
        raise ValueError("a journal entry is malformed")
    return FileRecord(size, digest)
