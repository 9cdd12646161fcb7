"""A checkpoint whose shards come one after the other, each gone when nothing needs it any more.

Headers of all shards are known from the beginning, so everything about the store is decided and checked
before the first shard comes. Experts are converted layer by layer as soon as the shards of a layer are here.
Dense tensors lie in nearly every shard, but their files are written as a whole: so before a shard goes, its
dense tensors are put aside (``<shard>.dense``), and the dense files are written last. The disk then holds the
store, the shards of one layer, what was put aside, and the next shard, where its source reads ahead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from moechat.errors import CheckpointError
from moechat.store.announced import AnnouncedCheckpoint
from moechat.store.files import DurableFile
from moechat.store.outline import DenseFile, ExpertsFile, PlannedFile
from moechat.store.safetensors_file import PlannedTensor, build_header

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

    def expect(self, name: str | None) -> None:
        """The shard that will be fetched next, if any, may begin to come; a failure of that is raised."""

    def discard(self, name: str) -> None:
        """A shard is not needed again in this conversion."""


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
        self._needs: dict[str, list[str]] = {}
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
        if file.name not in self._needs:
            keys: Iterable[str] = ()
            if isinstance(file, DenseFile):
                keys = [tensor.name for tensor in file.tensors]
            elif isinstance(file, ExpertsFile):
                keys = {key for expert in file.source.experts for key in expert.tensors()}
            self._needs[file.name] = sorted({self._shard_of(key) for key in keys})
        return self._needs[file.name]

    def shards_to_fetch(self, file: PlannedFile) -> list[str]:
        """As :meth:`shards_of`, without those of which enough was put aside."""
        names = self.shards_of(file)
        if isinstance(file, DenseFile):
            return [name for name in names if not self._aside_path(name).exists()]
        return names

    def first_missing(
        self, files: Iterable[PlannedFile], is_here: Callable[[str], bool], is_aside: Callable[[str], bool]
    ) -> str | None:
        """The shard that has to come next for files in this order.

        Args:
            files: They are not written.
            is_here: Of a shard.
            is_aside: Whether its dense tensors were put aside.
        """
        for file in files:
            for name in self.shards_of(file):
                if not (is_here(name) or (isinstance(file, DenseFile) and is_aside(name))):
                    return name
        return None

    def put_aside(self) -> list[str]:
        """Names of the shards whose dense tensors an earlier run has put aside."""
        return [name for name in self._dense if self._aside_path(name).exists()]

    def aside_bytes(self, name: str) -> int:
        """Bytes of a shard's dense tensors when they are put aside."""
        planned = self._dense_tensors(name)
        return len(build_header(planned)) + sum(tensor.nbytes for tensor in planned)

    def shard_bytes(self, name: str) -> int:
        """Bytes of a whole shard."""
        return self._checkpoint.shards[name].file_bytes

    def is_all_dense(self, name: str) -> bool:
        """Whether nothing would be gained by putting a shard's dense tensors aside."""
        return len(self._dense.get(name, ())) == len(self._checkpoint.shards[name].tensors)

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
        shards = self._checkpoint.shards
        self._source.expect(
            self.first_missing(
                self._waiting,
                lambda name: shards[name].is_open,
                lambda name: self._aside_path(name).exists(),
            )
        )

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
        elif not (self.is_all_dense(name) or shard.is_reduced):
            self._put_aside(name)  # anew, whatever lies there: the shard is here, and known to be right
            shard.close()
            self._open_aside(name)
            self._source.discard(name)

    def _put_aside(self, name: str) -> None:
        shard = self._checkpoint.shards[name]
        planned = self._dense_tensors(name)
        path = self._aside_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with DurableFile(path) as file:
            file.write(build_header(planned))
            for tensor in planned:
                for data in shard.chunks(tensor.name):
                    file.write(data)
            file.commit()

    def _dense_tensors(self, name: str) -> list[PlannedTensor]:
        tensors = self._checkpoint.shards[name].tensors
        return [PlannedTensor(key, tensors[key].dtype, tensors[key].shape) for key in self._dense[name]]

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
