"""A finished store on disk: checks, verification and mapping."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np

from moechat.errors import MoechatError, StoreDamagedError
from moechat.geometry import ExpertGeometry
from moechat.store.encoded_file import EncodedSafetensors
from moechat.store.files import explained, format_bytes, hash_file, write_durably
from moechat.store.lock import hold_shared
from moechat.store.manifest import MANIFEST_NAME, LayerRecord, Manifest, damage_hint
from moechat.store.safetensors_file import DIRECT_IO_ALIGNMENT, SafetensorsFile
from moechat.store.tensors import TensorSet

EXPERTS_TENSOR = "experts"
DENSE_PREFIX = "dense-"
VerifyCallback = Callable[[int, int, str], None]


def removal_path(store: Path) -> Path:
    """Name of a store during its deletion."""
    return store.parent / f".{store.name}.removed"


def remove_store(path: Path) -> None:
    """Delete a store, damaged or not; its name is free at once, even if the deletion is interrupted.

    Raises:
        MoechatError: It cannot be deleted.
    """
    doomed = removal_path(path)
    with explained("removing a store", path):
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


@dataclass(frozen=True, slots=True)
class ExpertExtent:
    """Experts of one layer: file, offset of the first record (a multiple of 4096), bytes of all records."""

    path: Path
    offset: int
    nbytes: int


class Store:
    """A complete store, checked by manifest, names and sizes; weights are read on demand.

    Invariant: the directory holds the manifest, the files that it lists, and nothing else. Tokenizers are
    found by file name, so an extra file could change the output of a model.

    Attributes:
        path: The store directory.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.manifest = manifest
        self._layers = {item.layer: item for item in manifest.layers}
        self._maps: dict[int, np.memmap[tuple[int, int, int], np.dtype[np.uint8]]] = {}
        self._use: weakref.finalize[[int], Store] | None = None

    def hold(self) -> None:
        """Mark the store as in use for other processes, until :meth:`release` or the end of this object."""
        if self._use is None:
            descriptor = hold_shared(self.path / MANIFEST_NAME)
            if descriptor is not None:
                self._use = weakref.finalize(self, os.close, descriptor)

    def is_in_place(self) -> bool:
        """Whether the held store is still the one at its path; ``True`` if it could not be held."""
        held = None if self._use is None else self._use.peek()
        if held is None:
            return True
        (descriptor,) = held[2]
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path / MANIFEST_NAME))
        except OSError:
            return False

    def release(self) -> None:
        """End :meth:`hold`."""
        if self._use is not None:
            self._use()
            self._use = None

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Check the manifest, and that all its files exist with their sizes and no others.

        Raises:
            StoreDamagedError: It is not a store, or a file is missing, of another size or unlisted; the
                message names it.
            StoreFormatError: An older moechat wrote it, in a format that is no longer read.
            UnsupportedModelError: A newer moechat wrote it.
        """
        directory = Path(path)
        try:
            finished = (directory / MANIFEST_NAME).is_file()
        except OSError:  # Manifest.read reports the reason
            finished = True
        if not finished:
            raise StoreDamagedError(f"{directory} is not a finished store: it has no {MANIFEST_NAME}")
        store = cls(directory, Manifest.read(directory / MANIFEST_NAME))
        try:
            store._stamp()
        except StoreDamagedError:
            if not store._reload():
                raise
            store._stamp()
        return store

    @property
    def geometry(self) -> ExpertGeometry:
        """Shape and encoding of the experts."""
        return self.manifest.geometry

    @property
    def layers(self) -> tuple[LayerRecord, ...]:
        """Expert layers, ascending by decoder layer."""
        return self.manifest.layers

    @property
    def total_bytes(self) -> int:
        """Bytes of the store on disk, manifest excluded."""
        return self.manifest.total_bytes

    @cached_property
    def dense(self) -> TensorSet:
        """All tensors that are not routed experts, under the names and types of the checkpoint.

        Raises:
            StoreDamagedError: A dense file is malformed.
        """
        owners: dict[str, EncodedSafetensors] = {}
        for name in sorted(self.manifest.files):
            if name.startswith(DENSE_PREFIX) and name.endswith(".safetensors"):
                file = EncodedSafetensors.open(self.path / name, error=StoreDamagedError)
                for key in file.tensors:
                    if key in owners:
                        raise self._damaged(f"{file.path} repeats tensor {key!r}")
                    owners[key] = file
        return TensorSet(owners, where=str(self.path), error=StoreDamagedError)

    def expert_extent(self, layer: int) -> ExpertExtent:
        """Byte range of the experts of decoder layer ``layer``, for direct reads.

        Raises:
            KeyError: The layer has no routed experts.
            StoreDamagedError: The file is not what the manifest says.
        """
        path = self.path / self._layers[layer].file
        tensors = SafetensorsFile.open(path, error=StoreDamagedError).tensors
        entry = tensors.get(EXPERTS_TENSOR)
        shape = self.geometry.layer_shape
        if entry is None or len(tensors) != 1 or entry.dtype != "U8" or entry.shape != shape:
            raise self._damaged(f"{path} does not hold experts of shape {list(shape)}")
        if entry.start % DIRECT_IO_ALIGNMENT:
            raise self._damaged(
                f"the experts in {path} begin at byte {entry.start}, not at a multiple of 4096"
            )
        return ExpertExtent(path, entry.start, entry.nbytes)

    def expert_layer(self, layer: int) -> np.memmap[tuple[int, int, int], np.dtype[np.uint8]]:
        """All experts of decoder layer ``layer``.

        Returns:
            Read-only mapped uint8 array ``[experts, blocks, record_bytes]``, the same object at every call.

        Raises:
            KeyError: The layer has no routed experts.
            StoreDamagedError: The file is not what the manifest says.
        """
        if layer not in self._maps:
            extent, shape = self.expert_extent(layer), self.geometry.layer_shape
            self._maps[layer] = np.memmap(
                extent.path, dtype=np.uint8, mode="r", offset=extent.offset, shape=shape
            )
        return self._maps[layer]

    def verify(self, progress: VerifyCallback | None = None) -> None:
        """Compare the SHA-256 of every file with the manifest.

        Args:
            progress: Called with bytes done, bytes in total, and the current file.

        Raises:
            StoreDamagedError: A file is missing or altered; the message names it.
        """
        total = self.total_bytes
        done = 0
        name = ""

        def advance(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(done, total, name)

        for name, record in self.manifest.files.items():
            path = self.path / name
            try:
                digest = hash_file(path, advance)
            except OSError as problem:
                raise self._damaged(f"{path} cannot be read: {problem.strerror}") from problem
            if digest != record.sha256:
                raise self._damaged(
                    f"{path} ({format_bytes(record.bytes)}) is damaged: its SHA-256 is {digest[:12]}…, "
                    f"the manifest says {record.sha256[:12]}…"
                )

    def ensure_verified(self, state_dir: Path, progress: VerifyCallback | None = None) -> bool:
        """Verify if size, times or inode of any file differ from those at the last verification.

        If another process has replaced the store since it was opened, the new one is used, provided its
        experts have the same shape and encoding and nothing was read of the old one.

        Args:
            state_dir: Directory of verification stamps. If it cannot be written, every call verifies.
            progress: As for :meth:`verify`.

        Returns:
            Whether the files were hashed.

        Raises:
            StoreDamagedError: As :meth:`open` and :meth:`verify`.
        """
        try:
            return self._verify_unless_stamped(state_dir, progress)
        except StoreDamagedError:
            if not self._reload():
                raise
            return self._verify_unless_stamped(state_dir, progress)

    def is_verified(self, state_dir: Path) -> bool:
        """Whether no file has changed since the last verification.

        Raises:
            StoreDamagedError: As :meth:`open`.
        """
        return self._is_stamped(state_dir, self._stamp())

    def note_verified(self, state_dir: Path) -> None:
        """Mark the current files as verified, for callers that have verified them.

        Raises:
            StoreDamagedError: As :meth:`open`.
        """
        self._write_stamp(state_dir, self._stamp())

    def _verify_unless_stamped(self, state_dir: Path, progress: VerifyCallback | None) -> bool:
        stamp = self._stamp()
        if self._is_stamped(state_dir, stamp):
            return False
        self.verify(progress)
        if self._stamp() != stamp:
            raise StoreDamagedError(f"{self.path} was changed while it was verified", hint="try again")
        self._write_stamp(state_dir, stamp)
        return True

    def _is_stamped(self, state_dir: Path, stamp: bytes) -> bool:
        try:
            return self._stamp_path(state_dir).read_bytes() == stamp
        except OSError:
            return False

    def _write_stamp(self, state_dir: Path, stamp: bytes) -> None:
        path = self._stamp_path(state_dir)
        # With a read-only home every start verifies again; nothing else is lost.
        with suppress(OSError, MoechatError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, stamp)

    def remove(self) -> None:
        """Delete the store; its name is free at once, even if the deletion is interrupted.

        Raises:
            MoechatError: It cannot be deleted.
        """
        self.release()
        remove_store(self.path)

    def _stamp_path(self, state_dir: Path) -> Path:
        name = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:32]
        return Path(state_dir) / "verified" / f"{name}.json"

    def _damaged(self, message: str) -> StoreDamagedError:
        return StoreDamagedError(message, hint=damage_hint(self.path))

    def _reload(self) -> bool:
        """Switch to the manifest now on disk; ``False`` if it is the same or incompatible."""
        if self._maps or "dense" in self.__dict__:
            return False  # views of the old files may exist
        try:
            manifest = Manifest.read(self.path / MANIFEST_NAME)
        except MoechatError:
            return False
        if manifest == self.manifest or manifest.geometry != self.manifest.geometry:
            return False
        self.manifest = manifest
        self._layers = {item.layer: item for item in manifest.layers}
        return True

    def _require_no_other_entry(self) -> None:
        """Raise for anything in the directory that the manifest does not list."""
        listed = {MANIFEST_NAME, *self.manifest.files}
        parents = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
        for parent in sorted(parents):  # includes "."; unlisted directories and links are not entered
            directory = self.path / parent
            try:
                entries = sorted(os.listdir(directory))
            except OSError as problem:
                raise self._damaged(f"{directory} cannot be read: {problem.strerror}") from problem
            for entry in entries:
                name = str(PurePosixPath(parent, entry))
                if name not in listed and name not in parents:
                    path = self.path / name
                    raise StoreDamagedError(
                        f"{path} does not belong to the store: its manifest does not list it",
                        hint=f"remove it, or move it away: rm -r {shlex.quote(str(path.absolute()))}",
                    )

    def _stamp(self) -> bytes:
        """Name, size, mtime, ctime and inode of every file, and the hash of the manifest in use, as JSON.

        Raises:
            StoreDamagedError: A file is missing, has another size, or is not in the manifest.
        """
        stamps: dict[str, list[int]] = {}
        sizes: Mapping[str, int | None] = {
            MANIFEST_NAME: None,
            **{name: record.bytes for name, record in self.manifest.files.items()},
        }
        for name, size in sizes.items():
            path = self.path / name
            try:
                status = path.stat()
            except OSError as problem:
                raise self._damaged(f"{path} is missing: {problem.strerror}") from problem
            if not stat.S_ISREG(status.st_mode):
                raise self._damaged(f"{path} is not a regular file")
            if size is not None and status.st_size != size:
                raise self._damaged(f"{path} has {status.st_size} bytes, the manifest says {size}")
            stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        self._require_no_other_entry()
        # Included so that the stamp of a replacement store does not match the manifest read before.
        manifest = hashlib.sha256(self.manifest.to_bytes()).hexdigest()
        return json.dumps({"manifest": manifest, "files": stamps}, sort_keys=True).encode()
