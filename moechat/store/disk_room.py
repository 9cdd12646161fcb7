"""What the disk holds at the fullest moment of a conversion whose shards come one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moechat.store.outline import DenseFile, ExpertsFile, PlannedFile
from moechat.store.supply import ShardSupply


def most_bytes_at_once(
    files: Sequence[PlannedFile],
    supply: ShardSupply,
    *,
    ahead: bool,
    written: int = 0,
    lying: Mapping[str, int] | None = None,
    elsewhere: Collection[str] = (),
) -> int:
    """Bytes of the disk that a conversion takes at most: store, shards, dense tensors put aside.

    It goes through the files as :class:`ShardSupply` does. A shard that may come ahead counts as a whole from
    the moment at which it may begin to come.

    Args:
        files: Files of the store that are missing, in the order of the supply.
        supply: Says what each of them needs.
        ahead: The next shard comes while a file is written.
        written: Bytes of files of the store that are finished.
        lying: Bytes that are here already of each shard, whole or not.
        elsewhere: Shards that are only read, where they lie.
    """
    room = _Room(files, supply, written, dict(lying or {}), frozenset(elsewhere))
    while room.waiting:
        room.write(room.waiting[0], ahead=ahead)
    return room.most


class _Room:
    """The disk in the middle of a conversion.

    Attributes:
        most: Bytes at the fullest moment so far.
        waiting: Files that are not written.
    """

    def __init__(
        self,
        files: Sequence[PlannedFile],
        supply: ShardSupply,
        written: int,
        lying: dict[str, int],
        elsewhere: frozenset[str],
    ) -> None:
        self.most = 0
        self.waiting = list(files)
        self._supply = supply
        self._written = written
        self._elsewhere = elsewhere
        self._lying = lying  # of an earlier run, and not needed yet
        self._coming: dict[str, int] = {}  # one at most, which no file has needed yet
        self._here: dict[str, int] = {}
        self._aside = {name: supply.aside_bytes(name) for name in supply.put_aside()}

    def write(self, file: PlannedFile, *, ahead: bool) -> None:
        """Bring what a file needs, write it, let go what no other needs."""
        is_dense = isinstance(file, DenseFile)
        for name in self._supply.shards_of(file):
            if not (name in self._here or (is_dense and name in self._aside)):
                self._come(name)
            if is_dense:
                self._let_go(name)
        if ahead and not self._coming:
            self._come_ahead()
        self._written += file.nbytes
        self._look()
        self.waiting.remove(file)
        for name in self._supply.shards_of(file):
            self._let_go(name)

    def _come(self, name: str) -> None:
        self._coming.pop(name, None)
        self._lying.pop(name, None)
        self._here[name] = self._taken_by(name)
        self._look()

    def _taken_by(self, name: str) -> int:
        return 0 if name in self._elsewhere else self._supply.shard_bytes(name)

    def _come_ahead(self) -> None:
        name = self._supply.first_missing(
            self.waiting, lambda name: name in self._here, lambda name: name in self._aside
        )
        if name is not None:
            self._lying.pop(name, None)
            self._coming[name] = self._taken_by(name)
            self._look()

    def _let_go(self, name: str) -> None:
        needing = [file for file in self.waiting if name in self._supply.shards_of(file)]
        if any(isinstance(file, ExpertsFile) for file in needing):
            return
        if not needing:
            self._here.pop(name, None)
            self._aside.pop(name, None)
        elif name in self._here and not self._supply.is_all_dense(name):
            self._aside[name] = self._supply.aside_bytes(name)
            self._look()
            del self._here[name]

    def _look(self) -> None:
        parts = (self._coming, self._here, self._aside, self._lying)
        self.most = max(self.most, self._written + sum(sum(part.values()) for part in parts))
