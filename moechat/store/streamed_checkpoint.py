"""A checkpoint of which only configuration and headers have to be here: its shards come and go."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from moechat.errors import CheckpointError
from moechat.store.checkpoint import Checkpoint, read_config, tensor_set
from moechat.store.safetensors_file import SafetensorsFile, TensorEntry, parse_header
from moechat.store.tensors import TensorFile


class Shard:
    """One shard: announced by its header, perhaps here, or reduced to its dense tensors.

    Attributes:
        path: Where its name is in the checkpoint directory.
        tensors: What the header announces.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorEntry], file_bytes: int) -> None:
        """Announce tensors.

        Args:
            path: Name of the shard in the checkpoint directory.
            tensors: By name.
            file_bytes: Size of the whole shard.
        """
        self.path = path
        self.file_bytes = file_bytes
        self.tensors = tensors
        self._file: TensorFile | None = None

    @classmethod
    def of_header(cls, path: Path, header: bytes, file_bytes: int) -> Shard:
        """Announce what a safetensors header says.

        Args:
            path: Name of the shard in the checkpoint directory.
            header: Its first bytes: length and header.
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

    def open(self, path: Path, *, whole: bool) -> None:
        """Read from a file: the shard itself, or its dense tensors.

        Raises:
            CheckpointError: The file is not what was announced.
        """
        file: TensorFile = self._whole(path) if whole else SafetensorsFile.open(path)
        fits = file.tensors == self.tensors if whole else self._fits(file)
        if not fits:
            raise CheckpointError(
                f"{path} does not hold the tensors that its header announced", hint="run the command again"
            )
        self._file = file

    def close(self) -> None:
        """Let the file go; its space is free when it is deleted and no view of it is left."""
        self._file = None

    def is_current(self) -> bool:
        """Whether the file is still the one that was opened."""
        return self._file is None or self._file.is_current()

    def array(self, name: str) -> NDArray[Any]:
        """As of a file."""
        return self._here(name).array(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        """As of a file."""
        return self._here(name).chunks(name)

    def release(self, start: int, end: int) -> None:
        """As of a file; places in a reduced one are others, and it is small."""
        if self._file is not None and not self.is_reduced:
            self._file.release(start, end)

    def _whole(self, path: Path) -> TensorFile:
        """Open the shard itself."""
        return SafetensorsFile.open(path)

    def _here(self, name: str) -> TensorFile:
        if self._file is None or name not in self._file.tensors:
            raise CheckpointError(f"tensor {name!r} of {self.path.name} is needed before it is here")
        return self._file

    def _fits(self, file: TensorFile) -> bool:
        return all(
            name in self.tensors
            and (entry.dtype, entry.shape) == (self.tensors[name].dtype, self.tensors[name].shape)
            for name, entry in file.tensors.items()
        )


class AnnouncedCheckpoint(Checkpoint):
    """A checkpoint of which config and headers are here; it is the same whatever else is."""

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
            index: Shard of each tensor; empty where there is only one.
            identity: What tells this source from every other, as JSON.
            title: What to call it in messages.

        Raises:
            CheckpointError: Configuration, index and shards do not fit together.
        """
        self.shards = dict(shards)
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        super().__init__(path, read_config(path), tensor_set(path, shards, index))
        self.title = title

    def _current_fingerprint(self) -> str:
        return self._identity
