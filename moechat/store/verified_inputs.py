"""The small files of a model, compared, and a private copy of them for libraries that read them by name.

Verification compares files with their hashes now and then; experts and dense weights have checksums that are
compared whenever they are read. A wrong byte in a tokenizer, a chat template or a configuration changes
answers just as silently. The files of a store are compared with its manifest; of a source with a second read.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from moechat.errors import StoreDamagedError
from moechat.store.checkpoint_files import CONFIG_FILE
from moechat.store.file_check import differs
from moechat.store.file_problems import file_problem
from moechat.store.reread import read_twice
from moechat.store.side_files import is_input, side_files
from moechat.store.store import Store

# One read may return a wrong byte. If the second one differs too, the file is damaged.
_TRIES = 2


def verified_bytes(store: Store, name: str) -> bytes:
    """Content of a file that the manifest lists.

    Raises:
        StoreDamagedError: It is not as the manifest says, or the disk fails.
        DoesNotFitError: The system refuses memory, or an open file.
        KeyError: The manifest does not list it.
    """
    path, record = store.path / name, store.manifest.files[name]
    digest = ""
    for _ in range(_TRIES):
        try:
            content = path.read_bytes()
        except OSError as problem:
            raise file_problem(path, problem, StoreDamagedError, "read") from problem
        digest = hashlib.sha256(content).hexdigest()
        if digest == record.sha256:
            return content
    raise store.damaged(f"{path} {differs(record, digest)}")


def verified_inputs(store: Store) -> AbstractContextManager[Path]:
    """A directory with configuration, tokenizer, chat templates and generation settings of a store, for a
    ``with`` block.

    Where no copy can be made, for want of room say, it is the store's own; its files were compared at least.

    Raises:
        StoreDamagedError: As :func:`verified_bytes`.
        DoesNotFitError: Likewise.
    """
    contents = {
        name: verified_bytes(store, name)
        for name in store.manifest.files
        if name == CONFIG_FILE or is_input(name)
    }
    return _private_copy(contents, store.path)


def compared_inputs(source: Path) -> AbstractContextManager[Path]:
    """The same for a checkpoint directory, whose files are read twice.

    Raises:
        CheckpointError: The two reads differ, or the disk fails; see also
            :func:`moechat.store.side_files.side_files`.
        DoesNotFitError: The system refuses memory, or an open file.
    """
    contents = {CONFIG_FILE: read_twice(source / CONFIG_FILE)}
    for name, path in side_files(source, documents=False).items():
        if is_input(name):
            contents[name] = read_twice(path)
    return _private_copy(contents, source)


@contextmanager
def _private_copy(contents: dict[str, bytes], own: Path) -> Iterator[Path]:
    """A directory with files of these contents, or ``own`` where none can be made."""
    with ExitStack() as stack:
        yield _copied(contents, stack) or own


def _copied(contents: dict[str, bytes], stack: ExitStack) -> Path | None:
    try:
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moechat-")))
        for name, content in contents.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
    except OSError:
        return None
    return copy
