"""Fetches the shards of a checkpoint one at a time and discards each after its last use.

The headers of all shards are known from the beginning, so the whole store is planned and checked before the
first shard is fetched. Experts are converted layer by layer, as soon as all shards of a layer are available.
Nearly every shard has dense tensors, but dense files are written last. So before a shard is discarded, its
dense tensors are saved in ``<shard>.dense``, with their checksums in ``<shard>.dense.sums``: they may wait
there for days, and no hash of the hub covers them. The disk then holds the store, the shards of one layer,
the saved dense tensors, and the next shard if its source prefetches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Literal, Protocol

from moechat.errors import CheckpointError
from moechat.store.encoded_file import dense_chunks, encodings_header, planned_dense
from moechat.store.files import DurableFile
from moechat.store.outline import DenseFile, ExpertsFile, PlannedFile
from moechat.store.range_sums import Range, checksum
from moechat.store.safetensors_file import PlannedTensor
from moechat.store.streamed_checkpoint import StreamedCheckpoint

DENSE_SUFFIX = ".dense"
SUMS_SUFFIX = ".sums"


class Supply(Protocol):
    """Provides the tensors of a checkpoint during its conversion."""

    def order(self, files: Sequence[PlannedFile]) -> list[PlannedFile]:
        """Sort the files to write into the best order for the source."""

    def is_one_part(self, files: Sequence[PlannedFile]) -> bool:
        """Whether files are written from one part, so that all can be provided before the first is written.

        Then it is noted that they are written after the last one is.
        """

    def provide(self, file: PlannedFile) -> None:
        """Make all tensors that a file is written from readable."""

    def note_written(self, file: PlannedFile) -> None:
        """Note that a file is written and durable."""


@dataclass(frozen=True)
class FetchedShard:
    """A complete shard, whose hash has been checked.

    Attributes:
        path: The file.
        sums: CRC-32C of the bytes of its tensors, when the hash was right.
    """

    path: Path
    sums: Mapping[Range, int] = field(default_factory=dict)


class ShardSource(Protocol):
    """Delivers shards."""

    def fetch(self, name: str) -> FetchedShard:
        """Fetch a shard."""

    def expect(self, name: str | None) -> None:
        """Announce the next shard, if any, so that it can be prefetched; raises prefetch errors."""

    def discard(self, name: str) -> None:
        """Note that a shard is not needed again in this conversion."""


@dataclass(frozen=True)
class _Needs:
    """Shards that a file of the store needs.

    Attributes:
        whole: Those with its experts.
        dense: Those of which dense tensors are needed.
    """

    whole: frozenset[str]
    dense: frozenset[str]


class ShardSupply:
    """Fetches shards layer by layer and discards them after use; see :class:`Supply`."""

    def __init__(
        self,
        checkpoint: StreamedCheckpoint,
        dense_keys: Iterable[str],
        source: ShardSource,
        saved: Path,
        *,
        keep: bool = False,
        reads: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """Prepare; shards are fetched by :meth:`provide`.

        Args:
            checkpoint: The source.
            dense_keys: Its dense tensors.
            source: Delivers shards.
            saved: Directory for dense tensors of discarded shards.
            keep: Keep all shards and save no dense tensors.
            reads: By decoder layer, dense tensors that are read while its experts are converted, for a
                calibration. Then layers are converted in order.
        """
        self._checkpoint = checkpoint
        self._source = source
        self._saved = saved
        self._keep = keep
        self._names = {id(shard): name for name, shard in checkpoint.shards.items()}
        self._dense: dict[str, list[str]] = {}
        for key in self._stored(dense_keys):
            self._dense.setdefault(self._shard_of(key), []).append(key)
        self._reads = {layer: self._shards_of(keys) for layer, keys in (reads or {}).items()}
        self._needs: dict[str, _Needs] = {}
        self._unwritten: list[PlannedFile] = []

    def order(self, files: Sequence[PlannedFile]) -> list[PlannedFile]:
        """Side files first, then layers in the order in which shards complete them, then dense files.

        With a calibration, layers come in the order of the model.
        """
        rank = {name: number for number, name in enumerate(sorted(self._checkpoint.shards))}

        def place(file: PlannedFile) -> tuple[int, ...]:
            if isinstance(file, ExpertsFile):
                ranks = [rank[name] for name in self._needs_of(file).whole]
                first = () if self._reads else (max(ranks), min(ranks))
                return (1, *first, file.source.layer)
            return (2,) if isinstance(file, DenseFile) else (0,)

        self._unwritten = sorted(files, key=place)
        return list(self._unwritten)

    def is_one_part(self, files: Sequence[PlannedFile]) -> bool:
        """See :class:`Supply`."""
        return len({name for file in files for name in self.shards_of(file)}) <= 1

    def shards_of(self, file: PlannedFile) -> list[str]:
        """Names of the shards that a file is written from, or that are read meanwhile, sorted."""
        needs = self._needs_of(file)
        return sorted(needs.whole | needs.dense)

    def needs_whole(self, name: str, file: PlannedFile) -> bool:
        """Whether a file needs experts of a shard, not only dense tensors."""
        return name in self._needs_of(file).whole

    def _needs_of(self, file: PlannedFile) -> _Needs:
        if file.name not in self._needs:
            whole: frozenset[str] = frozenset()
            dense: frozenset[str] = frozenset()
            if isinstance(file, DenseFile):
                dense = self._shards_of(tensor.name for tensor in file.tensors)
            elif isinstance(file, ExpertsFile):
                whole = self._shards_of({key for expert in file.source.experts for key in expert.tensors()})
                dense = self._reads.get(file.source.layer, dense)
            self._needs[file.name] = _Needs(whole, dense)
        return self._needs[file.name]

    def _suffices(self, name: str, file: PlannedFile, is_saved: Callable[[str], bool]) -> bool:
        return not self.needs_whole(name, file) and is_saved(name)

    def shards_to_fetch(self, file: PlannedFile) -> list[str]:
        """As :meth:`shards_of`, without those whose saved dense tensors suffice."""
        return [name for name in self.shards_of(file) if not self._suffices(name, file, self._is_saved)]

    def first_missing(
        self, files: Iterable[PlannedFile], is_open: Callable[[str], bool], is_saved: Callable[[str], bool]
    ) -> str | None:
        """The next shard to fetch for writing files in this order.

        Args:
            files: Unwritten files.
            is_open: Whether a whole shard is open.
            is_saved: Whether a shard's dense tensors are saved.
        """
        for file in files:
            for name in self.shards_of(file):
                if not (is_open(name) or self._suffices(name, file, is_saved)):
                    return name
        return None

    def saved_dense(self) -> list[str]:
        """Names of the shards whose dense tensors are saved."""
        return [name for name in self._dense if self._is_saved(name)]

    def saved_dense_bytes(self, name: str) -> int:
        """Size of the file that saves a shard's dense tensors."""
        planned = self._dense_tensors(name)
        return len(encodings_header(planned)) + sum(tensor.nbytes for tensor in planned)

    def shard_bytes(self, name: str) -> int:
        """Bytes of a whole shard."""
        return self._checkpoint.shards[name].file_bytes

    def release_of(
        self, name: str, unwritten: Sequence[PlannedFile]
    ) -> Literal["keep", "save dense", "discard"]:
        """What can be done with an open shard, while these files are not written.

        A shard of which only dense tensors are needed is replaced by them, unless it has no others: then
        that frees no space.
        """
        needs = [self._needs_of(file) for file in unwritten]
        whole = any(name in part.whole for part in needs)
        if not whole and not any(name in part.dense for part in needs):
            return "discard"
        all_dense = len(self._dense.get(name, ())) == len(self._checkpoint.shards[name].tensors)
        return "keep" if all_dense or whole else "save dense"

    def provide(self, file: PlannedFile) -> None:
        """See :class:`Supply`."""
        for name in self.shards_of(file):
            shard = self._checkpoint.shards[name]
            dense = not self.needs_whole(name, file)
            if dense and (shard.is_open or self._open_saved(name)):
                continue
            if not shard.is_open or shard.is_reduced:
                shard.close()
                fetched = self._source.fetch(name)
                shard.open_whole(fetched.path, fetched.sums)
            if dense:
                self._release(name)  # unless its experts are still needed
        shards = self._checkpoint.shards
        self._source.expect(
            self.first_missing(
                self._unwritten,
                lambda name: shards[name].is_open and not shards[name].is_reduced,
                self._is_saved,
            )
        )

    def note_written(self, file: PlannedFile) -> None:
        """See :class:`Supply`."""
        self._unwritten.remove(file)
        for name in self.shards_of(file):
            self._release(name)

    def _release(self, name: str) -> None:
        """Discard a shard that no unwritten file needs; keep its dense tensors if only they are needed."""
        shard = self._checkpoint.shards[name]
        release = self.release_of(name, self._unwritten)
        if release == "keep" or self._keep:
            return
        if release == "discard":
            reduced = shard.is_reduced
            shard.close()
            if not reduced:
                self._source.discard(name)
            self._remove_saved(name)
        elif not shard.is_reduced:
            self._save_dense(name)  # replaces an earlier copy, which unlike the open shard is unchecked
            shard.close()
            self._open_saved(name)
            self._source.discard(name)

    def _save_dense(self, name: str) -> None:
        shard = self._checkpoint.shards[name]
        planned = self._dense_tensors(name)
        path = self._saved_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        sums: dict[str, int] = {}
        with DurableFile(path) as file:
            file.write(encodings_header(planned))
            for tensor in planned:
                sum_of = 0
                for data in dense_chunks(shard, tensor):
                    sum_of = checksum(data, sum_of)
                    file.write(data)
                sums[tensor.name] = sum_of
            # Before the tensors appear, so that they never stand there without checksums.
            with DurableFile(self._sums_path(name)) as kept:
                kept.write(json.dumps(sums).encode())
                kept.commit()
            file.commit()

    def _dense_tensors(self, name: str) -> list[PlannedTensor]:
        shard = self._checkpoint.shards[name]
        entries = ((key, shard.tensors[key]) for key in self._dense[name])
        return [planned_dense(shard, key, entry.dtype, entry.shape) for key, entry in entries]

    def _open_saved(self, name: str) -> bool:
        path = self._saved_path(name)
        if not path.exists():
            return False
        shard = self._checkpoint.shards[name]
        try:
            sums, planned = self._sums(name), self._dense_tensors(name)
            plain = {tensor.name: sums[tensor.name] for tensor in planned if tensor.encoding is None}
            shard.open(path, whole=False, sums=plain)
            for tensor in planned:
                found = reduce(lambda before, data: checksum(data, before), dense_chunks(shard, tensor), 0)
                if found != sums[tensor.name]:
                    raise CheckpointError(f"{path} has changed since it was saved")
        except CheckpointError:  # damaged: it can be saved again
            shard.close()
            self._remove_saved(name)
            return False
        return True

    def _sums(self, name: str) -> dict[str, int]:
        path = self._sums_path(name)
        try:
            sums = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            sums = None
        if not isinstance(sums, dict) or any(type(sums.get(key)) is not int for key in self._dense[name]):
            raise CheckpointError(f"{path} does not hold the checksums of saved tensors")
        return sums

    def _remove_saved(self, name: str) -> None:
        for path in (self._saved_path(name), self._sums_path(name)):
            path.unlink(missing_ok=True)

    def _saved_path(self, name: str) -> Path:
        return self._saved / (name + DENSE_SUFFIX)

    def _sums_path(self, name: str) -> Path:
        return self._saved / (name + DENSE_SUFFIX + SUMS_SUFFIX)

    def _is_saved(self, name: str) -> bool:
        return self._saved_path(name).exists()

    def _stored(self, keys: Iterable[str]) -> Iterable[str]:
        """Names in the shards of the tensors that tensors are made from, each once."""
        return dict.fromkeys(name for key in keys for name in self._checkpoint.tensors.stored_names(key))

    def _shards_of(self, keys: Iterable[str]) -> frozenset[str]:
        return frozenset(self._shard_of(key) for key in self._stored(keys))

    def _shard_of(self, stored: str) -> str:
        return self._names[id(self._checkpoint.tensors.stored_file(stored))]
