"""The file in the cache directory that stores the packed dense layers of a model.

Packing reads every dense weight and takes seconds for a large model, so the result is stored in one file per
model and number of bits. The header identifies the input: the dense files of the store by their SHA-256, the
layers, the bits, the format of the packed groups. It also has a SHA-256 of every piece of the data. If the
file does not match, is damaged or missing, the layers are packed again, so it may be deleted at any time.

Layout: magic (8 bytes), length of the header (8, little-endian), header (JSON), zeros up to a multiple of
4096 bytes, then the packed layers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.atomic_file import TEMPORARY, replacing
from moechat.models.dense_form import DenseForm

_MAGIC = b"MOEDENSE"
SOLVER = "least-squares"
_FORMAT = 1  # of this file; packed groups have the version of the block format
_ALIGNMENT = 4096
_PIECE = 32 << 20
_WORKERS = 8  # most threads that read and hash pieces
_MOST_HEADER = 16 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PackedFile:
    """The file of a model's packed layers.

    Attributes:
        path: Its path; the file may not exist yet.
        content: Header fields that identify input and content; files with other values are ignored.
        nbytes: Bytes of all packed layers.
    """

    path: Path
    content: Mapping[str, Any]
    nbytes: int

    @classmethod
    def of(
        cls, directory: Path, dense_files: Mapping[str, str], form: DenseForm, dtype: torch.dtype
    ) -> PackedFile:
        """The file for a store.

        Args:
            directory: Directory of packed files; created by the first write.
            dense_files: SHA-256 of the store's dense files by name.
            form: Layers that are quantised and their bits.
            dtype: Type of the model, from which weights are packed that are not kept as stored.
        """
        layers = [(name, *part) for name in form.quantised for part in form.parts_of(name)]
        content = {
            "format": _FORMAT,
            "group_format": _native.BLOCK_FORMAT_VERSION,
            "solver": SOLVER,
            "dense_files": dict(sorted(dense_files.items())),
            "layers": [list(layer) for layer in layers],
            "from": str(dtype) if any(f"{name}.weight" not in form.kept for name, *_ in layers) else "stored",
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        nbytes = sum(_native.LinearLayout(*layer[1:]).nbytes for layer in layers)
        return cls(directory / f"{key[:32]}.packed", content, nbytes)

    def read(self, into: Bytes) -> bool:
        """Fill ``into`` (uint8 ``[nbytes]``) from the file.

        Returns:
            ``False`` if the file is missing, damaged or does not match; ``into`` is undefined then.
        """

        def piece(file: int, at: int, offset: int) -> str:
            return _read_piece(file, offset, into[at : at + _PIECE])

        return self._read(piece, _WORKERS)

    def read_in_pieces(self, take: Callable[[int, Bytes], None]) -> bool:
        """As :meth:`read`, but calls ``take(offset, piece)`` for each piece in order.

        ``take`` must not keep a reference to the piece, whose memory is reused.
        """
        buffer = np.empty(min(_PIECE, self.nbytes), np.uint8)

        def piece(file: int, at: int, offset: int) -> str:
            part = buffer[: min(_PIECE, self.nbytes - at)]
            digest = _read_piece(file, offset, part)
            take(at, part)
            return digest

        return self._read(piece, 1)

    def _read(self, read: Callable[[int, int, int], str], workers: int) -> bool:
        """Check the header, call ``read(file, offset_in_data, offset_in_file)`` for each piece, check
        hashes.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                number = file.fileno()
                start = os.pread(number, 16, 0)
                length = int.from_bytes(start[8:], "little")
                if start[:8] != _MAGIC or len(start) < 16 or length > _MOST_HEADER:
                    return False
                header = json.loads(os.pread(number, length, 16))
                if not isinstance(header, dict) or {**header, "sha256": None} != {
                    **self.content,
                    "sha256": None,
                }:
                    return False
                begin = _data_start(length)
                if os.fstat(number).st_size != begin + self.nbytes:
                    return False
                digests = _each_piece(self.nbytes, lambda at: read(number, at, begin + at), workers)
                return bool(digests == header.get("sha256"))
        except (OSError, ValueError):
            return False

    def write(self, data: Bytes) -> None:
        """Write the packed layers atomically.

        Raises:
            OSError: The file cannot be written.
        """
        self._write(lambda at: data[at : at + _PIECE], _WORKERS)

    def write_in_pieces(self, give: Callable[[int, int], Bytes]) -> None:
        """As :meth:`write`, with the data from ``give(start, end)``, which is called twice for each piece.

        Raises:
            OSError: The file cannot be written.
        """
        self._write(lambda at: give(at, min(at + _PIECE, self.nbytes)), 1)

    def _write(self, piece: Callable[[int], Bytes], workers: int) -> None:
        digests = _each_piece(self.nbytes, lambda at: hashlib.sha256(piece(at).data).hexdigest(), workers)
        header = json.dumps({**self.content, "sha256": digests}).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(self.path.parent)
        with replacing(self.path) as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            file.write(bytes(_data_start(len(header)) - 16 - len(header)))
            for at in range(0, self.nbytes, _PIECE):
                file.write(piece(at).data)


def _read_piece(file: int, offset: int, into: Bytes) -> str:
    """Fill ``into`` from an offset of a file; returns its SHA-256."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:].data], offset + done)
        if count <= 0:
            raise OSError("the file ends early")
        done += count
    return hashlib.sha256(into.data).hexdigest()


def _remove_abandoned(directory: Path) -> None:
    """Delete temporary files of processes that were killed while writing."""
    for path in directory.glob(f".*{TEMPORARY}"):
        with suppress(OSError, ValueError):
            writer = int(path.name.split(".")[-2])
            try:
                os.kill(writer, 0)
            except ProcessLookupError:
                path.unlink()


def _data_start(header: int) -> int:
    return -(-(16 + header) // _ALIGNMENT) * _ALIGNMENT


def _each_piece(nbytes: int, work: Callable[[int], str], workers: int) -> list[str]:
    places = range(0, nbytes, _PIECE)
    if workers == 1:
        return [work(at) for at in places]
    with ThreadPoolExecutor(min(workers, _native.num_threads())) as pool:
        return list(pool.map(work, places))
