"""A checkpoint whose shards are fetched on demand; only configuration and headers must be present."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError
from moechat.store.checkpoint import Checkpoint
from moechat.store.checkpoint_files import config_bytes, tensor_set
from moechat.store.encoded_file import EncodedSafetensors
from moechat.store.mapped_file import place_of
from moechat.store.range_sums import Range, checksum
from moechat.store.safetensors_file import SafetensorsFile, TensorEntry, parse_header
from moechat.store.tensors import EncodedFile, TensorFile

_NO_SUMS: Mapping[str, int] = MappingProxyType({})
_NO_RANGES: Mapping[Range, int] = MappingProxyType({})


class Shard:
    """One shard: known by its header only, open in full, or reduced to its dense tensors.

    Attributes:
        path: Its path in the checkpoint directory, whether or not the file exists.
        tensors: The tensors listed in its header.
    """

    # The pieces of a tensor are its bytes in the file.
    _PLAIN = True

    def __init__(self, path: Path, tensors: Mapping[str, TensorEntry], file_bytes: int) -> None:
        """Create from the tensors of the header; the file need not exist.

        Args:
            path: Path of the shard in the checkpoint directory.
            tensors: By name.
            file_bytes: Size of the whole shard.
        """
        self.path = path
        self.file_bytes = file_bytes
        self.tensors = tensors
        self._file: TensorFile | None = None
        self._sums: Mapping[str, int] = _NO_SUMS
        self._unread: dict[Range, int] = {}  # checksums of what has not been read by the mapping yet

    @classmethod
    def of_header(cls, path: Path, header: bytes, file_bytes: int) -> Shard:
        """Create from a safetensors header.

        Args:
            path: Path of the shard in the checkpoint directory.
            header: The shard's first bytes: length and header.
            file_bytes: Size of the whole shard.

        Raises:
            CheckpointError: The header is malformed or does not fit the size.
        """
        return cls(path, parse_header(header[8:], len(header), file_bytes, str(path))[0], file_bytes)

    @property
    def is_open(self) -> bool:
        """Whether tensors can be read."""
        return self._file is not None

    @property
    def is_reduced(self) -> bool:
        """Whether only its dense tensors can be read."""
        return self._file is not None and len(self._file.tensors) < len(self.tensors)

    @property
    def ranges(self) -> set[Range]:
        """Bytes of its tensors in the file."""
        return {(entry.start, entry.end) for entry in self.tensors.values()}

    def open_whole(self, path: Path, sums: Mapping[Range, int] = _NO_RANGES) -> None:
        """Read from the shard itself.

        Args:
            path: The file.
            sums: CRC-32C of :attr:`ranges`. What is read is compared with them: the hash of a download is
                that of the bytes on their way to the disk.

        Raises:
            CheckpointError: Its tensors differ from those in the header.
        """
        self.open(path, whole=True)
        self._unread = dict(sums)
        if self._PLAIN:
            entries = {name: (entry.start, entry.end) for name, entry in self.tensors.items()}
            self._sums = {name: sums[one] for name, one in entries.items() if one in sums}

    def open(self, path: Path, *, whole: bool, sums: Mapping[str, int] = _NO_SUMS) -> None:
        """Read from a file: the shard itself, or its dense tensors.

        Args:
            path: The file.
            whole: It is the shard itself.
            sums: CRC-32C of tensors, which :meth:`chunks` compares.

        Raises:
            CheckpointError: Its tensors differ from those in the header.
        """
        file: TensorFile = self._whole(path) if whole else EncodedSafetensors.open(path)
        fits = file.tensors == self.tensors if whole else self._fits(file)
        if not fits:
            raise CheckpointError(
                f"{path} does not hold the tensors that its header lists", hint="run the command again"
            )
        self._file, self._sums, self._unread = file, sums, {}

    def close(self) -> None:
        """Close the file; a deleted file frees its space once no view of it is left."""
        self._file, self._sums, self._unread = None, _NO_SUMS, {}

    @property
    def lost(self) -> int | None:
        """See :class:`moechat.store.tensors.TensorFile`."""
        return None if self._file is None else self._file.lost

    def is_current(self) -> bool:
        """Whether the file is still the one that was opened."""
        return self._file is None or self._file.is_current()

    def checksum(self, start: int, end: int) -> int:
        """See :class:`moechat.store.tensors.TensorFile`; REQUIRES: the shard itself is open."""
        assert self._file is not None
        return self._file.checksum(start, end)

    def place(self, name: str) -> str:
        """See :class:`moechat.store.tensors.TensorFile`; known without the file."""
        return place_of(self.path, name)

    def array(self, name: str) -> NDArray[Any]:
        """See :meth:`TensorFile.array`.

        Raises:
            CheckpointError: The tensor does not have its checksum.
        """
        return self._compared(name).array(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        """See :meth:`TensorFile.chunks`.

        Raises:
            CheckpointError: After the last piece: the tensor does not have its checksum.
        """
        expected, sum_of = self._sums.get(name), 0
        file = self._compared(name) if expected is None else self._require_open(name)
        for data in file.chunks(name):
            if expected is not None:
                sum_of = checksum(data, sum_of)
            yield data
        if expected not in (None, sum_of):
            raise CheckpointError(
                f"{file.place(name)} has changed since it was saved", hint="run the command again"
            )

    def encoding(self, name: str) -> str | None:
        """See :class:`moechat.store.tensors.EncodedFile`; known without the file."""
        return None

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """See :class:`moechat.store.tensors.EncodedFile`; known without the file."""
        return None

    def dense_encoding(self, name: str) -> str | None:
        """See :class:`moechat.store.encoded_file.EncodedSource`."""
        return self.encoding(name)

    def encoded_rows(self, name: str, expert: int | None) -> NDArray[np.uint8]:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        file = self._compared(name)
        assert isinstance(file, EncodedFile)
        return file.encoded_rows(name, expert)

    def dense_rows(self, name: str) -> NDArray[np.uint8]:
        """See :class:`moechat.store.encoded_file.EncodedSource`."""
        return self.encoded_rows(name, None)

    def release(self, start: int, end: int) -> None:
        """See :meth:`TensorFile.release`; does nothing in a reduced shard, which has other offsets."""
        if self._file is not None and not self.is_reduced:
            self._file.release(start, end)

    def _whole(self, path: Path) -> TensorFile:
        """Open the shard itself."""
        return SafetensorsFile.open(path)

    def _compared(self, name: str) -> TensorFile:
        """The open file, whose bytes of a tensor are as they were downloaded."""
        file, entry = self._require_open(name), self.tensors[name]
        expected = self._unread.pop((entry.start, entry.end), None)
        if expected is not None and file.checksum(entry.start, entry.end) != expected:
            self._unread[entry.start, entry.end] = expected
            raise CheckpointError(
                f"{file.place(name)} has changed since it was saved", hint="run the command again"
            )
        return file

    def _require_open(self, name: str) -> TensorFile:
        if self._file is None or name not in self._file.tensors:
            raise CheckpointError(
                f"tensor {name!r} of {self.path.name} is needed before its shard is fetched"
            )
        return self._file

    def _fits(self, file: TensorFile) -> bool:
        return all(
            name in self.tensors
            and (entry.dtype, entry.shape) == (self.tensors[name].dtype, self.tensors[name].shape)
            for name, entry in file.tensors.items()
        )


class StreamedCheckpoint(Checkpoint):
    """A checkpoint known by configuration and headers; its fingerprint does not depend on present shards."""

    def __init__(
        self,
        path: Path,
        shards: Mapping[str, Shard],
        index: Mapping[str, str],
        identity: object,
        *,
        title: str,
    ) -> None:
        """Read the configuration.

        Args:
            path: Directory with ``config.json``; side files may follow.
            shards: By name.
            index: Shard of each tensor; empty for a single shard.
            identity: A JSON value that is unique per source.
            title: Name for messages.

        Raises:
            CheckpointError: Configuration, index and shards do not fit together.
        """
        self.shards = dict(shards)
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        super().__init__(path, config_bytes(path), tensor_set(path, shards, index))
        self.title = title

    def _current_fingerprint(self) -> str:
        return self._identity
