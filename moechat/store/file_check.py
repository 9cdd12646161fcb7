"""Reads a file of a store and compares it with its hash; finds the experts that are damaged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import StoreDamagedError
from moechat.store.file_problems import file_problem, lacks_resources
from moechat.store.files import format_bytes, hash_file
from moechat.store.manifest import FileRecord

# Of a pass in the background: so short that a stop is noticed within a millisecond, or one read of the disk.
_PIECE = 1 << 20
_MOST_NAMED = 6  # experts in a message


@dataclass(frozen=True)
class ExpertRecords:
    """Where the block records of a file of experts lie.

    Attributes:
        layer: The decoder layer.
        offset: Of the first record in the file.
        experts: Number of experts.
        blocks: Records of each.
        record_bytes: Bytes of each record.
    """

    layer: int
    offset: int
    experts: int
    blocks: int
    record_bytes: int


@dataclass(frozen=True)
class Damage:
    """One damaged file.

    Attributes:
        path: The file.
        reason: What is wrong with it, to follow its name in a sentence.
        layer: The decoder layer whose experts it holds; ``None`` for other files.
        experts: Those that differ, ascending; empty if that is not known.
    """

    path: Path
    reason: str
    layer: int | None = None
    experts: tuple[int, ...] = ()

    @property
    def message(self) -> str:
        """A sentence without a period."""
        return f"{self.path} {self.reason}{self._place}"

    @property
    def _place(self) -> str:
        if self.layer is None:
            return ""
        if not self.experts:
            return f" (experts of layer {self.layer})"
        named = ", ".join(map(str, self.experts[:_MOST_NAMED]))
        more = len(self.experts) - _MOST_NAMED
        some = f"experts {named}" if len(self.experts) > 1 else f"expert {named}"
        return f" (layer {self.layer}, {some}{f' and {more} more' if more > 0 else ''})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "file": str(self.path),
            "reason": self.reason,
            "layer": self.layer,
            "experts": list(self.experts),
        }


def differs(record: FileRecord, digest: str) -> str:
    """What is wrong with a file of another hash, to follow its name in a sentence.

    Args:
        record: Of the manifest.
        digest: The file's SHA-256, hexadecimal.
    """
    return (
        f"({format_bytes(record.bytes)}) is damaged: its SHA-256 is {digest[:12]}…, "
        f"the manifest says {record.sha256[:12]}…"
    )


class RecordSums:
    """The checksums of the records of a file that is read from its beginning to its end.

    Attributes:
        values: uint32 ``[experts * blocks]``; of records that were read as a whole.
    """

    def __init__(self, records: ExpertRecords) -> None:
        """Begin before the first byte of the file."""
        self._records = records
        self._at = 0
        self.values: NDArray[np.uint32] = np.zeros(records.experts * records.blocks, np.uint32)

    def update(self, piece: NDArray[np.uint8]) -> None:
        """Take the next bytes of the file."""
        size, begin = self._records.record_bytes, self._records.offset
        low = max(self._at, begin)
        high = min(self._at + len(piece), begin + len(self.values) * size)
        rest = piece[low - self._at : max(low, high) - self._at]
        self._at += len(piece)
        while len(rest):
            index, inside = divmod(low - begin, size)
            if inside == 0 and len(rest) >= size:
                count = len(rest) // size
                step = count * size
                self.values[index : index + count] = _native.record_checksums(rest[:step], size)
            else:
                step = min(size - inside, len(rest))
                before = int(self.values[index]) if inside else 0
                self.values[index] = _native.crc32c(rest[:step], before)
            low += step
            rest = rest[step:]


class FileCheck:
    """The comparison of one file with what the manifest says of it.

    Attributes:
        checksums: Of its records, once it was read; ``None`` for files without experts.
    """

    def __init__(
        self,
        path: Path,
        record: FileRecord,
        records: ExpertRecords | None,
        known: NDArray[np.uint32] | None,
    ) -> None:
        """Prepare; nothing is read.

        Args:
            path: The file.
            record: Its size and hash by the manifest.
            records: Where its block records are; ``None``: it has none, or its header is unreadable.
            known: Checksums of its records from an earlier verification.
        """
        self._path = path
        self._record = record
        self._records = records
        self._known = known
        self._sums = None if records is None else RecordSums(records)

    @property
    def checksums(self) -> NDArray[np.uint32] | None:
        """uint32 ``[experts * blocks]``, after the file was read."""
        return None if self._sums is None else self._sums.values

    def run(self, advance: Callable[[int], None] | None = None, *, fresh: bool = False) -> Damage | None:
        """Read the file; what is wrong with it, or ``None``.

        Args:
            advance: Called with the bytes of each piece.
            fresh: Read from the disk: pages of the file that nobody has mapped are dropped first.

        Raises:
            DoesNotFitError: The process lacks memory or descriptors.
        """
        sums = self._sums
        try:
            if fresh:
                _drop_cached(self._path)
            digest = hash_file(self._path, advance, None if sums is None else sums.update)
        except OSError as problem:
            return self._unreadable(problem)
        return self._compare(digest)

    def steps(self) -> Iterator[Damage | None]:
        """As :meth:`run`, piece by piece: yields ``None`` after each, at last the damage if there is any.

        Pages that were not in the page cache are dropped from it again, and one piece is in memory.
        """
        digest, sums = hashlib.sha256(), self._sums
        buffer = np.empty(_PIECE, np.uint8)
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
                place = 0
                while count := _read_quietly(descriptor, buffer, place):
                    piece = buffer[:count]
                    digest.update(piece.data)
                    if sums is not None:
                        sums.update(piece)
                    place += count
                    yield None
            finally:
                os.close(descriptor)
        except OSError as problem:
            yield self._unreadable(problem)
            return
        yield self._compare(digest.hexdigest())

    def _unreadable(self, problem: OSError) -> Damage:
        if lacks_resources(problem):
            raise file_problem(self._path, problem, StoreDamagedError, "read") from problem
        layer = None if self._records is None else self._records.layer
        return Damage(self._path, f"cannot be read: {problem.strerror or problem}", layer)

    def _compare(self, digest: str) -> Damage | None:
        if digest == self._record.sha256:
            return None
        reason = differs(self._record, digest)
        records, known, found = self._records, self._known, self.checksums
        if records is None:
            return Damage(self._path, reason)
        experts: tuple[int, ...] = ()
        if known is not None and found is not None and len(known) == len(found):
            differ = np.flatnonzero(known != found) // records.blocks
            experts = tuple(int(expert) for expert in np.unique(differ))
        return Damage(self._path, reason, records.layer, experts)


def _drop_cached(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_quietly(descriptor: int, buffer: NDArray[np.uint8], place: int) -> int:
    """Read a piece; the page cache holds afterwards what it held before.

    Returns:
        Bytes; 0 at the end of the file.
    """
    flags = getattr(os, "RWF_NOWAIT", 0)
    if flags:
        try:
            count = os.preadv(descriptor, [buffer.data], place, flags)
            if count:
                return count
        except OSError:  # not cached, or the file system cannot tell
            pass
    count = os.preadv(descriptor, [buffer.data], place)
    if count:  # 0 would mean the whole rest of the file
        os.posix_fadvise(descriptor, place, count, os.POSIX_FADV_DONTNEED)
    return count
