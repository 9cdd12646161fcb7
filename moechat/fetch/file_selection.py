"""Which files of a repository a store is made of, and what their headers announce."""

from __future__ import annotations

import glob
import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moechat.config import Paths
from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.transfer import Transfer
from moechat.loading.at_once import at_once
from moechat.loading.gguf_repository import announced_gguf, choose_gguf, gguf_models, read_gguf_header
from moechat.store.announced import AnnouncedCheckpoint, Shard
from moechat.store.checkpoint import (
    INDEX_FILE,
    MAX_JSON_BYTES,
    MAX_SIDE_FILE_BYTES,
    SINGLE_FILE,
    is_document,
    is_kept,
    read_index,
)

CONFIG = "config.json"
MARK = ".weights"  # in a directory of shards: which weights these are
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_READERS = 8


@dataclass(frozen=True)
class Selection:
    """The files of a repository that a store is made of.

    Attributes:
        side: Configuration, tokenizer, licence and card.
        shards: Files of weights by name; of a GGUF model its parts, in order.
        index: Shard of each tensor; empty where there is only one, and for GGUF models.
        is_gguf: The weights are a GGUF model.
    """

    side: tuple[RemoteFile, ...]
    shards: dict[str, RemoteFile]
    index: dict[str, str]
    is_gguf: bool = False

    @property
    def identity(self) -> dict[str, list[object]]:
        """What all of the store depends on, by name; licence and card may change without a new one."""
        files = [file for file in self.side if not is_document(file.path)]
        return {file.path: [file.size, file.identity] for file in (*files, *self.shards.values())}


def source_path(paths: Paths, remote: RemoteRepository, selection: Selection) -> Path:
    """Where shards of a repository lie while they are needed, or stay if they are kept.

    The name has the commit that they were first asked for at. A later commit with the same weights finds them
    by a mark in the directory: makers edit their cards more often than their weights.
    """
    stem = remote.repository.replace("/", "--")
    own = paths.sources / f"{stem}@{remote.commit[:12]}{_suffix(selection)}"
    if own.exists():
        return own
    for other in sorted(paths.sources.glob(f"{glob.escape(stem)}@*")):
        if source_mark(other) == weights_mark(selection):
            return other
    return own


def weights_mark(selection: Selection) -> str:
    """Tells the weights of a selection from others."""
    described = {name: [file.size, file.identity] for name, file in selection.shards.items()}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def source_mark(directory: Path) -> str | None:
    """The mark of the weights that a directory of shards is for."""
    try:
        return (directory / MARK).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _suffix(selection: Selection) -> str:
    """Tells the GGUF models of one commit apart; they come and go on their own."""
    return f"+{weights_mark(selection)[:12]}" if selection.is_gguf else ""


def cached_file(remote: RemoteRepository, name: str) -> Path | None:
    """A file of the repository in the cache of huggingface_hub (``HF_HOME``), where another tool left it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(remote.repository, name, revision=remote.commit)
    return Path(found) if isinstance(found, str) else None


def select(
    remote: RemoteRepository, transfer: Transfer, directory: Path, variant: str | None = None
) -> Selection:
    """Choose the files, by an allow-list; configuration and index are fetched into ``directory`` for it.

    Args:
        remote: The repository.
        transfer: Fetches from it.
        directory: Gets configuration and index.
        variant: A GGUF model of the repository; ``None``: its safetensors, or its only GGUF model where it
            has none.

    Raises:
        CheckpointError: A file is missing, too large, or the hub does not describe it.
        UnsupportedModelError: There are no weights that moechat reads.
        UsageError: It is not clear which GGUF model is meant.
        MoechatError: The hub cannot be read.
    """
    files = remote.files
    if variant is not None or (not files.keys() & {SINGLE_FILE, INDEX_FILE} and gguf_models(remote)):
        documents = tuple(file for name, file in files.items() if is_document(name))
        parts = choose_gguf(remote, variant)
        require_described(remote, (*documents, *parts))
        return Selection(documents, {file.path: file for file in parts}, {}, is_gguf=True)
    if CONFIG not in files:
        raise CheckpointError(
            f"{remote.title} has no {CONFIG}: it is no transformers model",
            hint=_other_formats(remote),
        )
    side = {CONFIG: files[CONFIG], **{name: file for name, file in files.items() if is_kept(name)}}
    if SINGLE_FILE not in files and INDEX_FILE in files:
        side[INDEX_FILE] = files[INDEX_FILE]
    require_described(remote, tuple(side.values()))
    transfer.fetch(files[CONFIG], directory / CONFIG)
    index: dict[str, str] = {}
    if SINGLE_FILE in files:
        names = [SINGLE_FILE]
    elif INDEX_FILE in files:
        transfer.fetch(files[INDEX_FILE], directory / INDEX_FILE)
        index = read_index(directory)
        names = sorted(set(index.values()))
    else:
        raise UnsupportedModelError(
            f"{remote.title} has no safetensors weights{_seen(remote)}", hint=_other_formats(remote)
        )
    missing = [name for name in names if name not in files]
    if missing:
        raise CheckpointError(
            f"{remote.title} lacks {missing[0]} ({len(missing)} of {len(names)} shards are missing)",
            hint="its makers have not finished uploading it, or removed a part",
        )
    require_described(remote, tuple(files[name] for name in names))
    return Selection(tuple(side.values()), {name: files[name] for name in names}, index)


def require_described(remote: RemoteRepository, files: tuple[RemoteFile, ...]) -> None:
    """Check before anything is fetched that files can be checked, and that small ones are small.

    Raises:
        CheckpointError: The hub gives no size or hash of one, or it is too large for what it is.
    """
    for file in files:
        if file.size < 0 or not file.identity:
            raise CheckpointError(f"the hub gives no size or hash for {file.path} of {remote.title}")
        most = MAX_JSON_BYTES if file.path in (CONFIG, INDEX_FILE) else MAX_SIDE_FILE_BYTES
        if (file.path in (CONFIG, INDEX_FILE) or is_kept(file.path)) and file.size > most:
            raise CheckpointError(
                f"{file.path} of {remote.title} has {file.size} bytes, more than {most}: it is refused"
            )


def _seen(remote: RemoteRepository) -> str:
    pickle = next((name for name in sorted(remote.files) if name.lower().endswith(_PICKLES)), None)
    if pickle is not None:
        return f": they are pickles ({pickle}), which can run code when they are read"
    return ""


def _other_formats(remote: RemoteRepository) -> str:
    return (
        f"take the repository of {remote.repository.partition('/')[2]} that has config.json and .safetensors"
    )


def read_headers(transfer: Transfer, selection: Selection) -> dict[str, bytes]:
    """The first bytes of every file of weights, as far as its header reaches, several at once."""
    read = partial(read_gguf_header, transfer) if selection.is_gguf else transfer.read_header
    headers = at_once(read, selection.shards.values(), threads=_READERS, stop=transfer.stop.stop)
    return dict(zip(selection.shards, headers, strict=True))


def announced(
    directory: Path, remote: RemoteRepository, selection: Selection, headers: dict[str, bytes]
) -> AnnouncedCheckpoint:
    """The checkpoint as far as its headers tell, identified by sizes and hashes of its files.

    For a GGUF model configuration and tokenizer are written into ``directory``.
    """
    if selection.is_gguf:
        return announced_gguf(directory, remote, selection.shards, headers)
    shards = {
        name: Shard.of_header(directory / name, headers[name], file.size)
        for name, file in selection.shards.items()
    }
    return AnnouncedCheckpoint(directory, shards, selection.index, selection.identity, title=remote.title)
