"""Checksums of parts of a file, taken from its bytes on their way to the disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from moechat import _native

# Begin and end of bytes in a file.
Range = tuple[int, int]


def checksum(data: bytes | NDArray[np.uint8] | memoryview, before: int = 0) -> int:
    """CRC-32C of bytes, after others whose checksum is ``before``."""
    return _native.crc32c(np.frombuffer(data, np.uint8), before)


class RangeSums:
    """CRC-32C of ranges of a file whose bytes come in order.

    Args:
        ranges: Any ranges; they may overlap.
    """

    # Invariant: _sums has the checksum of the bytes of each range that lie before _position; the ranges from
    # _next on have none there.
    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges = sorted(set(ranges))
        self.restart()

    def restart(self) -> None:
        """The first byte comes next."""
        self._position = self._next = 0
        self._open: list[Range] = []
        self._sums: dict[Range, int] = {}

    def add(self, data: bytes) -> None:
        """The next bytes."""
        begin, end = self._position, self._position + len(data)
        while self._next < len(self._ranges) and self._ranges[self._next][0] < end:
            self._open.append(self._ranges[self._next])
            self._next += 1
        view = memoryview(data)
        for one in self._open:
            part = view[max(0, one[0] - begin) : max(0, one[1] - begin)]
            self._sums[one] = checksum(part, self._sums.get(one, 0))
        self._open = [one for one in self._open if one[1] > end]
        self._position = end

    @property
    def found(self) -> Mapping[Range, int]:
        """The checksums, if all bytes have come."""
        return dict(self._sums)
