"""The files of a store: their places and sizes, and what is known of their content."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from moechat.errors import StoreDamagedError
from moechat.geometry import ExpertGeometry
from moechat.store.file_check import Damage, ExpertRecords, FileCheck
from moechat.store.manifest import MANIFEST_NAME, LayerRecord, Manifest, damage_hint
from moechat.store.safetensors_file import DIRECT_IO_ALIGNMENT, SafetensorsFile
from moechat.store.stamps import (
    EXPIRES_S,
    Status,
    VerificationRecord,
    VerifiedFile,
    record_path,
    status_of,
)

EXPERTS_TENSOR = "experts"
# Stores up to this size are verified again at a start when they are due: it takes a fraction of a second.
_SMALL_BYTES = 256 << 20
VerifyCallback = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ExpertExtent:
    """Experts of one layer: file, offset of the first record (a multiple of 4096), bytes of all records."""

    path: Path
    offset: int
    nbytes: int


class VerifiedFiles:
    """The files that a manifest lists, in a directory.

    :class:`moechat.store.store.Store` gives their content.

    Attributes:
        path: The store directory.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Nothing is read."""
        self.path = path
        self._checksums: dict[str, NDArray[np.uint32]] = {}
        self.use_manifest(manifest)

    def use_manifest(self, manifest: Manifest) -> None:
        """Change to another manifest."""
        self.manifest = manifest
        self._layers = {item.layer: item for item in manifest.stored_layers}
        self._checksums = {}

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
            raise self.damaged(f"{path} does not hold experts of shape {list(shape)}")
        if entry.start % DIRECT_IO_ALIGNMENT:
            raise self.damaged(
                f"the experts in {path} begin at byte {entry.start}, not at a multiple of 4096"
            )
        return ExpertExtent(path, entry.start, entry.nbytes)

    def record_checksums(self, layer: int) -> NDArray[np.uint32] | None:
        """CRC-32C of every block record of a layer, uint32 ``[experts * blocks]``, as they were verified.

        Returns:
            ``None`` before :meth:`ensure_verified`, and if an earlier version verified the store last.

        Raises:
            KeyError: The layer has no routed experts.
        """
        found = self._checksums.get(self._layers[layer].file)
        shape = self.geometry.layer_shape
        return found if found is not None and len(found) == shape[0] * shape[1] else None

    def verify(self, progress: VerifyCallback | None = None) -> None:
        """Compare the SHA-256 of every file with the manifest.

        Args:
            progress: Called with bytes done, bytes in total, and the current file.

        Raises:
            StoreDamagedError: A file is missing or altered; the message names it.
        """
        self._verify(progress)

    def _verify(self, progress: VerifyCallback | None) -> dict[str, NDArray[np.uint32]]:
        """As :meth:`verify`; the checksums of all files of experts."""
        sums: dict[str, NDArray[np.uint32]] = {}
        for name, found, checksums in self.check_files(progress):
            if found is not None:
                raise self.damaged(found.message)
            if checksums is not None:
                sums[name] = checksums
        return sums

    def check_files(
        self,
        progress: VerifyCallback | None = None,
        state_dir: Path | None = None,
        *,
        fresh: bool = False,
    ) -> Iterator[tuple[str, Damage | None, NDArray[np.uint32] | None]]:
        """Compare every file with the manifest, one after the other.

        Args:
            progress: As for :meth:`verify`.
            state_dir: With the record of an earlier verification, by which damaged experts are named.
            fresh: Read from the disk what the page cache may hold.

        Yields:
            Name, what is wrong with the file, and the checksums of its records.
        """
        total, done = self.total_bytes, 0
        earlier = None if state_dir is None else self.verification(state_dir)
        for name in self.manifest.files:

            def advance(size: int, name: str = name) -> None:
                nonlocal done
                done += size
                if progress is not None:
                    progress(done, total, name)

            check = self.file_check(name, earlier)
            yield name, check.run(advance, fresh=fresh), check.checksums

    def examine(self, state_dir: Path, progress: VerifyCallback | None = None) -> list[Damage]:
        """Read every file from the disk, as far as no program has it mapped, and record what is right.

        Unlike :class:`moechat.store.store.Store`, missing files and files of another size are damage like any
        other, and all damage is found.

        Args:
            state_dir: As for :meth:`ensure_verified`.
            progress: As for :meth:`verify`.

        Raises:
            DoesNotFitError: The process lacks memory or descriptors.
        """
        before = self._found_statuses()
        found: list[Damage] = []
        sums: dict[str, NDArray[np.uint32]] = {}
        for name, damage, checksums in self.check_files(progress, state_dir, fresh=True):
            if damage is not None:
                found.append(damage)
            elif checksums is not None:
                sums[name] = checksums
        try:
            self._require_no_other_entry()
        except StoreDamagedError as error:
            path, _, reason = str(error).partition(" does ")
            found.append(Damage(Path(path), f"does {reason}"))
        if not found and self._found_statuses() == before:
            self._write_record(
                state_dir,
                {name: self._verified(name, status, sums.get(name)) for name, status in before.items()},
            )
        for damage in found:
            self.forget_file(str(damage.path.relative_to(self.path)), state_dir)
        return found

    def _found_statuses(self) -> dict[str, Status]:
        found: dict[str, Status] = {}
        for name in (MANIFEST_NAME, *self.manifest.files):
            with suppress(OSError):
                found[name] = status_of((self.path / name).stat())
        return found

    def file_check(self, name: str, earlier: VerificationRecord | None = None) -> FileCheck:
        """The check of one file, prepared.

        Args:
            name: One of the manifest's files.
            earlier: Has checksums of the same content, by which damaged experts are named.
        """
        record = self.manifest.files[name]
        known = None if earlier is None else earlier.files.get(name)
        same = known is not None and known.sha256 == record.sha256
        return FileCheck(
            self.path / name,
            record,
            self._expert_records(name),
            known.checksums if known is not None and same else None,
        )

    def _expert_records(self, name: str) -> ExpertRecords | None:
        """Where the records of a file are; ``None``: it has none, or its header is damaged."""
        layer = next((item.layer for item in self._layers.values() if item.file == name), None)
        if layer is None:
            return None
        try:
            offset = self.expert_extent(layer).offset
        except StoreDamagedError:
            return None
        experts, blocks, size = self.geometry.layer_shape
        return ExpertRecords(layer, offset, experts, blocks, size)

    def is_verified(self, state_dir: Path) -> bool:
        """Whether no file has changed since the last verification.

        Raises:
            StoreDamagedError: As :meth:`open`.
        """
        return self._current(state_dir, self.statuses()) is not None

    def note_verified(self, state_dir: Path) -> None:
        """Mark the current files as verified, for callers that have verified them.

        Of files that are as an earlier record says, time and checksums stay.

        Raises:
            StoreDamagedError: As :meth:`open`.
        """
        earlier = self.verification(state_dir)
        known = {} if earlier is None else earlier.files
        files: dict[str, VerifiedFile] = {}
        for name, status in self.statuses().items():
            file = known.get(name)
            same = file is not None and file.status == status
            files[name] = file if file is not None and same else self._verified(name, status)
        self._write_record(state_dir, files)

    def note_file(self, name: str, status: Status, found: FileCheck, state_dir: Path) -> None:
        """Record that one file was found right.

        Args:
            name: The file.
            status: Of the file before it was read.
            found: Its check.
            state_dir: As for :meth:`ensure_verified`.
        """
        earlier = self.verification(state_dir)
        if earlier is None or earlier.manifest != self._manifest_hash():
            return
        checked = self._verified(name, status, found.checksums)
        self._write_record(state_dir, {**earlier.files, name: checked})

    def forget_file(self, name: str, state_dir: Path) -> None:
        """Drop the record of a file that was found damaged, so that the next start verifies the store."""
        earlier = self.verification(state_dir)
        if earlier is not None and name in earlier.files:
            # Its checksums stay: they tell which experts are damaged.
            changed = VerifiedFile((), earlier.files[name].sha256, 0.0, earlier.files[name].checksums)
            VerificationRecord(earlier.manifest, {**earlier.files, name: changed}).write(
                record_path(self.path, state_dir)
            )

    def due_files(self, state_dir: Path, seconds: Callable[[str], float]) -> list[str]:
        """Files that were not verified for longer than ``seconds(name)``, or have no checksums yet; those
        longest ago first. None without a record: then every start verifies.
        """
        earlier = self.verification(state_dir)
        if earlier is None or earlier.manifest != self._manifest_hash():
            return []
        known = earlier.files
        experts = {item.file for item in self._layers.values()}
        found: list[tuple[float, str]] = []
        for name in self.manifest.files:
            file = known.get(name)
            if file is None or not file.is_recent(seconds(name)):
                found.append((0.0 if file is None else file.at, name))
            elif name in experts and file.checksums is None:
                found.append((file.at, name))
        return [name for _, name in sorted(found)]

    def verify_unless_current(self, state_dir: Path, progress: VerifyCallback | None) -> bool:
        """See :meth:`moechat.store.store.Store.ensure_verified`."""
        statuses = self.statuses()
        record = self._current(state_dir, statuses)
        if record is not None and not self._is_due_now(record):
            self._take_checksums(record)
            return False
        sums = self._verify(progress)
        if self.statuses() != statuses:
            raise StoreDamagedError(f"{self.path} was changed while it was verified", hint="try again")
        files = {name: self._verified(name, status, sums.get(name)) for name, status in statuses.items()}
        self._take_checksums(self._write_record(state_dir, files))
        return True

    def _is_due_now(self, record: VerificationRecord) -> bool:
        if self.total_bytes > _SMALL_BYTES:
            return False
        return not all(record.files[name].is_recent(EXPIRES_S) for name in self.manifest.files)

    def _take_checksums(self, record: VerificationRecord) -> None:
        files = record.files.items()
        self._checksums = {name: file.checksums for name, file in files if file.checksums is not None}

    def _verified(
        self, name: str, status: Status, checksums: NDArray[np.uint32] | None = None
    ) -> VerifiedFile:
        sha256 = "" if name == MANIFEST_NAME else self.manifest.files[name].sha256
        return VerifiedFile(status, sha256, time.time(), checksums)

    def verification(self, state_dir: Path) -> VerificationRecord | None:
        """The record of the last verification of the store at this path; ``None``: there is none."""
        return VerificationRecord.read(record_path(self.path, state_dir))

    def _current(self, state_dir: Path, statuses: Mapping[str, Status]) -> VerificationRecord | None:
        """The record of the last verification, if no file has changed since."""
        record = self.verification(state_dir)
        # The hash is compared so that the record of a replacement does not fit the manifest read before.
        if record is None or record.manifest != self._manifest_hash():
            return None
        same = {name: file.status for name, file in record.files.items()} == dict(statuses)
        return record if same else None

    def _manifest_hash(self) -> str:
        return hashlib.sha256(self.manifest.to_bytes()).hexdigest()

    def _write_record(self, state_dir: Path, files: Mapping[str, VerifiedFile]) -> VerificationRecord:
        record = VerificationRecord(self._manifest_hash(), files)
        record.write(record_path(self.path, state_dir))
        return record

    def damaged_record(self, layer: int, expert: int, block: int) -> StoreDamagedError:
        """The error for a block record that does not have its checksum."""
        return self.damaged(
            f"{self.path / self._layers[layer].file} is damaged: block {block} of expert {expert} of layer "
            f"{layer} is not as it was when the store was verified"
        )

    def damaged(self, message: str) -> StoreDamagedError:
        """The error for damage, with the next step."""
        return StoreDamagedError(message, hint=damage_hint(self.path, repairable=True))

    def _require_no_other_entry(self) -> None:
        """Raise for anything in the directory that the manifest does not list."""
        listed = {MANIFEST_NAME, *self.manifest.files}
        parents = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
        for parent in sorted(parents):  # includes "."; unlisted directories and links are not entered
            directory = self.path / parent
            try:
                entries = sorted(os.listdir(directory))
            except OSError as problem:
                raise self.damaged(f"{directory} cannot be read: {problem.strerror}") from problem
            for entry in entries:
                name = str(PurePosixPath(parent, entry))
                if name not in listed and name not in parents:
                    path = self.path / name
                    raise StoreDamagedError(
                        f"{path} does not belong to the store: its manifest does not list it",
                        hint=f"remove it, or move it away: rm -r {shlex.quote(str(path.absolute()))}",
                    )

    def statuses(self) -> dict[str, Status]:
        """The status of every file, the manifest first.

        Raises:
            StoreDamagedError: A file is missing, has another size, or is not in the manifest.
        """
        statuses: dict[str, Status] = {}
        sizes: Mapping[str, int | None] = {
            MANIFEST_NAME: None,
            **{name: record.bytes for name, record in self.manifest.files.items()},
        }
        for name, size in sizes.items():
            path = self.path / name
            try:
                status = path.stat()
            except OSError as problem:
                raise self.damaged(f"{path} is missing: {problem.strerror}") from problem
            if not stat.S_ISREG(status.st_mode):
                raise self.damaged(f"{path} is not a regular file")
            if size is not None and status.st_size != size:
                raise self.damaged(f"{path} has {status.st_size} bytes, the manifest says {size}")
            statuses[name] = status_of(status)
        self._require_no_other_entry()
        return statuses
