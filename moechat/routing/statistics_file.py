"""Routing statistics stored across runs: one file per model and policy in the user's state directory.

A file is an ``.npz`` without pickled objects: the arrays of
:class:`~moechat.routing.statistics.RoutingStatistics` under their names, ``format`` (the format version),
``tokens`` and ``top_k`` as single integers, ``policy`` and ``model_key`` as single strings.

Writers hold a lock on the file ``lock`` in the same directory and replace files atomically, so neither a
crash nor concurrent writers lose stored data. An unreadable file is never overwritten but renamed with the
suffix ``.damaged``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from moechat.atomic_file import TEMPORARY, replacing
from moechat.config import user_paths
from moechat.routing.statistics import RoutingStatistics

FORMAT = 1
# Counts are halved beyond this many tokens, so that some days of use outweigh all earlier use.
MAX_TOKENS = 200_000
# Most files; the least recently written ones are removed.
MAX_FILES = 64

_COUNTS = ("predicted", "activations", "ranks", "hits_of_prediction", "ranks_of_prediction")
_DIMENSIONS = {
    "predicted": 1,
    "activations": 2,
    "ranks": 2,
    "hits_of_prediction": 2,
    "ranks_of_prediction": 3,
}
# 512 MiB in memory: 256 layers of 4096 experts with 64 predicted positions.
_MAX_COUNTS = 1 << 26
_NPY_HEADER_BYTES = 1 << 12
_MAX_TEXT_BYTES = 1 << 12
_MAX_FILE_BYTES = 1 << 30
_LOCK_SECONDS = 5.0
_POLL_SECONDS = 0.02
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)

Warn = Callable[[str], None]


class _UnreadableError(Exception):
    """A file exists, but this version cannot use its content."""


def model_key(fingerprint: str, *, layers: int, experts: int, top_k: int) -> str:
    """Key of a model's statistics.

    Args:
        fingerprint: Identity of the model, such as the fingerprint of the checkpoint that a store was made
            from. Bits per weight can be omitted, because they hardly change the routing.
        layers: Number of expert layers.
        experts: Experts per layer.
        top_k: Experts per token.

    Returns:
        32 hexadecimal digits.
    """
    parts = json.dumps([fingerprint, layers, experts, top_k])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def load_statistics(
    model_key: str, policy: str, *, warn: Warn | None = None, directory: Path | None = None
) -> RoutingStatistics | None:
    """Load the statistics of earlier runs. Changes no file; unusable files are reported to ``warn``.

    Args:
        model_key: See :func:`model_key`.
        policy: Eviction policy whose priorities give the ranks.
        warn: Called with one sentence if the stored statistics cannot be used.
        directory: Directory of the files; ``None`` is the user's state directory.

    Returns:
        ``None`` if there are no usable statistics.

    Raises:
        ValueError: A name cannot be part of a file name.
    """
    path = _directory(directory) / _file_name(model_key, policy)
    try:
        return _read(path, model_key, policy)
    except FileNotFoundError:
        return None
    except _UnreadableError as problem:
        _tell(warn, f"routing statistics {path} are not used: {problem}")
    except OSError as problem:
        _tell(warn, f"routing statistics {path} cannot be read: {problem.strerror or problem}")
    return None


def add_statistics(
    model_key: str,
    statistics: RoutingStatistics,
    *,
    warn: Warn | None = None,
    directory: Path | None = None,
    max_tokens: int = MAX_TOKENS,
) -> bool:
    """Add the counts of this run to the stored statistics.

    While they have more than ``max_tokens`` tokens, counts are halved, so that recent use weighs more.

    Args:
        model_key: See :func:`model_key`.
        statistics: Counts that were not added before.
        warn: Called with one sentence about each problem.
        directory: Directory of the files; ``None`` is the user's state directory.
        max_tokens: Most tokens stored.

    Returns:
        Whether they are stored. If not (full disk, unwritable directory, another process holds the lock for
        seconds), nothing has changed and they can be added later.

    Raises:
        ValueError: A name cannot be part of a file name.
    """
    if statistics.tokens == 0 and not statistics.predicted.any():
        return True
    path = _directory(directory) / _file_name(model_key, statistics.policy)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            _remove_leftovers(path.parent)
            kept = _read_or_set_aside(path, model_key, statistics, warn)
            total = statistics if kept is None else kept.merge(statistics)
            while total.tokens > max_tokens:
                total = total.faded()
            _write(path, model_key, total)
            _remove_oldest(path.parent, path)
    except OSError as problem:
        _tell(warn, f"routing statistics {path} cannot be kept: {problem.strerror or problem}")
        return False
    return True


def _directory(directory: Path | None) -> Path:
    return user_paths().state / "routing" if directory is None else directory


def _file_name(key: str, policy: str) -> str:
    for name, value in (("model_key", key), ("policy", policy)):
        if not _NAME.fullmatch(value):
            raise ValueError(f"{name} is {value!r}, which cannot be part of a file name")
    return f"{key}-{policy}.npz"


def _tell(warn: Warn | None, message: str) -> None:
    if warn is not None:
        warn(message)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which is not removed; the kernel drops the lock when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as problem:
                if problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() >= until:
                    raise TimeoutError(errno.ETIMEDOUT, f"{path} is locked by another process") from None
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _read_or_set_aside(
    path: Path, key: str, statistics: RoutingStatistics, warn: Warn | None
) -> RoutingStatistics | None:
    """Stored statistics that match ``statistics``; renames a file with other content."""
    try:
        kept = _read(path, key, statistics.policy)
        if not kept.fits(statistics):
            raise _UnreadableError(f"they are of {kept.describe()}, not of {statistics.describe()}")
        return kept
    except FileNotFoundError:
        return None
    except _UnreadableError as problem:
        aside = path.with_name(path.name + ".damaged")
        os.replace(path, aside)
        _tell(warn, f"routing statistics {path} were set aside as {aside.name}: {problem}")
        return None


def _read(path: Path, key: str, policy: str) -> RoutingStatistics:
    with open(path, "rb") as file:
        # Read before it is parsed: with a damaged offset the parsers raise OSError, as a failing disk does.
        content = file.read(_MAX_FILE_BYTES + 1)
    try:
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        return _parse(io.BytesIO(content), key, policy)
    except _UnreadableError:
        raise
    except Exception as problem:  # the zip, deflate and npy parsers raise many types for damaged data
        raise _UnreadableError(f"the file is damaged: {problem}") from problem


def _parse(file: IO[bytes], key: str, policy: str) -> RoutingStatistics:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not an .npz file")
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            limit = 8 * _MAX_COUNTS if name in _COUNTS else _MAX_TEXT_BYTES
            if entry.file_size > limit + _NPY_HEADER_BYTES:
                raise ValueError(f"{entry.filename} would unpack to {entry.file_size} bytes")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        version = _number(arrays, "format")
        if version != FORMAT:
            raise _UnreadableError(f"their format is {version}; this version of moechat reads {FORMAT}")
        if (_text(arrays, "model_key"), _text(arrays, "policy")) != (key, policy):
            raise ValueError("it belongs to another model or policy")
        tokens, top_k = _number(arrays, "tokens"), _number(arrays, "top_k")
        if tokens < 0 or top_k < 1:
            raise ValueError(f"it says {tokens} tokens with {top_k} experts each")
        return RoutingStatistics(policy, top_k, tokens, *(_counts(arrays, name) for name in _COUNTS))


def _number(arrays: Any, name: str) -> int:
    array = arrays[name]
    if array.shape != () or array.dtype.kind not in "iu":
        raise ValueError(f"{name} is not one integer")
    return int(array)


def _text(arrays: Any, name: str) -> str:
    array = arrays[name]
    if array.shape != () or array.dtype.kind != "U":
        raise ValueError(f"{name} is not one string")
    return str(array)


def _counts(arrays: Any, name: str) -> npt.NDArray[np.int64]:
    array = arrays[name]
    if array.dtype.kind not in "iu" or array.ndim != _DIMENSIONS[name]:
        raise ValueError(f"{name} has type {array.dtype} and {array.ndim} dimensions")
    if array.size and int(array.max()) >= 1 << 62:
        raise ValueError(f"{name} holds {int(array.max())}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _write(path: Path, key: str, statistics: RoutingStatistics) -> None:
    arrays: dict[str, Any] = {name: _narrow(getattr(statistics, name)) for name in _COUNTS}
    with replacing(path) as file:
        np.savez_compressed(
            file,
            format=np.int64(FORMAT),
            model_key=np.str_(key),
            policy=np.str_(statistics.policy),
            tokens=np.int64(statistics.tokens),
            top_k=np.int64(statistics.top_k),
            **arrays,
        )


def _narrow(counts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    most = int(counts.max()) if counts.size else 0
    return counts.astype(np.min_scalar_type(most))


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary files of killed writers. Requires the lock, so that no other writer is active."""
    for path in directory.glob(f".*{TEMPORARY}"):
        with suppress(OSError):
            path.unlink()


def _remove_oldest(directory: Path, newest: Path) -> None:
    """Remove the oldest files beyond ``MAX_FILES``."""
    dated = []
    for pattern in ("*.npz", "*.npz.damaged"):
        for path in directory.glob(pattern):
            with suppress(OSError):
                dated.append((path != newest, -path.stat().st_mtime_ns, path))
    for _, _, path in sorted(dated)[MAX_FILES:]:
        with suppress(OSError):
            path.unlink()
