"""A finished store on disk: checks, verification and mapping."""

from __future__ import annotations

import mmap
import os
import shutil
import weakref
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import MoechatError, StoreDamagedError
from moechat.store.encoded_file import EncodedSafetensors
from moechat.store.file_problems import file_problem
from moechat.store.files import explained
from moechat.store.lock import hold_shared
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.mapped_file import GuardedMapping
from moechat.store.tensors import TensorSet
from moechat.store.verified_files import EXPERTS_TENSOR, ExpertExtent, VerifiedFiles, VerifyCallback

__all__ = ["DENSE_PREFIX", "EXPERTS_TENSOR", "ExpertExtent", "Store", "VerifyCallback", "remove_store"]

DENSE_PREFIX = "dense-"


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


class Store(VerifiedFiles):
    """A complete store, checked by manifest, names and sizes; weights are read on demand.

    Invariant: the directory holds the manifest, the files that it lists, and nothing else. Tokenizers are
    found by file name, so an extra file could change the output of a model.

    Attributes:
        path: The store directory.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Use :meth:`open`."""
        super().__init__(path, manifest)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._mappings: list[tuple[Path, GuardedMapping]] = []
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
            store.statuses()
        except StoreDamagedError:
            if not store._reload():
                raise
            store.statuses()
        return store

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
                self._note_mapping(file.path, file.mapping)
                for key in file.tensors:
                    if key in owners:
                        raise self.damaged(f"{file.path} repeats tensor {key!r}")
                    owners[key] = file
        return TensorSet(owners, where=str(self.path), error=StoreDamagedError)

    def expert_layer(self, layer: int) -> NDArray[np.uint8]:
        """All experts of decoder layer ``layer``.

        Returns:
            Read-only mapped uint8 array ``[experts, blocks, record_bytes]``, the same object at every call.

        Raises:
            KeyError: The layer has no routed experts.
            StoreDamagedError: The file is not what the manifest says.
            DoesNotFitError: The system refuses to map it for want of memory or descriptors.
        """
        if layer not in self._maps:
            extent, shape = self.expert_extent(layer), self.geometry.layer_shape
            try:
                with open(extent.path, "rb", buffering=0) as file:
                    mapping = GuardedMapping.of(file.fileno(), extent.nbytes, extent.offset)
            except OSError as problem:
                raise file_problem(extent.path, problem, StoreDamagedError, "mapped") from problem
            except ValueError as problem:  # it has become shorter
                raise self.damaged(f"{extent.path} cannot be mapped: {problem}") from problem
            self._note_mapping(extent.path, mapping)
            self._maps[layer] = np.ndarray(shape, np.uint8, buffer=mapping)
        return self._maps[layer]

    def _note_mapping(self, path: Path, mapping: mmap.mmap) -> None:
        if isinstance(mapping, GuardedMapping):
            self._mappings.append((path, mapping))

    def require_readable(self) -> None:
        """Check that all that was read of mapped files was there; a call costs next to nothing.

        Where a file became shorter while it was mapped, or its disk failed, zeros were read in its place:
        what was computed from them must not be used.

        Raises:
            StoreDamagedError: Some was not there; this store has to be opened again.
        """
        if _native.mapping_losses() == 0:
            return
        for path, mapping in self._mappings:
            if mapping.lost is not None:
                Store.open(self.path)  # says which file is missing or has another size
                raise StoreDamagedError(
                    f"{path} could not be read while it was in use: byte {mapping.lost} and those behind it",
                    hint="check the disk that holds it (dmesg), then start again",
                )

    def ensure_verified(self, state_dir: Path, progress: VerifyCallback | None = None) -> bool:
        """Verify if size, times or inode of any file differ from those at the last verification.

        Small stores are also verified if that was longer ago than :data:`moechat.store.stamps.EXPIRES_S`;
        others then by :class:`moechat.store.background_check.BackgroundCheck`. If another process has
        replaced the store since it was opened, the new one is used, provided its experts have the same shape
        and encoding and nothing was read of the old one.

        Args:
            state_dir: Directory of the records of verifications. If it cannot be written, every call
                verifies.
            progress: As for :meth:`verify`.

        Returns:
            Whether the files were hashed.

        Raises:
            StoreDamagedError: As :meth:`open` and :meth:`verify`.
        """
        try:
            return self.verify_unless_current(state_dir, progress)
        except StoreDamagedError:
            if not self._reload():
                raise
            return self.verify_unless_current(state_dir, progress)

    def remove(self) -> None:
        """Delete the store; its name is free at once, even if the deletion is interrupted.

        Raises:
            MoechatError: It cannot be deleted.
        """
        self.release()
        remove_store(self.path)

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
        self.use_manifest(manifest)
        return True
