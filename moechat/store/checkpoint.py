"""A checkpoint directory with config, safetensors shards and tokenizer files, as transformers writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from moechat.store.checkpoint_files import (
    CONFIG_FILE,
    INDEX_FILE,
    config_bytes,
    config_of,
    open_tensors,
    read_limited,
)
from moechat.store.config_limits import MAX_CONFIG_BYTES, require_layers_in
from moechat.store.expert_refs import ExpertRef, MatrixRef, VectorRef
from moechat.store.quantised.schemes import plain_view, source_format
from moechat.store.quantised.weights import PackedTensors
from moechat.store.side_files import side_files
from moechat.store.source_files import kept_mode, require_safe
from moechat.store.tensors import TensorSet

_FLOAT_DTYPES = ("F32", "F16", "BF16")
# Part of the fingerprints of quantised checkpoints, so that stores are made again when more of them is kept.
_KEPT_VERSION = 2


class Checkpoint:
    """A checkpoint directory whose files have been checked and mapped; no weight has been read.

    Attributes:
        path: The directory.
        title: Name for messages.
        config: The content of ``config.json``.
        tensors: Its tensors; quantised ones appear as plain ones, see :mod:`moechat.store.quantised`.
        source_format: The format of its quantised weights, for people; ``None`` if it states none.
    """

    def __init__(self, path: Path, config: bytes, tensors: TensorSet) -> None:
        """Use :meth:`open`; ``config`` is the content of ``config.json``."""
        self.path = path
        self.title = str(path)
        # Invariant: everything is decided from these bytes. A finished conversion has read the same again.
        self._config_bytes = config
        self.config = config_of(path / CONFIG_FILE, config)
        require_layers_in(self.config, len(tensors), str(path / CONFIG_FILE))
        self.tensors = plain_view(tensors, self.config, path)
        self.source_format = source_format(self.config, path)
        self._fingerprint = self._current_fingerprint()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Check a checkpoint directory.

        Raises:
            ModelNotFoundError: The directory does not exist.
            CheckpointError: A file is missing or malformed, a link out of the directory, or no regular file;
                the message names it.
            UnsupportedModelError: The weights exist only as pickles.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ModelNotFoundError(f"{directory} is not a directory")
        require_safe(directory)
        return cls(directory, config_bytes(directory), open_tensors(directory))

    def keys(self) -> KeysView[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors element type (``"BF16"``) and shape of one tensor.

        Raises:
            CheckpointError: The tensor does not exist.
        """
        return self.tensors.info(key)

    def place(self, key: str) -> str:
        """File and tensor, for messages; see :meth:`TensorSet.place`.

        Raises:
            CheckpointError: The tensor does not exist.
        """
        return self.tensors.place(key)

    def array(self, key: str) -> NDArray[Any]:
        """Read-only mapped view of one tensor, decoded if it is quantised; bf16 as ``uint16``.

        Raises:
            CheckpointError: The tensor does not exist.
        """
        return self.tensors.array(key)

    def matrix_shape(self, ref: MatrixRef) -> tuple[int, int]:
        """Shape ``[rows, cols]`` of a matrix, from the headers.

        Raises:
            CheckpointError: The tensor is missing, or the reference does not fit its shape.
            UnsupportedModelError: The tensor's element type is not supported for experts.
        """
        rows, cols = self._selected(ref.key, ref.expert, 2)
        if ref.transposed:
            rows, cols = cols, rows
        last = ref.taken.stop - 1
        if last >= rows:
            raise CheckpointError(
                f"{self.place(ref.key)} has matrices of {rows} rows, the configuration needs at least "
                f"{last + 1}"
            )
        return ref.rows, cols

    def matrix(self, ref: MatrixRef) -> NDArray[Any]:
        """One weight matrix ``[rows, cols]``, row = output neuron.

        Returns:
            ``float32``, ``float16``, or ``uint16`` for bf16; a view with any strides where possible. Data
            unaligned in the file is copied, quantised data decoded.

        Raises:
            CheckpointError: As :meth:`matrix_shape`.
            UnsupportedModelError: As :meth:`matrix_shape`.
        """
        self.matrix_shape(ref)
        stored = slice(None) if ref.transposed else ref.taken
        matrix = self.tensors.matrix(ref.key, ref.expert, stored)
        if ref.transposed:
            matrix = matrix.T[ref.taken]
        return matrix if matrix.flags.aligned else matrix.copy()

    def dense_encoding(self, key: str) -> str | None:
        """See :meth:`TensorSet.dense_encoding`.

        Raises:
            CheckpointError: The tensor does not exist.
        """
        return self.tensors.dense_encoding(key)

    def encoding(self, ref: MatrixRef) -> str | None:
        """The encoding of a matrix that a store can keep, as in :func:`moechat._native.kept_encodings`.

        Returns:
            ``None`` if there is none: the matrix is not quantised, or in another way, or transposed.

        Raises:
            CheckpointError: The tensor does not exist.
        """
        if ref.transposed:
            return None
        return self.tensors.encoding(ref.key)

    def encoded_rows(self, ref: MatrixRef) -> NDArray[np.uint8]:
        """The rows of a matrix in its encoding, ``uint8 [rows, bytes]``. REQUIRES: :meth:`encoding`.

        Raises:
            CheckpointError: As :meth:`matrix_shape`.
        """
        self.matrix_shape(ref)
        return self.tensors.encoded_rows(ref.key, ref.expert)[ref.taken]

    def vector_size(self, ref: VectorRef) -> int:
        """Number of elements of a bias, from the headers.

        Raises:
            CheckpointError: The tensor is missing, or the reference does not fit its shape.
            UnsupportedModelError: The tensor's element type is not a float.
        """
        (length,) = self._selected(ref.key, ref.expert, 1)
        last = ref.taken.stop - 1
        if last >= length:
            raise CheckpointError(
                f"{self.place(ref.key)} has {length} elements, the configuration needs at least {last + 1}"
            )
        return ref.size

    def vector(self, ref: VectorRef) -> NDArray[np.float32]:
        """One bias as ``float32 [size]``.

        Raises:
            CheckpointError: As :meth:`vector_size`.
            UnsupportedModelError: As :meth:`vector_size`.
        """
        self.vector_size(ref)
        tensor = self.array(ref.key)
        if ref.expert is not None:
            tensor = tensor[ref.expert]
        values = tensor[ref.taken]
        if self.info(ref.key)[0] == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def _selected(self, key: str, expert: int | None, dimensions: int) -> tuple[int, ...]:
        """Shape of a float tensor, or of one expert in it; it must have ``dimensions`` dimensions."""
        dtype, shape = self.info(key)
        if dtype not in _FLOAT_DTYPES:
            raise UnsupportedModelError(
                f"{self.place(key)} is {dtype}; experts are read from {', '.join(_FLOAT_DTYPES)}",
                hint="take the bf16 or fp16 version of this model",
            )
        wanted = dimensions + (expert is not None)
        if len(shape) != wanted:
            raise CheckpointError(
                f"{self.place(key)} has shape {list(shape)}; {wanted} dimensions are expected"
            )
        if expert is None:
            return shape
        if expert >= shape[0]:
            raise CheckpointError(
                f"{self.place(key)} has {shape[0]} experts, the configuration needs at least {expert + 1}"
            )
        return shape[1:]

    def release(self, expert: ExpertRef) -> None:
        """Drop the mapped pages of one expert from this process; the page cache keeps them."""
        for _, matrix in expert.matrices:
            part = None if matrix.expert is None else (matrix.expert, self.info(matrix.key)[1][0])
            self.tensors.release((matrix.key,), part)

    def tokenizer_files(self) -> dict[str, Path]:
        """Files to copy into a store besides the weights; see :func:`moechat.store.side_files.side_files`."""
        return side_files(self.path, documents=True)

    def file_mode(self, *others: Path) -> int:
        """Permissions of a file of a store that is made from this; see :func:`kept_mode`.

        Args:
            others: Further files that it is made from.
        """
        return kept_mode([*(file.path for file in self.tensors.files), *others])

    def fingerprint(self) -> str:
        """Identity of the source as opened: hash of the config and of name, size and mtime of all files used.

        Licence and card are excluded, so that an edited README does not require a new store.
        """
        if not isinstance(self.tensors, PackedTensors):
            return self._fingerprint
        return hashlib.sha256(f"{_KEPT_VERSION} {self._fingerprint}".encode()).hexdigest()

    def require_unchanged(self) -> None:
        """Check that the files on disk are still those that were opened, and that the configuration reads the
        same again.

        Raises:
            CheckpointError: One was replaced, altered or removed, or see :meth:`require_readable`.
        """
        self.require_readable()
        config = read_limited(self.path / CONFIG_FILE, MAX_CONFIG_BYTES)
        if config != self._config_bytes or self._current_fingerprint() != self._fingerprint:
            raise CheckpointError(
                f"{self.title} has changed since it was opened", hint="run the command again"
            )

    def require_readable(self) -> None:
        """Check that all that was read of the files was there; zeros were read in place of what was not.

        Raises:
            CheckpointError: A file became shorter while it was in use, or its disk failed.
        """
        for file in self.tensors.files:
            if (lost := file.lost) is not None:
                raise CheckpointError(
                    f"{file.path} could not be read while it was in use: byte {lost} and those behind it",
                    hint="another program may have cut it short, or the disk that holds it fails (dmesg)",
                )

    def _current_fingerprint(self) -> str:
        files = {CONFIG_FILE: self.path / CONFIG_FILE, **side_files(self.path, documents=False)}
        files.update({str(file.path.relative_to(self.path)): file.path for file in self.tensors.files})
        index = self.path / INDEX_FILE
        if index.exists():
            files[INDEX_FILE] = index
        digest = hashlib.sha256()
        try:
            for file in self.tensors.files:
                if not file.is_current():
                    raise CheckpointError(f"{file.path} has changed since it was opened")
            for name in sorted(files):
                status = files[name].stat()
                digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
            digest.update(self._config_bytes)
        except OSError as problem:
            raise CheckpointError(
                f"{self.path} has changed: {problem.filename}: {problem.strerror}"
            ) from problem
        return digest.hexdigest()
