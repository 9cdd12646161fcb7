"""Tensors spread over several safetensors files, addressed by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError, MoechatError
from moechat.store.safetensors_file import TensorEntry


class TensorFile(Protocol):
    """Interface of the files in a set; see :class:`moechat.store.safetensors_file.SafetensorsFile`."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...
    @property
    def lost(self) -> int | None:
        """Offset of the first byte that could not be read, and was read as 0; ``None``: all could."""
        ...

    def is_current(self) -> bool: ...
    def array(self, name: str) -> NDArray[Any]: ...
    def chunks(self, name: str) -> Iterator[bytes]: ...
    def release(self, start: int, end: int) -> None: ...
    def checksum(self, start: int, end: int) -> int:
        """CRC-32C of bytes ``[start, end)`` of the file."""
        ...

    def place(self, name: str) -> str:
        """File and tensor, for messages; see :func:`moechat.store.mapped_file.place_of`."""
        ...


@runtime_checkable
class EncodedFile(Protocol):
    """A file with tensors whose encodings a store can keep."""

    def encoding(self, name: str) -> str | None:
        """The encoding of a tensor, by its name in :func:`moechat._native.kept_encodings`, or ``None``."""

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """The order of the columns of encoded rows, if it is not the model's; see
        :mod:`moechat.store.encoded_file`.
        """

    def encoded_rows(self, name: str, expert: int | None) -> NDArray[np.uint8]:
        """The rows of a matrix in its encoding, ``uint8 [rows, bytes]``; a view.

        Args:
            name: The tensor.
            expert: Index in its dimension 0; ``None`` if it is one matrix.
        """
        ...


@runtime_checkable
class PackedFile(Protocol):
    """A file that may have packed tensors whose encodings no store can keep."""

    def unkept_type(self, name: str) -> str:
        """The type of such a tensor, for people; empty for any other."""
        ...


class TensorSet:
    """Read-only map from tensor name to data over checked, mapped files."""

    def __init__(
        self,
        owners: Mapping[str, TensorFile],
        *,
        where: str,
        error: type[MoechatError] = CheckpointError,
    ) -> None:
        """Create the map.

        Args:
            owners: The file that holds each tensor.
            where: Name of the set for messages.
            error: Class raised for an unknown tensor name.
        """
        self._owners = dict(owners)
        self._where = where
        self._error = error

    def keys(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._owners.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """The files, each once."""
        return tuple({id(file): file for file in self._owners.values()}.values())

    def file_of(self, name: str) -> TensorFile:
        """The file that holds a tensor.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self._file(name)

    def entry(self, name: str) -> TensorEntry:
        """Type, shape and byte range of one tensor.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self._file(name).tensors[name]

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors element type (``"BF16"``) and shape of one tensor.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        entry = self.entry(name)
        return entry.dtype, entry.shape

    def array(self, name: str) -> NDArray[Any]:
        """Read-only view of one tensor; see :meth:`SafetensorsFile.array` for the element types.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self._file(name).array(name)

    def matrix(self, name: str, expert: int | None, rows: slice) -> NDArray[Any]:
        """Rows of one matrix, a read-only view where possible.

        Args:
            name: A tensor.
            expert: Index in its dimension 0; ``None`` if it is one matrix.
            rows: The rows wanted.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        tensor = self.array(name)
        return (tensor if expert is None else tensor[expert])[rows]

    def encoding(self, name: str) -> str | None:
        """The encoding of a tensor that a store can keep; ``None`` for others.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        file = self._file(name)
        return file.encoding(name) if isinstance(file, EncodedFile) else None

    def unkept_type(self, name: str) -> str:
        """See :class:`PackedFile`; empty for tensors of other files.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        file = self._file(name)
        return file.unkept_type(name) if isinstance(file, PackedFile) else ""

    def encoded_rows(self, name: str, expert: int | None) -> NDArray[np.uint8]:
        """See :class:`EncodedFile`. REQUIRES: the tensor has an encoding.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        file = self._file(name)
        assert isinstance(file, EncodedFile)
        return file.encoded_rows(name, expert)

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """See :class:`EncodedFile`.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        file = self._file(name)
        return file.columns(name) if isinstance(file, EncodedFile) else None

    def dense_encoding(self, name: str) -> str | None:
        """The encoding that a store keeps of a dense tensor; ``None``: the tensor's visible type.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self.encoding(name)

    def dense_rows(self, name: str) -> NDArray[np.uint8]:
        """The rows of a dense tensor in its :meth:`dense_encoding`, ``uint8 [rows, bytes]``. REQUIRES: it has
        one.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self.encoded_rows(name, None)

    def rows_first(self, name: str) -> bool:
        """Whether matrices are ``[rows, columns]`` even where the model's parameter is transposed."""
        return False

    def packed_as(self, name: str) -> str | None:
        """The format of a quantised tensor, for people; ``None`` for a plain one."""
        return None

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Names in the files of the tensors that one tensor is made from; of a plain one its own."""
        return (name,)

    def stored_file(self, name: str) -> TensorFile:
        """The file that holds a tensor, by its name in the file.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self._file(name)

    def place(self, name: str) -> str:
        """File and tensor, for messages; see :func:`moechat.store.mapped_file.place_of`.

        Raises:
            MoechatError: Of class ``error``; the tensor does not exist.
        """
        return self._file(name).place(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor in pieces of at most 8 MiB.

        Raises:
            MoechatError: The tensor does not exist, or its file has changed since it was opened.
        """
        return self._file(name).chunks(name)

    def release(self, names: Iterable[str], part: tuple[int, int] | None = None) -> None:
        """Drop the mapped pages of tensors from this process; the page cache keeps them.

        Args:
            names: Names of tensors.
            part: ``(i, n)`` limits it to the ``i``-th of ``n`` equal parts of each tensor.
        """
        for name in names:
            file = self._file(name)
            entry = file.tensors[name]
            start, end = entry.start, entry.end
            if part is not None:
                index, count = part
                size = entry.nbytes // count
                start, end = start + index * size, start + (index + 1) * size
            file.release(start, end)

    def _file(self, name: str) -> TensorFile:
        try:
            return self._owners[name]
        except KeyError:
            raise self._error(f"{self._where} has no tensor {name!r}") from None
