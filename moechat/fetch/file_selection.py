"""Selects the files of a repository to build a store from, and reads their headers."""

from __future__ import annotations

import glob
import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moechat.config import Paths
from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.fetch.gguf_repository import (
    choose_gguf,
    gguf_checkpoint_from_headers,
    gguf_models,
    read_gguf_header,
)
from moechat.fetch.parallel import map_in_threads
from moechat.fetch.repository import RemoteFile, RemoteRepository
from moechat.fetch.transfer import Transfer
from moechat.store.checkpoint_files import INDEX_FILE, MAX_JSON_BYTES, SINGLE_FILE, read_index
from moechat.store.quantised.settings import MODELOPT_FILE
from moechat.store.side_files import MAX_SIDE_FILE_BYTES, is_document, is_kept
from moechat.store.streamed_checkpoint import Shard, StreamedCheckpoint

CONFIG = "config.json"
WEIGHTS_ID_FILE = ".weights"  # in a directory of shards: the ID of their weights
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_READERS = 8


@dataclass(frozen=True)
class Selection:
    """The files of a repository to build a store from.

    Attributes:
        side: Configuration, tokenizer, licence and model card.
        shards: Files of weights by name; for a GGUF model its parts, in order.
        index: The shard of each tensor; empty for a single shard and for GGUF models.
        is_gguf: The weights are a GGUF model.
    """

    side: tuple[RemoteFile, ...]
    shards: dict[str, RemoteFile]
    index: dict[str, str]
    is_gguf: bool = False

    @property
    def identity(self) -> dict[str, list[object]]:
        """Size and hash of every file that the store's content depends on, so without licence and card."""
        files = [file for file in self.side if not is_document(file.path)]
        return {file.path: [file.size, file.identity] for file in (*files, *self.shards.values())}


def source_path(paths: Paths, remote: RemoteRepository, selection: Selection) -> Path:
    """The directory for the shards of a repository.

    It is named for the commit of the first download. A later commit with the same weights, such as an edited
    model card, uses the same directory, found by the ID in it.
    """
    stem = remote.repository.replace("/", "--")
    own = paths.sources / f"{stem}@{remote.commit[:12]}{_suffix(selection)}"
    if own.exists():
        return own
    for other in sorted(paths.sources.glob(f"{glob.escape(stem)}@*")):
        if _read_weights_id(other) == weights_id(selection):
            return other
    return own


def weights_id(selection: Selection) -> str:
    """A hash over names, sizes and hashes of all files of weights."""
    files = {name: [file.size, file.identity] for name, file in selection.shards.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read_weights_id(directory: Path) -> str | None:
    try:
        return (directory / WEIGHTS_ID_FILE).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _suffix(selection: Selection) -> str:
    """Separates the GGUF models of one commit, which are downloaded and removed independently."""
    return f"+{weights_id(selection)[:12]}" if selection.is_gguf else ""


def cached_file(remote: RemoteRepository, name: str) -> Path | None:
    """A file of the repository in the cache of huggingface_hub (``HF_HOME``), shared with other programs."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(remote.repository, name, revision=remote.commit)
    return Path(found) if isinstance(found, str) else None


def select_files(
    remote: RemoteRepository, transfer: Transfer, directory: Path, variant: str | None = None
) -> Selection:
    """Select files by an allow-list; fetches configuration and index into ``directory``.

    Args:
        remote: The repository.
        transfer: Fetches from it.
        directory: Receives configuration and index.
        variant: A GGUF model of the repository; ``None`` for its safetensors, or its only GGUF model if it
            has none.

    Raises:
        CheckpointError: A file is missing, too large, or has no size or hash.
        UnsupportedModelError: There are no weights in a supported format.
        UsageError: Several GGUF models match, or none.
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
            f"{remote.title} has no {CONFIG}: it is not a transformers model",
            hint=_other_formats(remote),
        )
    side = {CONFIG: files[CONFIG], **{name: file for name, file in files.items() if is_kept(name)}}
    if SINGLE_FILE not in files and INDEX_FILE in files:
        side[INDEX_FILE] = files[INDEX_FILE]
    require_described(remote, tuple(side.values()))
    for name in (CONFIG, *({MODELOPT_FILE} & side.keys())):
        transfer.fetch(files[name], directory / name)
    index: dict[str, str] = {}
    if SINGLE_FILE in files:
        names = [SINGLE_FILE]
    elif INDEX_FILE in files:
        transfer.fetch(files[INDEX_FILE], directory / INDEX_FILE)
        index = read_index(directory)
        names = sorted(set(index.values()))
    else:
        raise UnsupportedModelError(
            f"{remote.title} has no safetensors weights{_pickle_note(remote)}", hint=_other_formats(remote)
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
    """Check, before fetching, that files have sizes and hashes, and that side files are small.

    Raises:
        CheckpointError: A size or hash is missing, or a side file is too large.
    """
    for file in files:
        if file.size < 0 or not file.identity:
            raise CheckpointError(f"the hub gives no size or hash for {file.path} of {remote.title}")
        most = MAX_JSON_BYTES if file.path in (CONFIG, INDEX_FILE) else MAX_SIDE_FILE_BYTES
        if (file.path in (CONFIG, INDEX_FILE) or is_kept(file.path)) and file.size > most:
            raise CheckpointError(
                f"{file.path} of {remote.title} has {file.size} bytes, more than {most}: it is refused"
            )


def _pickle_note(remote: RemoteRepository) -> str:
    pickle = next((name for name in sorted(remote.files) if name.lower().endswith(_PICKLES)), None)
    if pickle is not None:
        return f": they are pickles ({pickle}), which can run code when they are read"
    return ""


def _other_formats(remote: RemoteRepository) -> str:
    return (
        f"take the repository of {remote.repository.partition('/')[2]} that has config.json and .safetensors"
    )


def read_headers(transfer: Transfer, selection: Selection) -> dict[str, bytes]:
    """The header of every file of weights, as its first bytes; fetches several at a time."""
    read = partial(read_gguf_header, transfer) if selection.is_gguf else transfer.read_header
    headers = map_in_threads(read, selection.shards.values(), threads=_READERS, stop=transfer.stop.stop)
    return dict(zip(selection.shards, headers, strict=True))


def checkpoint_from_headers(
    directory: Path, remote: RemoteRepository, selection: Selection, headers: dict[str, bytes]
) -> StreamedCheckpoint:
    """The checkpoint described by its headers, identified by sizes and hashes of its files.

    Writes configuration and tokenizer of a GGUF model into ``directory``.
    """
    if selection.is_gguf:
        return gguf_checkpoint_from_headers(directory, remote, selection.shards, headers)
    shards = {
        name: Shard.of_header(directory / name, headers[name], file.size)
        for name, file in selection.shards.items()
    }
    return StreamedCheckpoint(directory, shards, selection.index, selection.identity, title=remote.title)
