"""A checkpoint directory with config, safetensors shards and tokenizer files, as transformers writes it."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import stat
from collections.abc import KeysView, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from moechat.store.mxfp4 import decode_mxfp4
from moechat.store.safetensors_file import SafetensorsFile, strict_json
from moechat.store.source import ExpertRef, MatrixRef, VectorRef
from moechat.store.tensors import TensorFile, TensorSet

MAX_JSON_BYTES = 32 << 20
MAX_SIDE_FILE_BYTES = 256 << 20
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Side files copied into a store. An allow-list: code and pickles can never be on it.
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# Copied too, but for people: nothing is computed from them, so they are no part of a source's identity.
_DOCUMENTS = (
    "README.md",
    "LICENSE",
    "LICENSE.*",
    "LICENSE-*",
    "LICENCE",
    "LICENCE.*",
    "NOTICE",
    "NOTICE.*",
    "USE_POLICY.md",
)
_NEVER = ("*.py", "*.pyc", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.so")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FLOAT_DTYPES = ("F32", "F16", "BF16")


class Checkpoint:
    """A checkpoint directory whose files have been checked and mapped; no weight has been read.

    Attributes:
        path: The directory.
        title: What to call it in messages.
        config: The content of ``config.json``.
    """

    def __init__(self, path: Path, config: dict[str, Any], tensors: TensorSet) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.title = str(path)
        self.config = config
        self.tensors = tensors
        self._fingerprint = self._current_fingerprint()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Check a checkpoint directory.

        Raises:
            ModelNotFoundError: There is no such directory.
            CheckpointError: A file is missing or malformed; the message names it.
            UnsupportedModelError: The weights exist only as pickles.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ModelNotFoundError(f"{directory} is not a directory")
        config = read_config(directory)
        if (directory / SINGLE_FILE).exists():
            shards, index = [SINGLE_FILE], {}
        elif (directory / INDEX_FILE).exists():
            index = read_index(directory)
            shards = sorted(set(index.values()))
        else:
            raise _no_weights(directory)
        return cls(directory, config, _open_shards(directory, shards, index))

    def keys(self) -> KeysView[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors element type (``"BF16"``) and shape of one tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        return self.tensors.info(key)

    def array(self, key: str) -> NDArray[Any]:
        """Read-only mapped view of one tensor; bf16 as ``uint16``, fp8 as ``uint8``.

        Raises:
            CheckpointError: There is no such tensor.
        """
        return self.tensors.array(key)

    def matrix_shape(self, ref: MatrixRef) -> tuple[int, int]:
        """Shape ``[rows, cols]`` of a matrix, from the headers alone.

        Raises:
            CheckpointError: The tensor is missing, or the reference does not fit its shape.
            UnsupportedModelError: The tensor is of a type that experts cannot be read from.
        """
        rows, cols = self._packed_shape(ref) if ref.packing == "mxfp4" else self._plain_shape(ref)
        if ref.transposed:
            rows, cols = cols, rows
        last = ref.start + ref.step * (ref.rows - 1)
        if last >= rows:
            raise CheckpointError(f"row {last} of {ref.key!r} is needed, it has {rows}")
        return ref.rows, cols

    def matrix(self, ref: MatrixRef) -> NDArray[Any]:
        """One weight matrix ``[rows, cols]``, row = output neuron.

        Returns:
            A view with any strides where the file allows it: ``float32``, ``float16``, or ``uint16`` for
            bf16. MXFP4 is decoded to ``float32``; data that is not aligned in the file is copied.

        Raises:
            CheckpointError: As :meth:`matrix_shape`.
            UnsupportedModelError: As :meth:`matrix_shape`.
        """
        self.matrix_shape(ref)
        taken = slice(ref.start, ref.start + ref.step * (ref.rows - 1) + 1, ref.step)
        if ref.packing == "mxfp4":
            blocks, scales = (self.array(key) for key in ref.tensors)
            if ref.expert is not None:
                blocks, scales = blocks[ref.expert], scales[ref.expert]
            if ref.transposed:
                return decode_mxfp4(blocks, scales).T[taken]
            return decode_mxfp4(blocks[taken], scales[taken])
        tensor = self.array(ref.key)
        if ref.expert is not None:
            tensor = tensor[ref.expert]
        if ref.transposed:
            tensor = tensor.T
        matrix = tensor[taken]
        return matrix if matrix.flags.aligned else matrix.copy()

    def vector_size(self, ref: VectorRef) -> int:
        """Number of elements of a bias, from the headers alone.

        Raises:
            CheckpointError: The tensor is missing, or the reference does not fit its shape.
            UnsupportedModelError: The tensor is not of a float type.
        """
        dtype, shape = self.info(ref.key)
        _require_float(ref.key, dtype)
        length = _select(ref.key, shape, ref.expert, 1)[0]
        last = ref.start + ref.step * (ref.size - 1)
        if last >= length:
            raise CheckpointError(f"element {last} of {ref.key!r} is needed, it has {length}")
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
        values = tensor[ref.start : ref.start + ref.step * (ref.size - 1) + 1 : ref.step]
        if self.info(ref.key)[0] == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def release(self, expert: ExpertRef) -> None:
        """Drop the mapped pages of one expert from this process after its use; the page cache keeps them."""
        for _, matrix in expert.matrices:
            for name in matrix.tensors:
                part = None if matrix.expert is None else (matrix.expert, self.info(name)[1][0])
                self.tensors.release((name,), part)

    def tokenizer_files(self) -> dict[str, Path]:
        """Files to keep beside the weights: tokenizer, generation settings, templates, licence, card.

        Returns:
            Name relative to the checkpoint -> real file. Symbolic links (hub cache) are resolved; what is not
            a regular file is left out, and so are code and pickles whatever they are called, and names with
            characters that cannot be printed.

        Raises:
            CheckpointError: A file is larger than 256 MiB.
        """
        return self._side_files(_SIDE_FILES + _DOCUMENTS)

    def _side_files(self, patterns: tuple[str, ...]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        names = os.listdir(self.path)
        templates = self.path / "additional_chat_templates"
        if templates.is_dir():
            names += [f"additional_chat_templates/{entry}" for entry in os.listdir(templates)]
        for name in sorted(names):
            # Control characters in a name would drive the terminal that a message shows them on.
            allowed = name.isprintable() and any(_matches(name, pattern) for pattern in patterns)
            if not allowed or any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _NEVER):
                continue
            real = (self.path / name).resolve()
            if not real.is_file():
                continue
            size = real.stat().st_size
            if size > MAX_SIDE_FILE_BYTES:
                raise CheckpointError(f"{self.path / name} has {size} bytes, more than {MAX_SIDE_FILE_BYTES}")
            found[name] = real
        return found

    def fingerprint(self) -> str:
        """Identity of the source as opened: hash of the config and of name, size, time of all files used.

        Licence and card do not count: a store need not be made again because its README was edited.
        """
        return self._fingerprint

    def require_unchanged(self) -> None:
        """Check that the files on disk are still those that were opened.

        Raises:
            CheckpointError: One was replaced, altered or removed.
        """
        if self._current_fingerprint() != self._fingerprint:
            raise CheckpointError(
                f"{self.title} has changed since it was opened", hint="run the command again"
            )

    def _current_fingerprint(self) -> str:
        files = {"config.json": self.path / "config.json"}
        files.update(self._side_files(_SIDE_FILES))
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
            digest.update((self.path / "config.json").read_bytes())
        except OSError as problem:
            raise CheckpointError(
                f"{self.path} has changed: {problem.filename}: {problem.strerror}"
            ) from problem
        return digest.hexdigest()

    def _plain_shape(self, ref: MatrixRef) -> tuple[int, int]:
        dtype, shape = self.info(ref.key)
        _require_float(ref.key, dtype)
        rows, cols = _select(ref.key, shape, ref.expert, 2)
        return rows, cols

    def _packed_shape(self, ref: MatrixRef) -> tuple[int, int]:
        blocks_key, scales_key = ref.tensors
        (blocks_dtype, blocks), (scales_dtype, scales) = self.info(blocks_key), self.info(scales_key)
        for key, dtype in ((blocks_key, blocks_dtype), (scales_key, scales_dtype)):
            if dtype != "U8":
                raise UnsupportedModelError(f"tensor {key!r} is {dtype}; mxfp4 needs U8")
        rows, groups, width = _select(blocks_key, blocks, ref.expert, 3)
        if width != 16 or scales != blocks[:-1]:
            raise CheckpointError(
                f"{blocks_key!r} {list(blocks)} and {scales_key!r} {list(scales)} are no mxfp4 pair"
            )
        return rows, groups * 32


def is_kept(name: str) -> bool:
    """Whether a file of this name goes into a store beside the weights; never code or a pickle."""
    # Control characters in a name would drive the terminal that a message shows them on.
    allowed = name.isprintable() and any(_matches(name, item) for item in _SIDE_FILES + _DOCUMENTS)
    return allowed and not any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _NEVER)


def is_document(name: str) -> bool:
    """Whether a file of this name is kept for people alone: licence, card, notices."""
    return is_kept(name) and any(_matches(name, pattern) for pattern in _DOCUMENTS)


def _select(key: str, shape: tuple[int, ...], expert: int | None, dimensions: int) -> tuple[int, ...]:
    """Shape of ``tensor`` or ``tensor[expert]``, which must have ``dimensions`` dimensions."""
    wanted = dimensions + (expert is not None)
    if len(shape) != wanted:
        raise CheckpointError(f"tensor {key!r} has shape {list(shape)}; {wanted} dimensions are expected")
    if expert is None:
        return shape
    if expert >= shape[0]:
        raise CheckpointError(f"expert {expert} of {key!r} is needed, it has {shape[0]}")
    return shape[1:]


def _require_float(key: str, dtype: str) -> None:
    if dtype not in _FLOAT_DTYPES:
        raise UnsupportedModelError(
            f"tensor {key!r} is {dtype}; experts are read from {', '.join(_FLOAT_DTYPES)} and mxfp4",
            hint="take the bf16 or fp16 version of this model",
        )


def _matches(name: str, pattern: str) -> bool:
    # fnmatch lets '*' match '/', so directories are compared on their own.
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _read_limited(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {status.st_size} bytes, more than {MAX_JSON_BYTES}")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}", hint="a checkpoint is a directory as transformers saves it"
        ) from None
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from problem


def read_config(directory: Path) -> dict[str, Any]:
    """Content of a checkpoint's ``config.json``.

    Raises:
        CheckpointError: It is missing or malformed.
    """
    path = directory / "config.json"
    data = _read_limited(path)
    try:
        # Not strict: published configs do repeat keys and hold Infinity, and transformers reads them.
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return config


def read_index(directory: Path) -> dict[str, str]:
    """File of each tensor, from a checkpoint's index.

    Raises:
        CheckpointError: It is missing, malformed, or names what is no shard inside the directory.
        UnsupportedModelError: It names pickles.
    """
    path = directory / INDEX_FILE
    try:
        content = strict_json(_read_limited(path))
    except ValueError as problem:
        raise CheckpointError(f"{path} is not valid: {problem}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for key, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise CheckpointError(f"{path}: the file of tensor {key[:200]!r} is not a name")
        parts = PurePosixPath(shard)
        if parts.is_absolute() or ".." in parts.parts or "\0" in shard or "\\" in shard:
            raise CheckpointError(f"{path} points outside of its directory: {shard[:200]!r}")
        if any(fnmatch.fnmatchcase(shard.lower(), pattern) for pattern in _PICKLES):
            raise _pickles(directory, shard)
        if parts.suffix != ".safetensors":
            raise CheckpointError(f"{path} names {shard[:200]!r}, which is not a safetensors file")
    return weight_map


def _open_shards(directory: Path, shards: list[str], index: dict[str, str]) -> TensorSet:
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {missing[0]} ({len(missing)} of {len(shards)} shards are missing)",
            hint="finish the download of the checkpoint",
        )
    files = {shard: SafetensorsFile.open(directory / shard) for shard in shards}
    return tensor_set(directory, files, index)


def tensor_set(directory: Path, files: Mapping[str, TensorFile], index: Mapping[str, str]) -> TensorSet:
    """The tensors of a checkpoint's shards.

    Args:
        directory: The checkpoint, for messages.
        files: Shards by name.
        index: Shard of each tensor; empty where there is only one.

    Raises:
        CheckpointError: Index and shards contradict each other.
    """
    owners: dict[str, TensorFile] = {}
    for shard, file in files.items():
        for key in file.tensors:
            # Tensors that the index forgot count too, as they do for transformers.
            if index.get(key, shard) != shard:
                continue
            if key in owners:
                raise CheckpointError(f"tensor {key!r} is in {owners[key].path.name} and in {shard}")
            owners[key] = file
    for key, shard in index.items():
        if key not in owners:
            raise CheckpointError(
                f"{directory / shard} has no tensor {key[:200]!r}, which the index promises"
            )
    return TensorSet(owners, where=str(directory))


def _no_weights(directory: Path) -> UnsupportedModelError:
    names = sorted(os.listdir(directory))
    for name in names:
        if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _PICKLES):
            return _pickles(directory, name)
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    seen = f"; it has {others[0]}" if others else ""
    return CheckpointError(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{seen}",
        hint="save the model with transformers' save_pretrained",
    )


def _pickles(directory: Path, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{directory} holds its weights as a pickle ({name}), which can run code when it is read",
        hint="take a version of the model with safetensors files",
    )
