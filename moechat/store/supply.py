"""A checkpoint whose shards come one after the other, each gone when nothing needs it any more.

Headers of all shards are known from the beginning, so everything about the store is decided and checked
before the first shard comes. Experts are converted layer by layer as soon as the shards of a layer are here.
Dense tensors lie in nearly every shard, but their files are written as a whole: so before a shard goes, its
dense tensors are put aside (``<shard>.dense``), and the dense files are written last. The disk then holds the
store, the shards of one layer, and what was put aside.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from moechat.errors import CheckpointError
from moechat.store.checkpoint import Checkpoint, read_config, tensor_set
from moechat.store.files import DurableFile
from moechat.store.outline import DenseFile, ExpertsFile, PlannedFile
from moechat.store.safetensors_file import (
    PlannedTensor,
    SafetensorsFile,
    TensorEntry,
    build_header,
    parse_header,
)

DENSE_SUFFIX = ".dense"


class Supply(Protocol):
    """What brings the source of a conversion while it runs."""

    def order(self, files: Sequence[PlannedFile]) -> list[PlannedFile]:
        """The files that are to be written, in the order that suits the source."""

    def bring(self, file: PlannedFile) -> None:
        """Make all that a file is written from available."""

    def done(self, file: PlannedFile) -> None:
        """A file is written and durable."""


class ShardSource(Protocol):
    """Where shards come from."""

    def fetch(self, name: str) -> Path:
        """Bring a whole, checked shard here; returns where it lies."""

    def discard(self, name: str) -> None:
        """A shard is not needed again in this conversion."""


class Shard:
    """One shard: announced by its header, perhaps here, or reduced to its dense tensors.

    Attributes:
        path: Where its name is in the checkpoint directory.
        tensors: What the header announces.
    """

    def __init__(self, path: Path, header: bytes, file_bytes: int) -> None:
        """Check a header.

        Args:
            path: Name of the shard in the checkpoint directory.
            header: Its first bytes: length and header.
            file_bytes: Size of the whole shard.

        Raises:
            CheckpointError: The header is malformed or does not fit the size.
        """
        self.path = path
        self.file_bytes = file_bytes
        self.tensors: Mapping[str, TensorEntry] = parse_header(
            header[8:], len(header), file_bytes, str(path)
        )[0]
        self._file: SafetensorsFile | None = None

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
        file = SafetensorsFile.open(path)
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

    def _here(self, name: str) -> SafetensorsFile:
        if self._file is None or name not in self._file.tensors:
            raise CheckpointError(f"tensor {name!r} of {self.path.name} is needed before it is here")
        return self._file

    def _fits(self, file: SafetensorsFile) -> bool:
        return all(
            name in self.tensors
            and (entry.dtype, entry.shape) == (self.tensors[name].dtype, self.tensors[name].shape)
            for name, entry in file.tensors.items()
        )


class AnnouncedCheckpoint(Checkpoint):
    """A checkpoint of which config and headers are here; it is the same whatever else is."""

    def __init__(
        self, path: Path, shards: Mapping[str, Shard], index: Mapping[str, str], identity: object
    ) -> None:
        """Read the configuration.

        Args:
            path: Directory with ``config.json``; side files may follow.
            shards: By name.
            index: Shard of each tensor; empty where there is only one.
            identity: What tells this source from every other, as JSON.

        Raises:
            CheckpointError: Configuration, index and shards do not fit together.
        """
        self.shards = dict(shards)
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        super().__init__(path, read_config(path), tensor_set(path, shards, index))

    def _current_fingerprint(self) -> str:
        return self._identity


class ShardSupply:
    """Brings shards layer by layer, and lets them go."""

    def __init__(
        self,
        checkpoint: AnnouncedCheckpoint,
        dense_keys: Iterable[str],
        source: ShardSource,
        aside: Path,
        *,
        keep: bool = False,
    ) -> None:
        """Nothing is brought yet.

        Args:
            checkpoint: The source.
            dense_keys: Its dense tensors.
            source: Where shards come from.
            aside: Directory for dense tensors of shards that are gone.
            keep: Shards stay; nothing is put aside.
        """
        self._checkpoint = checkpoint
        self._source = source
        self._aside = aside
        self._keep = keep
        self._names = {id(shard): name for name, shard in checkpoint.shards.items()}
        self._dense: dict[str, list[str]] = {}
        for key in dense_keys:
            self._dense.setdefault(self._shard_of(key), []).append(key)
        self._waiting: list[PlannedFile] = []

    def order(self, files: Sequence[PlannedFile]) -> list[PlannedFile]:
        """Small files, then layers in the order in which shards make them whole, then dense files."""
        rank = {name: number for number, name in enumerate(sorted(self._checkpoint.shards))}

        def place(file: PlannedFile) -> tuple[int, ...]:
            if isinstance(file, ExpertsFile):
                ranks = [rank[name] for name in self.shards_of(file)]
                return (1, max(ranks), min(ranks), file.source.layer)
            return (2,) if isinstance(file, DenseFile) else (0,)

        self._waiting = sorted(files, key=place)
        return list(self._waiting)

    def shards_of(self, file: PlannedFile) -> list[str]:
        """Names of the shards that a file is written from, sorted."""
        keys: Iterable[str] = ()
        if isinstance(file, DenseFile):
            keys = [tensor.name for tensor in file.tensors]
        elif isinstance(file, ExpertsFile):
            keys = {key for expert in file.source.experts for key in expert.tensors()}
        return sorted({self._shard_of(key) for key in keys})

    def shards_to_fetch(self, file: PlannedFile) -> list[str]:
        """As :meth:`shards_of`, without those of which enough was put aside."""
        names = self.shards_of(file)
        if isinstance(file, DenseFile):
            return [name for name in names if not self._aside_path(name).exists()]
        return names

    def bring(self, file: PlannedFile) -> None:
        """See :class:`Supply`."""
        for name in self.shards_of(file):
            shard = self._checkpoint.shards[name]
            if isinstance(file, DenseFile) and not shard.is_open and self._open_aside(name):
                continue
            if not shard.is_open:
                shard.open(self._source.fetch(name), whole=True)
            if isinstance(file, DenseFile):
                self._let_go(name)  # no layer needs it: only its dense tensors are to stay

    def done(self, file: PlannedFile) -> None:
        """See :class:`Supply`."""
        self._waiting.remove(file)
        for name in self.shards_of(file):
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        """Discard a shard that no waiting file needs, or all but its dense tensors."""
        needing = [file for file in self._waiting if name in self.shards_of(file)]
        shard = self._checkpoint.shards[name]
        if any(isinstance(file, ExpertsFile) for file in needing) or self._keep:
            return
        aside = self._aside_path(name)
        if not needing:
            reduced = shard.is_reduced
            shard.close()
            if not reduced:
                self._source.discard(name)
            aside.unlink(missing_ok=True)
        elif len(self._dense[name]) < len(shard.tensors) and not shard.is_reduced:
            self._put_aside(name)  # anew, whatever lies there: the shard is here, and known to be right
            shard.close()
            self._open_aside(name)
            self._source.discard(name)

    def _put_aside(self, name: str) -> None:
        shard = self._checkpoint.shards[name]
        planned = [
            PlannedTensor(key, shard.tensors[key].dtype, shard.tensors[key].shape)
            for key in self._dense[name]
        ]
        path = self._aside_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with DurableFile(path) as file:
            file.write(build_header(planned))
            for tensor in planned:
                for data in shard.chunks(tensor.name):
                    file.write(data)
            file.commit()

    def _open_aside(self, name: str) -> bool:
        path = self._aside_path(name)
        if not path.exists():
            return False
        shard = self._checkpoint.shards[name]
        try:
            shard.open(path, whole=False)
            for key in self._dense[name]:
                shard.array(key)
        except CheckpointError:  # it can be made again
            shard.close()
            os.unlink(path)
            return False
        return True

    def _aside_path(self, name: str) -> Path:
        return self._aside / (name + DENSE_SUFFIX)

    def _shard_of(self, key: str) -> str:
        return self._names[id(self._checkpoint.tensors.file_of(key))]


def most_bytes_at_once(
    files: Sequence[PlannedFile],
    supply: ShardSupply,
    dense_bytes: Mapping[str, int],
    sizes: Mapping[str, int],
) -> int:
    """Bytes of the disk that a conversion takes at most: store, shards, dense tensors put aside.

    Args:
        files: All files of the store, in the order of the supply.
        supply: Says which shards a file needs.
        dense_bytes: Dense bytes in each shard.
        sizes: Bytes of each shard.
    """
    last_use: dict[str, int] = {}
    for number, file in enumerate(files):
        for name in supply.shards_of(file):
            if isinstance(file, ExpertsFile):
                last_use[name] = number
    most = written = aside = 0
    here: set[str] = set()
    for number, file in enumerate(files):
        if isinstance(file, DenseFile):
            break
        here.update(supply.shards_of(file))
        written += file.nbytes
        most = max(most, written + aside + sum(sizes[name] for name in here))
        for name in [name for name in here if last_use[name] == number]:
            # Its dense tensors are copied before it goes.
            aside += dense_bytes.get(name, 0)
            most = max(most, written + aside + sum(sizes[other] for other in here))
            here.discard(name)
    only_dense = [name for name in sizes if name not in last_use and dense_bytes.get(name)]
    for name in only_dense:
        most = max(most, written + aside + sizes[name] + dense_bytes[name])
        aside += dense_bytes[name] if dense_bytes[name] < sizes[name] else sizes[name]
    total = sum(file.nbytes for file in files)
    return max(most, total + aside)
