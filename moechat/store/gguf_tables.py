"""Small tensors of a GGUF file that belong to its configuration: factors of rotary frequencies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moechat.store.gguf_header import GgufHeader

Tables = dict[str, tuple[float, ...]]
_NAMES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_F32 = 0
_MAX_ELEMENTS = 1 << 12


def table_ranges(header: GgufHeader) -> dict[str, tuple[int, int]]:
    """First and last byte, exclusive, of the tables of a file, by their names; lists of float32 only."""
    found = {}
    for name in _NAMES:
        tensor = header.tensors.get(name)
        if tensor and tensor.kind == _F32 and len(tensor.shape) == 1 and tensor.shape[0] <= _MAX_ELEMENTS:
            found[name] = (tensor.start, tensor.end)
    return found


def read_tables(header: GgufHeader, read: Callable[[int, int], bytes]) -> Tables:
    """The tables of a file.

    Args:
        header: Its header.
        read: Returns the bytes of a range of the file.
    """
    return {
        name: tuple(np.frombuffer(read(start, end), "<f4").astype(float).tolist())
        for name, (start, end) in table_ranges(header).items()
    }
