"""A finished store on disk: check it, verify it, map it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from moechat.errors import MoechatError, StoreDamagedError
from moechat.geometry import ExpertGeometry
from moechat.store.files import explained, format_bytes, hash_file, write_durably
from moechat.store.manifest import MANIFEST_NAME, LayerRecord, Manifest
from moechat.store.safetensors_file import DIRECT_IO_ALIGNMENT, SafetensorsFile
from moechat.store.tensors import TensorSet

EXPERTS_TENSOR = "experts"
DENSE_PREFIX = "dense-"
VerifyCallback = Callable[[int, int, str], None]
_DAMAGED_HINT = "remove the model and convert or download it again"


def removal_path(store: Path) -> Path:
    """Name under which a store waits for its deletion."""
    return store.parent / f".{store.name}.removed"


@dataclass(frozen=True, slots=True)
class ExpertExtent:
    """Experts of one layer: file, offset of the first record (a multiple of 4096), bytes of all records."""

    path: Path
    offset: int
    nbytes: int


class Store:
    """A complete store, checked by manifest, names and sizes; no weight is read before it is asked for.

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

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Check the manifest, and that every file is there with its size.

        Raises:
            StoreDamagedError: It is no store, or a file is missing or has another size; the message names it.
            UnsupportedModelError: A newer moechat wrote it.
        """
        directory = Path(path)
        if not (directory / MANIFEST_NAME).is_file():
            raise StoreDamagedError(f"{directory} is not a finished store: it has no {MANIFEST_NAME}")
        store = cls(directory, Manifest.read(directory / MANIFEST_NAME))
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
        owners: dict[str, SafetensorsFile] = {}
        for name in sorted(self.manifest.files):
            if name.startswith(DENSE_PREFIX) and name.endswith(".safetensors"):
                file = SafetensorsFile.open(self.path / name, error=StoreDamagedError)
                for key in file.tensors:
                    if key in owners:
                        raise StoreDamagedError(f"{file.path} repeats tensor {key!r}", hint=_DAMAGED_HINT)
                    owners[key] = file
        return TensorSet(owners, where=str(self.path), error=StoreDamagedError)

    def expert_extent(self, layer: int) -> ExpertExtent:
        """Place of the experts of decoder layer ``layer`` for direct reads.

        Raises:
            KeyError: The layer has no routed experts.
            StoreDamagedError: The file is not what the manifest says.
        """
        path = self.path / self._layers[layer].file
        geometry = self.geometry
        tensors = SafetensorsFile.open(path, error=StoreDamagedError).tensors
        entry = tensors.get(EXPERTS_TENSOR)
        shape = (geometry.num_experts, geometry.blocks_per_expert, geometry.record_bytes)
        if entry is None or len(tensors) != 1 or entry.dtype != "U8" or entry.shape != shape:
            raise StoreDamagedError(
                f"{path} does not hold experts of shape {list(shape)}", hint=_DAMAGED_HINT
            )
        if entry.start % DIRECT_IO_ALIGNMENT:
            raise StoreDamagedError(
                f"the experts in {path} begin at byte {entry.start}, not at a multiple of 4096"
            )
        return ExpertExtent(path, entry.start, entry.nbytes)

    def expert_layer(self, layer: int) -> np.memmap[tuple[int, int, int], np.dtype[np.uint8]]:
        """All experts of decoder layer ``layer``.

        Returns:
            Read-only uint8 map ``[experts, blocks, record_bytes]``, the same object at every call.

        Raises:
            KeyError: The layer has no routed experts.
            StoreDamagedError: The file is not what the manifest says.
        """
        if layer not in self._maps:
            extent = self.expert_extent(layer)
            geometry = self.geometry
            shape = (geometry.num_experts, geometry.blocks_per_expert, geometry.record_bytes)
            self._maps[layer] = np.memmap(
                extent.path, dtype=np.uint8, mode="r", offset=extent.offset, shape=shape
            )
        return self._maps[layer]

    def verify(self, progress: VerifyCallback | None = None) -> None:
        """Compare the SHA-256 of every file with the manifest.

        Args:
            progress: Called with bytes done, bytes in all, and the file at hand.

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
                raise StoreDamagedError(
                    f"{path} cannot be read: {problem.strerror}", hint=_DAMAGED_HINT
                ) from problem
            if digest != record.sha256:
                raise StoreDamagedError(
                    f"{path} ({format_bytes(record.bytes)}) is damaged: its SHA-256 is {digest[:12]}…, "
                    f"the manifest says {record.sha256[:12]}…",
                    hint=_DAMAGED_HINT,
                )

    def ensure_verified(self, state_dir: Path, progress: VerifyCallback | None = None) -> bool:
        """Verify, but only if size, times or inode of any file differ from the last time it was done.

        Args:
            state_dir: Where the stamp of the last verification is kept. If it cannot be written, every call
                verifies.
            progress: As for :meth:`verify`.

        Returns:
            Whether the files were hashed.

        Raises:
            StoreDamagedError: As :meth:`verify`.
        """
        stamp_path = self._stamp_path(state_dir)
        stamp = self._stamp()
        try:
            if stamp_path.read_bytes() == stamp:
                return False
        except OSError:
            pass
        self.verify(progress)
        if self._stamp() != stamp:
            raise StoreDamagedError(f"{self.path} was changed while it was verified", hint="try again")
        try:
            stamp_path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(stamp_path, stamp)
        except (OSError, MoechatError):
            pass  # A read-only home costs a verification at every start, nothing else.
        return True

    def remove(self) -> None:
        """Delete the store; its name is free at once, even if the deletion is interrupted.

        Raises:
            MoechatError: It cannot be deleted.
        """
        doomed = removal_path(self.path)
        with explained("removing a store", self.path):
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(self.path, doomed)
            shutil.rmtree(doomed)

    def _stamp_path(self, state_dir: Path) -> Path:
        name = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:32]
        return Path(state_dir) / "verified" / f"{name}.json"

    def _stamp(self) -> bytes:
        """Size, mtime, ctime and inode of every file, as JSON; refuses a missing file or another size."""
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
                raise StoreDamagedError(
                    f"{path} is missing: {problem.strerror}", hint=_DAMAGED_HINT
                ) from problem
            if not stat.S_ISREG(status.st_mode):
                raise StoreDamagedError(f"{path} is not a regular file", hint=_DAMAGED_HINT)
            if size is not None and status.st_size != size:
                raise StoreDamagedError(
                    f"{path} has {status.st_size} bytes, the manifest says {size}", hint=_DAMAGED_HINT
                )
            stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        return json.dumps(stamps, sort_keys=True).encode()
