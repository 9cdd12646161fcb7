"""Opens a GGUF file, or a split one, as a checkpoint.

Configuration, tokenizer and chat template are written from the file's metadata into a temporary directory.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moechat.errors import CheckpointError, UnsupportedModelError, one_line
from moechat.hub.gguf_parts import gguf_parts
from moechat.models.gguf import GgufModel, describe_gguf
from moechat.models.gguf_metadata import VOCABULARY
from moechat.models.gguf_tokenizer import byte_level_tokenizer
from moechat.models.quiet import without_warnings
from moechat.store.checkpoint import Checkpoint
from moechat.store.checkpoint_files import config_bytes, tensor_set
from moechat.store.files import called
from moechat.store.gguf_file import GgufFile, GgufSource, GgufView, require_decodable
from moechat.store.gguf_header import GgufHeader
from moechat.store.gguf_tables import Tables, read_tables
from moechat.store.source_files import require_inside
from moechat.store.tensors import TensorSet

# Part of every fingerprint, so that stores are converted again when the interpretation of files changes.
VERSION = 4
# Files that are written from a file's metadata, which is what the user can change.
_MADE_OF = {"config.json": "the metadata", "generation_config.json": "the metadata"}


class GgufCheckpoint(Checkpoint):
    """A model in GGUF files; see :func:`opened_gguf`."""

    def __init__(self, directory: Path, title: str, files: Sequence[Path], tensors: TensorSet) -> None:
        """Use :func:`opened_gguf`.

        Args:
            directory: Directory with the generated ``config.json`` and tokenizer.
            title: Name for messages.
            files: The GGUF files.
            tensors: Tensors by checkpoint name.
        """
        self._files = tuple(files)
        super().__init__(directory, config_bytes(directory), tensors)
        self.title = title

    def _current_fingerprint(self) -> str:
        for file in self.tensors.files:
            try:
                current = file.is_current()
            except OSError as problem:
                raise CheckpointError(f"{file.path} has changed: {problem.strerror}") from problem
            if not current:
                raise CheckpointError(f"{file.path} has changed since it was opened")
        return gguf_fingerprint(self._files)


@contextmanager
def opened_gguf(path: Path) -> Iterator[GgufCheckpoint]:
    """Open a GGUF file on this machine as a checkpoint, for the duration of a ``with`` block.

    Args:
        path: The file, or any part of a split model.

    Raises:
        CheckpointError: A file is missing or damaged.
        UnsupportedModelError: moechat cannot read this model from GGUF files.
    """
    files = all_parts(path)
    opened = [GgufFile.open(file) for file in files]
    title = str(files[0])
    require_all_parts([file.header for file in opened], title)
    tables: Tables = {}
    for file in opened:
        tables |= read_tables(file.header, file.read_bytes)
    model = describe_gguf(joined_header([file.header for file in opened], title), title, tables)
    for file in opened:
        require_decodable(file.header, str(file.path))
    with (
        tempfile.TemporaryDirectory(prefix="moechat-") as temporary,
        called(Path(temporary), title, _MADE_OF),
    ):
        directory = Path(temporary)
        write_side_files(directory, files[0], model)
        views = {file.path.name: GgufView(file, sources_in(file.header, model.sources)) for file in opened}
        yield GgufCheckpoint(directory, title, files, tensor_set(files[0].parent, views, {}))


def all_parts(path: Path) -> list[Path]:
    """All files of a model, in order; the number of parts is in their names.

    Raises:
        CheckpointError: One is missing, or one that was not named is a link out of the directory.
    """
    names = gguf_parts(path.name)
    if len(names) < 2:
        return [path]
    for name in names:
        if name != path.name:
            require_inside(path.parent / name, path.parent)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {missing[0]} ({len(missing)} of {len(names)} parts are missing)",
            hint="put all parts of the model into one directory",
        )
    return [path.parent / name for name in names]


def has_vocabulary(path: Path) -> bool:
    """Whether a GGUF model has a tokenizer; reads a header.

    Args:
        path: The file, or any part of a split model.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    return VOCABULARY in GgufFile.open(all_parts(path)[0]).header.metadata


def gguf_fingerprint(files: Sequence[Path]) -> str:
    """Fingerprint of GGUF files on this machine from their names, sizes and mtimes.

    Raises:
        CheckpointError: A file no longer exists.
    """
    digest = hashlib.sha256(f"gguf {VERSION}".encode())
    try:
        for file in files:
            status = file.stat()
            digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
    except OSError as problem:
        raise CheckpointError(f"{problem.filename} has changed: {problem.strerror}") from problem
    return digest.hexdigest()


def joined_header(headers: Sequence[GgufHeader], where: str) -> GgufHeader:
    """The first part's header with the tensors of all parts.

    Raises:
        CheckpointError: A tensor is in two parts.
    """
    tensors = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{where}: the tensor {name[:200]!r} is in two parts")
            tensors[name] = tensor
    return replace(headers[0], tensors=tensors)


def require_all_parts(headers: Sequence[GgufHeader], where: str) -> None:
    """Check by their metadata that files are all parts of one model, in order.

    Raises:
        CheckpointError: They are not.
    """
    for number, header in enumerate(headers):
        count, own = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if count in (0, 1) and len(headers) == 1:
            continue
        if count != len(headers) or own != number:
            raise CheckpointError(
                f"{where}: file {number + 1} of {len(headers)} says it is number {own} (from 0) of {count}",
                hint="name the parts as they were split: model-00001-of-00003.gguf and so on",
            )


def sources_in(header: GgufHeader, sources: Mapping[str, GgufSource]) -> dict[str, GgufSource]:
    """The tensors of a model that are in one file."""
    return {name: source for name, source in sources.items() if source.tensor in header.tensors}


def write_side_files(directory: Path, file: Path, model: GgufModel) -> None:
    """Write configuration, tokenizer and chat template, as in a checkpoint directory.

    Args:
        directory: An existing directory; files of these names are replaced.
        file: The GGUF file, or one of the same size that begins with its header.
        model: The model it describes.

    Raises:
        UnsupportedModelError: transformers cannot rebuild the tokenizer.
    """
    for name, content in (("config.json", model.config), ("generation_config.json", model.generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not model.has_vocabulary:
        return
    own = byte_level_tokenizer(file)
    if own is not None:
        own.save_pretrained(str(directory))
        return
    from transformers import PreTrainedTokenizerFast

    # In an empty directory, because transformers prefers tokenizer files next to the GGUF file to its
    # content.
    with tempfile.TemporaryDirectory(prefix="moechat-") as alone:
        Path(alone, "model.gguf").symlink_to(file.resolve())
        try:
            with without_warnings():
                tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    alone, gguf_file="model.gguf", local_files_only=True
                )
                tokenizer.save_pretrained(str(directory))
        except Exception as problem:  # transformers raises many types for malformed vocabularies
            raise UnsupportedModelError(
                f"transformers cannot rebuild the tokenizer of {file.name}: {one_line(problem)}",
                hint="take the model's own repository, with safetensors files",
            ) from problem
