"""Files of a checkpoint directory, which may come from anyone: which of them may be read, and their modes.

A link in a directory can name any file that this user may read, and what is read may end up in a store that
others read. So links count only if they stay inside of the directory, or if the cache of huggingface_hub
made them: it keeps files as ``models--ORG--NAME/blobs/HASH`` and links to them from ``snapshots``. A FIFO, a
socket or a device is refused by its status alone, because opening one can wait for ever or change something.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from moechat.errors import CheckpointError

# What a model's files are called, whoever reads them: moechat, transformers or a library below it.
_READ = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.model.*",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "*.safetensors",
    "*.gguf",
    "README.md",
    "USE_POLICY.md",
    "LICEN[CS]E*",
    "NOTICE*",
)
TEMPLATES = "additional_chat_templates"
_BLOB = re.compile(r"models--[^/]+/blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
)


def kind_of(mode: int) -> str:
    """What a file that is not a regular one is, for messages; empty for a regular file.

    Args:
        mode: ``st_mode`` of its status.
    """
    if stat.S_ISREG(mode):
        return ""
    return next((name for test, name in _KINDS if test(mode)), "of another kind")


def require_inside(path: Path, directory: Path) -> None:
    """Check that a name in a directory names a file there, without opening it. A missing file passes.

    Args:
        path: Below ``directory``.
        directory: The checkpoint; it may be a link itself, since the user named it.

    Raises:
        CheckpointError: A link in it leads out of the directory, and not into the cache of huggingface_hub.
    """
    try:
        real, home = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from None
    if not real.is_relative_to(home) and not _is_blob(real):
        raise CheckpointError(
            f"{path} is a link that leads out of {directory}, to {real}",
            hint="put the file itself there if it belongs to the model",
        )


def _is_blob(real: Path) -> bool:
    return bool(_BLOB.fullmatch("/".join(real.parts[-3:])))


def require_regular(path: Path) -> None:
    """Check by its status, without opening it, that a file is a regular one. A missing file passes.

    Raises:
        CheckpointError: It is not.
    """
    try:
        kind = kind_of(path.stat().st_mode)
    except OSError:
        return
    if kind:
        raise CheckpointError(f"{path} is not a regular file: it is {kind}", hint="take it away")


def require_safe(directory: Path) -> None:
    """Check all files of a checkpoint directory that anything reads, before anything does.

    Directories in it, and files of other names, are not looked at.

    Raises:
        CheckpointError: One is a link out of the directory, or a FIFO, a socket or a device; or the directory
            cannot be listed.
    """
    templates = directory / TEMPLATES
    require_inside(templates, directory)
    try:
        names = sorted(os.listdir(directory))
        if templates.is_dir():
            names += sorted(f"{TEMPLATES}/{name}" for name in os.listdir(templates))
    except OSError as problem:
        raise CheckpointError(f"{directory} cannot be listed: {problem.strerror}") from problem
    for name in names:
        path = directory / name
        if name.isprintable() and _is_read(path.name) and not path.is_dir():
            require_inside(path, directory)
            require_regular(path)


def _is_read(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _READ)


def kept_mode(paths: Iterable[Path]) -> int:
    """Permissions of a file that is made from others: what all of them allow, and at most ``0o644``.

    The owner may always read and write it. The process's umask restricts it further. Files that are not here,
    because they are fetched when they are needed, do not count.
    """
    mode = 0o644
    for path in paths:
        with suppress(OSError):
            mode &= path.stat().st_mode
    return mode & 0o644 | 0o600
