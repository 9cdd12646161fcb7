"""Names, types and shapes of stored tensors, without their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol


class TensorHeaders(Protocol):
    """Names, types and shapes of a set of tensors."""

    def keys(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors type name and shape."""
        ...

    def dense_encoding(self, key: str) -> str | None:
        """The encoding that a store has, or will have, of a dense tensor; ``None``: its type."""
        ...


class HeaderTable(dict[str, tuple[str, tuple[int, ...]]]):
    """Headers in memory: type and shape by name. A :class:`TensorHeaders`.

    Attributes:
        encodings: By name, of the tensors that have one.
    """

    encodings: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, source: TensorHeaders) -> HeaderTable:
        """A copy that outlives the files of its source."""
        keys = tuple(source.keys())
        table = cls({key: source.info(key) for key in keys})
        encodings = {key: source.dense_encoding(key) for key in keys}
        table.encodings = {key: found for key, found in encodings.items() if found is not None}
        return table

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors type name and shape."""
        return self[key]

    def dense_encoding(self, key: str) -> str | None:
        """The encoding of a tensor that has one."""
        return self.encodings.get(key)

    def digest(self) -> str:
        """SHA-256 of everything in it, in hexadecimal."""
        parts = (sorted(self.items()), sorted(self.encodings.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()
