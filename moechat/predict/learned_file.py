"""What predictors have learned of a model, kept across runs in the user's state directory.

One ``.npz`` for each model and kind of predictor, without pickled objects: the predictor's arrays, and
``format``. A file that is damaged, of another format or of another model counts as missing, and is replaced
when the next one is kept. When two programs run the same model, what the last one has learned is kept.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from moechat.atomic_file import replacing
from moechat.config import user_paths
from moechat.predict.requests import RequestPredictor

FORMAT = 1
# Files that are kept; the least recently written above are deleted.
MOST_FILES = 32
_MOST_BYTES = 1 << 30


def learned_path(kind: str, model_key: str, directory: Path | None = None) -> Path:
    """The file of a model.

    Args:
        kind: Kind of the predictor.
        model_key: See :func:`moechat.routing.statistics_file.model_key`.
        directory: Directory of the files; ``None``: the user's state directory.
    """
    base = user_paths().state / "predictors" if directory is None else directory
    return base / f"{kind}-{model_key}.npz"


def load_learned(path: Path, predictor: RequestPredictor, warn: Callable[[str], None]) -> bool:
    """Give a predictor what was kept; whether there was anything.

    Args:
        path: From :func:`learned_path`.
        predictor: That has learned nothing yet.
        warn: Called with one sentence if there is a file that cannot be used.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        with zipfile.ZipFile(path) as members:
            if sum(member.file_size for member in members.infolist()) > _MOST_BYTES:
                raise ValueError(f"it unpacks to more than {_MOST_BYTES >> 20} MiB")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if int(arrays.pop("format", np.int64(0))) != FORMAT:
            raise ValueError("it has another format")
        predictor.learn(arrays)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        warn(f"what earlier runs have learned for predictions, {path}, is not used: {problem}")
        return False
    return True


def keep_learned(path: Path, predictor: RequestPredictor) -> None:
    """Keep what a predictor has learned.

    Raises:
        OSError: The file cannot be written.
    """
    if predictor.entries == 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, format=np.int64(FORMAT), **predictor.arrays())  # type: ignore[arg-type]
    _remove_oldest(path)


def _remove_oldest(newest: Path) -> None:
    with suppress(OSError):
        others = [each for each in newest.parent.glob("*.npz") if each != newest]
        others.sort(key=lambda each: each.stat().st_mtime)
        for each in others[: max(0, len(others) + 1 - MOST_FILES)]:
            os.unlink(each)
