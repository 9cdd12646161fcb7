"""The tensors of a head for multi-token prediction among those of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from moechat.models.dense import EncodedTensorSource


class MtpTensors:
    """The tensors of a head among those of a store, under the names of :func:`mtp_names`.

    An :class:`~moechat.models.dense.EncodedTensorSource`.

    Args:
        source: All tensors.
        names: Names there by the names here.
    """

    def __init__(self, source: EncodedTensorSource, names: dict[str, str]) -> None:
        self._source = source
        self._names = names

    def keys(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._names)

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors type name and shape."""
        return self._source.info(self._names[key])

    def dense_encoding(self, key: str) -> str | None:
        """The encoding of a tensor that has one."""
        return self._source.dense_encoding(self._names[key])

    def array(self, key: str) -> np.ndarray[Any, Any]:
        """Read-only values, mapped from the file; bf16 as uint16."""
        return self._source.array(self._names[key])

    def release(self, names: Iterable[str]) -> None:
        """Drop the mapped pages of tensors."""
        self._source.release([self._names[name] for name in names])

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """The order of the columns of encoded rows, if it is not the model's."""
        return self._source.columns(self._names[name])

    def encoded_rows(self, name: str, expert: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The rows of a tensor that has an encoding, ``uint8 [rows, bytes]``."""
        return self._source.encoded_rows(self._names[name], expert)
