"""Peak disk use of a conversion whose shards are fetched one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moechat.store.outline import PlannedFile
from moechat.store.shard_supply import ShardSupply


def peak_disk_bytes(
    files: Sequence[PlannedFile],
    supply: ShardSupply,
    *,
    ahead: bool,
    written: int = 0,
    present: Mapping[str, int] | None = None,
    read_in_place: Collection[str] = (),
) -> int:
    """Largest number of bytes on the disk during a conversion: store, shards, saved dense tensors.

    Simulates :class:`ShardSupply` file by file. A prefetched shard counts in full from the moment its fetch
    may start.

    Args:
        files: Missing files of the store, in the order of the supply.
        supply: Provides the shards that each file needs.
        ahead: The next shard is fetched while a file is written.
        written: Bytes of finished files of the store.
        present: Bytes of each shard already on the disk, complete or not.
        read_in_place: Shards that are read where they are and take no additional space.
    """
    usage = _DiskUsage(files, supply, written, dict(present or {}), frozenset(read_in_place))
    while usage.unwritten:
        usage.write(usage.unwritten[0], ahead=ahead)
    return usage.peak


class _DiskUsage:
    """Disk use during a conversion.

    Attributes:
        peak: Most bytes so far.
        unwritten: Files that are not written yet.
    """

    def __init__(
        self,
        files: Sequence[PlannedFile],
        supply: ShardSupply,
        written: int,
        present: dict[str, int],
        read_in_place: frozenset[str],
    ) -> None:
        self.peak = 0
        self.unwritten = list(files)
        self._supply = supply
        self._written = written
        self._read_in_place = read_in_place
        # Bytes of each shard, by its state.
        self._present = present  # from an earlier run, not needed yet
        self._prefetched: dict[str, int] = {}  # at most one, not needed yet
        self._open: dict[str, int] = {}
        self._saved = {name: supply.saved_dense_bytes(name) for name in supply.saved_dense()}

    def write(self, file: PlannedFile, *, ahead: bool) -> None:
        """Fetch the shards that a file needs, write it, release the shards that no other file needs."""
        for name in self._supply.shards_of(file):
            whole = self._supply.needs_whole(name, file)
            if not (name in self._open or (not whole and name in self._saved)):
                self._prefetched.pop(name, None)
                self._fetch(name, self._open)
            if not whole:
                self._release(name)
        if ahead and not self._prefetched:
            missing = self._supply.first_missing(
                self.unwritten, lambda name: name in self._open, lambda name: name in self._saved
            )
            if missing is not None:
                self._fetch(missing, self._prefetched)
        self._written += file.nbytes
        self._update_peak()
        self.unwritten.remove(file)
        for name in self._supply.shards_of(file):
            self._release(name)

    def _fetch(self, name: str, into: dict[str, int]) -> None:
        self._present.pop(name, None)
        into[name] = 0 if name in self._read_in_place else self._supply.shard_bytes(name)
        self._update_peak()

    def _release(self, name: str) -> None:
        release = self._supply.release_of(name, self.unwritten)
        if release == "discard":
            self._open.pop(name, None)
            self._saved.pop(name, None)
        elif release == "save dense" and name in self._open:
            self._saved[name] = self._supply.saved_dense_bytes(name)
            self._update_peak()
            del self._open[name]

    def _update_peak(self) -> None:
        parts = (self._prefetched, self._open, self._saved, self._present)
        self.peak = max(self.peak, self._written + sum(sum(part.values()) for part in parts))
