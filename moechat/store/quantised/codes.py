"""The content of a quantised matrix without loss: codes and scales in one form for all schemes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from moechat.store.quantised.number_formats import E2M1, E4M3

# ``affine``: scale · (code - zero). The others: scale · table[code], with the table of the number format.
Kind = Literal["affine", "table", "e2m1", "e4m3"]

# Weights decoded at once; the temporaries of one piece fit the processor's caches.
PIECE = 1 << 18
_Result = TypeVar("_Result")
_WORKERS = min(8, os.cpu_count() or 1)


def in_threads(work: Callable[[int], _Result], items: Sequence[int]) -> list[_Result]:
    """Results of ``work`` for all items, computed in several threads if there are several items."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_WORKERS) as pool:
        return list(pool.map(work, items))


@dataclass(frozen=True)
class Codes:
    """One matrix ``[rows, columns]`` as its checkpoint stores it, row = output neuron.

    Attributes:
        kind: Meaning of a code.
        bits: Bits of a code.
        codes: ``uint8 [rows, columns]``, each below ``2 ** bits``; a view with any strides.
        scale: ``float32 [row groups, column groups]``, the product of all scales that a weight has.
        group: Rows and columns that share a scale; the last group of each direction may be smaller.
        zero: ``float32`` of the shape of ``scale``, the code that means 0; ``None``: 0, or no ``affine``.
        column_group: Group of each column, where they are not in order (activation order of GPTQ).
        table: ``float32 [2 ** bits]``, value of each code, for ``table``.
        parts: Where ``scale`` is one factor times numbers in e4m3: their patterns, ``uint8`` of its shape,
            and that factor.
    """

    kind: Kind
    bits: int
    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    group: tuple[int, int]
    zero: NDArray[np.float32] | None = None
    column_group: NDArray[np.intp] | None = None
    table: NDArray[np.float32] | None = None
    parts: tuple[NDArray[np.uint8], np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns

    def values(self, rows: slice = slice(None)) -> NDArray[np.float32]:
        """The weights: one float32 product each, not rounded further.

        Args:
            rows: The rows wanted.

        Returns:
            ``float32 [rows, columns]``, not finite where codes or scales are not.
        """
        index = range(len(self.codes))[rows]
        columns = self.codes.shape[1]
        out = np.empty((len(index), columns), np.float32)
        step = max(1, PIECE // max(1, columns))
        groups = self.column_group
        if groups is None and columns % self.group[1]:
            groups = np.arange(columns) // self.group[1]
        table = {"e2m1": E2M1, "e4m3": E4M3, "table": self.table, "affine": None}[self.kind]

        def work(first: int) -> None:
            part = index[first : first + step]
            codes = self.codes[part.start : part.stop : part.step]
            values = out[first : first + step]
            by_row = np.asarray(part) // self.group[0]
            if table is not None:
                np.take(table, codes, out=values, mode="clip")  # without a copy; no code is larger
            else:
                values[...] = codes
                if self.zero is not None:
                    self._apply(np.subtract, values, self.zero[by_row], groups)
            with np.errstate(invalid="ignore", over="ignore"):  # reported by who uses the values
                self._apply(np.multiply, values, self.scale[by_row], groups)

        in_threads(work, range(0, len(index), step))
        return out

    def _apply(
        self, operation: Any, values: NDArray[Any], parameters: NDArray[Any], groups: NDArray[Any] | None
    ) -> None:
        """Combine values with the parameter of each one's group, in place."""
        if groups is None:
            values = values.reshape(len(values), -1, self.group[1])
            operation(values, parameters[:, :, None], out=values)
        else:
            operation(values, parameters[:, groups], out=values)
