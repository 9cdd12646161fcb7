"""Files of a checkpoint directory: ``config.json``, the index of shards, and the shards."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.config_limits import (
    MAX_CONFIG_BYTES,
    MAX_VALUES,
    decoded_floats,
    parse_limited,
    require_sane_config,
)
from moechat.store.file_problems import file_problem
from moechat.store.safetensors_file import SafetensorsFile, strict_json
from moechat.store.source_files import require_inside
from moechat.store.tensors import TensorFile, TensorSet

MAX_JSON_BYTES = 32 << 20
CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_NAME = 255  # bytes of a file name
_SURROGATE = re.compile("[\ud800-\udfff]")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_config(directory: Path) -> dict[str, Any]:
    """Content of a checkpoint's ``config.json``.

    Raises:
        CheckpointError: It is missing or malformed, a link out of the directory, or has a number beyond its
            limit.
    """
    path = directory / CONFIG_FILE
    require_inside(path, directory)
    return config_of(path, read_limited(path, MAX_CONFIG_BYTES))


def config_bytes(path: Path) -> bytes:
    """Content of a ``config.json``.

    Args:
        path: The file, or its directory.

    Raises:
        CheckpointError: It is missing, cannot be read, is no JSON object, or has a number beyond its limit.
    """
    if path.is_dir():
        require_inside(path / CONFIG_FILE, path)
        path /= CONFIG_FILE
    data = read_limited(path, MAX_CONFIG_BYTES)
    config_of(path, data)
    return data


def config_of(path: Path, data: bytes) -> dict[str, Any]:
    """The object in a ``config.json``, all of its numbers checked.

    Args:
        path: Its name, for messages.
        data: Its content.

    Raises:
        CheckpointError: It is no JSON object, or has a number beyond its limit.
    """
    config = decoded_floats(parse_limited(data, str(path)))
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    require_sane_config(config, str(path))
    return config


def read_json(path: Path, most_bytes: int = MAX_CONFIG_BYTES, most_values: int = MAX_VALUES) -> Any:
    """The JSON value in a file of a model, within the limits of :mod:`moechat.store.config_limits`.

    Args:
        path: The file.
        most_bytes: Largest size.
        most_values: Most numbers, strings, lists and objects.

    Raises:
        CheckpointError: It cannot be read, is no JSON, or is beyond a limit.
    """
    data = read_limited(path, most_bytes)
    return parse_limited(data, str(path), most_bytes=most_bytes, most_values=most_values)


def read_index(directory: Path) -> dict[str, str]:
    """File of each tensor, from a checkpoint's index.

    Raises:
        CheckpointError: It is missing, malformed, or names a file that is not a shard inside the directory.
        UnsupportedModelError: It names pickles.
    """
    path = directory / INDEX_FILE
    require_inside(path, directory)
    try:
        content = strict_json(read_limited(path))
    except ValueError as problem:
        raise CheckpointError(f"{path} is not valid: {problem}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for key, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise CheckpointError(f"{path}: the file of tensor {key[:200]!r} is not a name")
        parts = PurePosixPath(shard)
        if any(
            len(part.encode("utf-8", "surrogatepass")) > _MAX_NAME for part in parts.parts
        ) or _SURROGATE.search(shard):
            raise CheckpointError(
                f"{path}: the file of tensor {key[:200]!r} has an impossible name: {shard[:80]!r}"
            )
        if parts.is_absolute() or ".." in parts.parts or "\0" in shard or "\\" in shard:
            raise CheckpointError(f"{path} points outside of its directory: {shard[:200]!r}")
        if _is_pickle(shard):
            raise _pickle_error(directory, shard)
        if parts.suffix != ".safetensors":
            raise CheckpointError(f"{path} names {shard[:200]!r}, which is not a safetensors file")
    return weight_map


def open_tensors(directory: Path) -> TensorSet:
    """Open the shards of a checkpoint directory.

    Raises:
        CheckpointError: A file is missing or malformed, or index and shards contradict each other.
        UnsupportedModelError: The weights exist only as pickles.
    """
    index: dict[str, str] = {}
    if (directory / SINGLE_FILE).exists():
        shards = [SINGLE_FILE]
    elif (directory / INDEX_FILE).exists():
        index = read_index(directory)
        shards = sorted(set(index.values()))
    else:
        raise _no_weights_error(directory)
    for shard in shards:
        require_inside(directory / shard, directory)
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {missing[0]} ({len(missing)} of {len(shards)} shards are missing)",
            hint="finish the download of the checkpoint",
        )
    return tensor_set(directory, {shard: SafetensorsFile.open(directory / shard) for shard in shards}, index)


def tensor_set(directory: Path, files: Mapping[str, TensorFile], index: Mapping[str, str]) -> TensorSet:
    """The tensors of a checkpoint's shards.

    Args:
        directory: The checkpoint, for messages.
        files: Shards by name.
        index: Shard of each tensor; empty for a single shard.

    Raises:
        CheckpointError: Index and shards contradict each other.
    """
    owners: dict[str, TensorFile] = {}
    for shard, file in files.items():
        for key in file.tensors:
            # Tensors missing from the index count too, as in transformers.
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


def read_limited(path: Path, most_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Content of a small file.

    Raises:
        CheckpointError: It is missing, no regular file, larger than ``most_bytes``, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if status.st_size > most_bytes:
            raise CheckpointError(f"{path} has {status.st_size:,} bytes, more than {most_bytes:,}")
        with open(path, "rb") as file:
            return file.read(most_bytes)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}", hint="a checkpoint is a directory as transformers saves it"
        ) from None
    except OSError as problem:
        raise file_problem(path, problem, CheckpointError, "read") from problem


def _is_pickle(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _PICKLES)


def _no_weights_error(directory: Path) -> UnsupportedModelError:
    names = sorted(os.listdir(directory))
    pickle = next(filter(_is_pickle, names), None)
    if pickle is not None:
        return _pickle_error(directory, pickle)
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    seen = f"; it has {others[0]}" if others else ""
    return CheckpointError(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{seen}",
        hint="save the model with transformers' save_pretrained",
    )


def _pickle_error(directory: Path, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{directory} holds its weights as a pickle ({name}), which can run code when it is read",
        hint="take a version of the model with safetensors files",
    )
