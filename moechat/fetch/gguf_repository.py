"""GGUF models of a repository: selects one, reads its headers, and builds a checkpoint from them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath

from moechat.errors import CheckpointError, UsageError
from moechat.fetch.repository import RemoteFile, RemoteRepository
from moechat.fetch.transfer import Transfer
from moechat.hub.gguf_parts import GGUF_SUFFIX, first_gguf_part, gguf_parts
from moechat.models.gguf import describe_gguf
from moechat.models.gguf_source import (
    VERSION,
    joined_header,
    require_all_parts,
    sources_in,
    write_side_files,
)
from moechat.store.files import format_bytes
from moechat.store.gguf_file import (
    GgufFile,
    GgufSource,
    GgufView,
    column_order,
    entries,
    kept_encoding,
    require_decodable,
    unkept_type,
)
from moechat.store.gguf_header import MAX_HEADER_BYTES, GgufHeader, parse_gguf_header
from moechat.store.gguf_tables import Tables, read_tables, table_ranges
from moechat.store.mapped_file import place_of
from moechat.store.streamed_checkpoint import Shard, StreamedCheckpoint

# Vocabularies take 1 to 10 MiB of a header; each further request doubles the size.
_FIRST_READ = 4 << 20
# Files that are no language models: projectors of vision models, and importance matrices.
_NOT_MODELS = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_SHOWN = 12


def gguf_models(remote: RemoteRepository) -> dict[str, list[RemoteFile]]:
    """The GGUF models of a repository, all parts of each, by the name of the first."""
    names = sorted(
        name
        for name in remote.files
        if name.lower().endswith(GGUF_SUFFIX) and not _NOT_MODELS.search(PurePosixPath(name).name)
    )
    models: dict[str, list[RemoteFile]] = {}
    for name in names:  # sorted: numbers of parts have five digits
        path = PurePosixPath(name)
        first = str(path.with_name(first_gguf_part(path.name)))
        models.setdefault(first, []).append(remote.files[name])
    return models


def choose_gguf(remote: RemoteRepository, variant: str | None) -> list[RemoteFile]:
    """The files of the requested model.

    Args:
        remote: The repository.
        variant: A file name, or a type in it; ``None`` for the only model.

    Raises:
        UsageError: No model matches, or several.
        CheckpointError: A part is missing.
    """
    models = gguf_models(remote)
    matching = [name for name in models if variant is None or _matches(name, variant)]
    if len(matching) != 1:
        candidates = matching or list(models)
        shown = ", ".join(f"{name} ({_size(models[name])})" for name in candidates[:_SHOWN])
        more = "" if len(candidates) <= _SHOWN else ", …"
        found = f"{len(matching)} GGUF models" if matching else "no such GGUF model"
        requested = "" if variant is None else f" for {variant}"
        raise UsageError(
            f"{remote.title} has {found}{requested}: {shown}{more}",
            hint=f"name one by its type or file: moechat download {remote.repository}:{_example(models)}",
        )
    files = models[matching[0]]
    names = gguf_parts(PurePosixPath(matching[0]).name)
    if len(files) != len(names):
        raise CheckpointError(
            f"{remote.title} lacks {len(names) - len(files)} of the {len(names)} parts of {matching[0]}",
            hint="its makers have not finished uploading it, or removed a part",
        )
    return files


def read_gguf_header(transfer: Transfer, file: RemoteFile) -> bytes:
    """The header of a GGUF file, as its first bytes, and after it the values of its tables.

    Raises:
        CheckpointError: It is not a GGUF file, or damaged.
        MoechatError: As :meth:`Transfer.fetch`.
    """
    data, length = b"", _FIRST_READ
    most = min(MAX_HEADER_BYTES, file.size)
    while True:
        end = min(length, most)
        data += transfer.read_range(file, len(data), end)
        header = parse_gguf_header(data, file.size, file.path)
        if header is not None:
            tables = table_ranges(header).values()
            values = b"".join(transfer.read_range(file, *each) for each in tables)
            return data[: header.nbytes].ljust(header.nbytes, b"\0") + values
        length *= 2


class GgufShard(Shard):
    """A GGUF file of a repository; see :class:`Shard`."""

    _PLAIN = False

    def __init__(
        self, path: Path, header: GgufHeader, file_bytes: int, sources: Mapping[str, GgufSource]
    ) -> None:
        """Create from the header.

        Args:
            path: Name of the file in the checkpoint directory.
            header: The file's header.
            file_bytes: Size of the file.
            sources: Location of each of the checkpoint's tensors in the file.
        """
        super().__init__(path, entries(header, sources), file_bytes)
        self._header = header
        self._sources = sources

    def encoding(self, name: str) -> str | None:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        source = self._sources[name]
        return kept_encoding(source, self._header.tensors[source.tensor])

    def unkept_type(self, name: str) -> str:
        """See :class:`moechat.store.tensors.PackedFile`; known without the file."""
        return unkept_type(self._header.tensors[self._sources[name].tensor])

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        return column_order(self._sources[name])

    def place(self, name: str) -> str:
        """See :class:`moechat.store.tensors.TensorFile`."""
        return place_of(self.path, self._sources[name].tensor)

    def _whole(self, path: Path) -> GgufView:
        file = GgufFile.open(path)
        if file.header != self._header:
            raise CheckpointError(
                f"{path} does not hold the tensors that its header lists", hint="run the command again"
            )
        return GgufView(file, self._sources)


def gguf_checkpoint_from_headers(
    directory: Path, remote: RemoteRepository, files: Mapping[str, RemoteFile], headers: Mapping[str, bytes]
) -> StreamedCheckpoint:
    """The checkpoint described by GGUF headers; writes configuration and tokenizer into a directory.

    Args:
        directory: Receives ``config.json`` and tokenizer.
        remote: The repository.
        files: The parts, in order.
        headers: Their headers, from :func:`read_gguf_header`.

    Raises:
        CheckpointError: The parts do not belong together.
        UnsupportedModelError: The model is not supported in GGUF files.
    """
    parsed = {name: _parse(headers[name], file) for name, file in files.items()}
    title = f"{next(iter(files))} of {remote.repository}"
    require_all_parts(list(parsed.values()), title)
    tables: Tables = {}
    for name, header in parsed.items():
        tables |= _tables(header, headers[name])
    model = describe_gguf(joined_header(list(parsed.values()), title), title, tables)
    for name, header in parsed.items():
        require_decodable(header, name)
    first = next(iter(files))
    # transformers reads the vocabulary from a file, so write a sparse file with this header. Not into
    # `directory`, where its name could be that of another file of the repository.
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
    return StreamedCheckpoint(directory, shards, {}, identity, title=title)


def _tables(header: GgufHeader, data: bytes) -> Tables:
    """The tables that :func:`read_gguf_header` puts after a header."""
    values = BytesIO(data)
    values.seek(header.nbytes)
    return read_tables(header, lambda start, end: values.read(end - start))


def _parse(data: bytes, file: RemoteFile) -> GgufHeader:
    header = parse_gguf_header(data, file.size, file.path)
    assert header is not None  # read_gguf_header() returns complete headers
    return header


def _matches(name: str, variant: str) -> bool:
    if variant.lower().endswith(GGUF_SUFFIX):
        return variant in (name, PurePosixPath(name).name)
    return re.search(rf"(^|[-._/]){re.escape(variant)}($|[-._/])", name, re.IGNORECASE) is not None


def _size(files: Sequence[RemoteFile]) -> str:
    return format_bytes(sum(file.size for file in files))


def _example(models: Mapping[str, object]) -> str:
    """A type that matches exactly one of the models."""
    return next(
        (name for name in ("Q4_K_M", "Q8_0") if sum(_matches(model, name) for model in models) == 1), "FILE"
    )
