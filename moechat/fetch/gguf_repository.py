"""GGUF files of a repository: which of them is meant, their headers, and the checkpoint they announce."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from moechat.errors import CheckpointError, UsageError
from moechat.hub.names import GGUF_SUFFIX, first_gguf_part, gguf_parts
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.transfer import Transfer
from moechat.models.gguf import describe_gguf
from moechat.models.gguf_source import (
    VERSION,
    joined_header,
    require_all_parts,
    sources_in,
    write_side_files,
)
from moechat.store.announced import AnnouncedCheckpoint, Shard
from moechat.store.files import format_bytes
from moechat.store.gguf_file import GgufFile, GgufSource, GgufView, entries, require_decodable
from moechat.store.gguf_header import MAX_HEADER_BYTES, GgufHeader, parse_gguf_header

# Vocabularies take 1 to 10 MiB of a header; each further request doubles what has come.
_FIRST_READ = 4 << 20
# Of vision models, and of calibrations: no language models.
_OTHERS = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_SHOWN = 12


def gguf_models(remote: RemoteRepository) -> dict[str, list[RemoteFile]]:
    """The GGUF models of a repository, all parts of each, by the name of the first."""
    names = sorted(
        name
        for name in remote.files
        if name.lower().endswith(GGUF_SUFFIX) and not _OTHERS.search(PurePosixPath(name).name)
    )
    models: dict[str, list[RemoteFile]] = {}
    for name in names:  # sorted: numbers of parts have five digits
        path = PurePosixPath(name)
        first = str(path.with_name(first_gguf_part(path.name)))
        models.setdefault(first, []).append(remote.files[name])
    return models


def choose_gguf(remote: RemoteRepository, variant: str | None) -> list[RemoteFile]:
    """The files of the model that is meant.

    Args:
        remote: The repository.
        variant: A file's name, or a type in it; ``None`` where there is only one model.

    Raises:
        UsageError: None or several fit.
        CheckpointError: A part is missing.
    """
    models = gguf_models(remote)
    fitting = [name for name in models if variant is None or _fits(name, variant)]
    if len(fitting) != 1:
        shown = ", ".join(f"{name} ({_size(models[name])})" for name in (fitting or list(models))[:_SHOWN])
        more = "" if len(fitting or models) <= _SHOWN else ", …"
        what = f"{len(fitting)} GGUF models" if fitting else "no such GGUF model"
        wanted = "" if variant is None else f" for {variant}"
        raise UsageError(
            f"{remote.title} has {what}{wanted}: {shown}{more}",
            hint=f"name one by its type or file: moechat download {remote.repository}:{_example(models)}",
        )
    files = models[fitting[0]]
    names = gguf_parts(PurePosixPath(fitting[0]).name)
    if len(files) != len(names):
        raise CheckpointError(
            f"{remote.title} lacks {len(names) - len(files)} of the {len(names)} parts of {fitting[0]}",
            hint="its makers have not finished uploading it, or removed a part",
        )
    return files


def read_gguf_header(transfer: Transfer, file: RemoteFile) -> bytes:
    """The beginning of a GGUF file, as far as its header reaches.

    Raises:
        CheckpointError: It is no GGUF file, or a damaged one.
        MoechatError: As :meth:`Transfer.fetch`.
    """
    data, wanted = b"", _FIRST_READ
    most = min(MAX_HEADER_BYTES, file.size)
    while True:
        end = min(wanted, most)
        data += transfer.read_range(file, len(data), end)
        header = parse_gguf_header(data, file.size, file.path)
        if header is not None:
            return data[: header.nbytes]
        wanted *= 2


class GgufShard(Shard):
    """A GGUF file of a repository: announced by its header, perhaps here, or reduced to its dense tensors."""

    def __init__(
        self, path: Path, header: GgufHeader, file_bytes: int, sources: Mapping[str, GgufSource]
    ) -> None:
        """Announce what it holds.

        Args:
            path: Its name in the checkpoint directory.
            header: Of the file.
            file_bytes: Its size.
            sources: Where each of the checkpoint's tensors lies in it.
        """
        super().__init__(path, entries(header, sources), file_bytes)
        self._header = header
        self._sources = sources

    def _whole(self, path: Path) -> GgufView:
        file = GgufFile.open(path)
        if file.header != self._header:
            raise CheckpointError(
                f"{path} does not hold the tensors that its header announced", hint="run the command again"
            )
        return GgufView(file, self._sources)


def announced_gguf(
    directory: Path, remote: RemoteRepository, files: Mapping[str, RemoteFile], headers: Mapping[str, bytes]
) -> AnnouncedCheckpoint:
    """The checkpoint that GGUF files will be, with configuration and tokenizer written into a directory.

    Args:
        directory: Gets ``config.json`` and tokenizer.
        remote: The repository.
        files: The parts, in order.
        headers: Their beginnings.

    Raises:
        CheckpointError: They do not fit together.
        UnsupportedModelError: moechat cannot read this model from GGUF files.
    """
    parsed = {name: _parsed(headers[name], file) for name, file in files.items()}
    title = f"{next(iter(files))} of {remote.repository}"
    require_all_parts(list(parsed.values()), title)
    model = describe_gguf(joined_header(list(parsed.values()), title), title)
    for name, header in parsed.items():
        require_decodable(header, name)
    first = next(iter(files))
    # transformers reads the vocabulary from a file: one of the right size, with a hole in place of its data.
    # Not in the directory, where any name may be that of another file of the repository.
    with tempfile.TemporaryDirectory(prefix="moechat-") as temporary:
        stand_in = Path(temporary, PurePosixPath(first).name)
        with open(stand_in, "wb") as target:
            target.write(headers[first])
            target.truncate(files[first].size)
        write_side_files(directory, stand_in, model)
    shards: dict[str, Shard] = {
        name: GgufShard(directory / name, header, files[name].size, sources_in(header, model.sources))
        for name, header in parsed.items()
    }
    identity = ["gguf", VERSION, {name: [file.size, file.identity] for name, file in files.items()}]
    return AnnouncedCheckpoint(directory, shards, {}, identity, title=title)


def _parsed(data: bytes, file: RemoteFile) -> GgufHeader:
    header = parse_gguf_header(data, file.size, file.path)
    assert header is not None  # read_gguf_header() read on until there was one
    return header


def _fits(name: str, variant: str) -> bool:
    if variant.lower().endswith(GGUF_SUFFIX):
        return variant in (name, PurePosixPath(name).name)
    return re.search(rf"(^|[-._/]){re.escape(variant)}($|[-._/])", name, re.IGNORECASE) is not None


def _size(files: Sequence[RemoteFile]) -> str:
    return format_bytes(sum(file.size for file in files))


def _example(models: Mapping[str, object]) -> str:
    """A name that chooses one of them."""
    return next(
        (name for name in ("Q4_K_M", "Q8_0") if sum(_fits(model, name) for model in models) == 1), "FILE"
    )
