"""Changes that turn a tensor of a GGUF file into the checkpoint's: the inverse of llama.cpp's converter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError

Shape = tuple[int, ...]


class Change(Protocol):
    """One step; steps compare by value."""

    @property
    def arithmetic(self) -> bool:
        """Whether values change; otherwise elements are only moved."""
        ...

    @property
    def by_rows(self) -> bool:
        """Whether rows, along the last axis, stay whole, so that encoded ones can be moved."""
        ...

    def shape(self, shape: Shape) -> Shape:
        """Shape of the result.

        Raises:
            CheckpointError: It cannot be applied to a tensor of this shape.
        """
        ...

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """The changed tensor; ``float32`` if :attr:`arithmetic`, else of any type."""
        ...


@dataclass(frozen=True, slots=True)
class JoinHalves:
    """Puts the two halves of each head's rows one after the other; the file interleaves them.

    Attributes:
        heads: Number of heads that the rows belong to.
    """

    heads: int
    arithmetic = False
    by_rows = True

    def shape(self, shape: Shape) -> Shape:
        """See :class:`Change`."""
        _require(shape[0] % (2 * self.heads) == 0, shape, f"{self.heads} heads")
        return shape

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Change`."""
        pairs = values.reshape(self.heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)


@dataclass(frozen=True, slots=True)
class Ungroup:
    """Exchanges the two indices that positions of one axis are made of.

    Position ``start + (j * inner + i) * size + k`` of the file is ``start + (i * outer + j) * size + k`` of
    the checkpoint.

    Attributes:
        outer: Number of values of the file's slower index ``j``.
        inner: Number of values of its faster index ``i``.
        size: Positions that stay together.
        axis: The axis.
        start: Positions before it stay.
    """

    outer: int
    inner: int
    size: int = 1
    axis: int = 0
    start: int = 0
    arithmetic = False

    @property
    def by_rows(self) -> bool:
        """See :class:`Change`."""
        return self.axis == 0

    def shape(self, shape: Shape) -> Shape:
        """See :class:`Change`."""
        wanted = self.start + self.outer * self.inner * self.size
        fits = self.axis < len(shape) and shape[self.axis] == wanted
        _require(fits, shape, f"{wanted} on axis {self.axis}")
        return shape

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Change`."""
        kept, moved = np.split(values, [self.start], axis=self.axis)
        before, after = moved.shape[: self.axis], moved.shape[self.axis + 1 :]
        parts = moved.reshape(*before, self.outer, self.inner, self.size, *after)
        moved = parts.swapaxes(self.axis, self.axis + 1).reshape(moved.shape)
        return np.concatenate([kept, moved], axis=self.axis) if self.start else moved


@dataclass(frozen=True, slots=True)
class Rows:
    """Takes rows of a tensor in which the file joins several of the checkpoint's.

    Attributes:
        start: The first row.
        count: Number of rows.
        whole: Number of rows that the file's tensor has.
    """

    start: int
    count: int
    whole: int
    arithmetic = False
    by_rows = True

    def shape(self, shape: Shape) -> Shape:
        """See :class:`Change`."""
        _require(shape[0] == self.whole, shape, f"{self.whole} rows")
        return (self.count, *shape[1:])

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Change`."""
        return values[self.start : self.start + self.count]


@dataclass(frozen=True, slots=True)
class Reshape:
    """Gives a tensor another shape, with its elements in the same order."""

    to: Shape
    arithmetic = False
    by_rows = False

    def shape(self, shape: Shape) -> Shape:
        """See :class:`Change`."""
        _require(math.prod(shape) == math.prod(self.to), shape, f"shape {list(self.to)}")
        return self.to

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Change`."""
        return values.reshape(self.to)


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a constant: norms that the file stores plus 1."""

    constant: float
    arithmetic = True
    by_rows = False

    def shape(self, shape: Shape) -> Shape:
        """See :class:`Change`."""
        return shape

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Change`."""
        changed: NDArray[Any] = values + np.float32(self.constant)
        return changed


@dataclass(frozen=True, slots=True)
class LogOfNegative:
    """``log(-x)``: the file stores ``-exp(A_log)``."""

    arithmetic = True
    by_rows = False

    def shape(self, shape: Shape) -> Shape:
        """See :class:`Change`."""
        return shape

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """See :class:`Change`."""
        if not (values < 0).all():
            raise CheckpointError("it has values that are not negative, whose logarithm is needed")
        changed: NDArray[Any] = np.log(-values)
        return changed


def _require(fits: bool, shape: Shape, wanted: str) -> None:
    if not fits:
        raise CheckpointError(f"it has shape {list(shape)}, which does not fit {wanted}")
