"""What the hub says of a repository: its commit and its files, with sizes and hashes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moechat.errors import CheckpointError, ModelNotFoundError, OfflineError
from moechat.hub.failures import (
    endpoint,
    explained,
    has_token,
    http_library,
    is_offline,
    offline_error,
    shown_endpoint,
)
from moechat.hub.names import require_repository
from moechat.hub.patience import Patience

_ANSWER_WITHIN_S = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_MAX_FILE_BYTES = 1 << 50
# What an answer of another form leads to.
_NONSENSE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    ModelNotFoundError,
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository.

    Attributes:
        path: Name inside the repository.
        size: Bytes.
        sha256: Of the content, for files in large file storage; ``None`` for those in git itself.
        blob: Git's own hash (SHA-1 of a header and the content) of files in git itself; ``None`` for others.
    """

    path: str
    size: int
    sha256: str | None
    blob: str | None

    @property
    def identity(self) -> str:
        """The hash that the content is checked against."""
        return self.sha256 or self.blob or ""


@dataclass(frozen=True)
class RemoteRepository:
    """A repository at one commit.

    Attributes:
        repository: ``org/name``, as the hub spells it.
        revision: Branch, tag or commit asked for; ``None``: the default branch.
        commit: The commit that it stood for; everything is read at this one.
        files: By name.
        licence: As its card states it; ``None`` if it does not.
    """

    repository: str
    revision: str | None
    commit: str
    files: dict[str, RemoteFile]
    licence: str | None

    @property
    def title(self) -> str:
        """``org/name@commit``, or ``org/name@revision (commit)`` where a branch or a tag was asked for."""
        short = self.commit[:12]
        if self.revision is None or self.commit.startswith(self.revision):
            return f"{self.repository}@{short}"
        return f"{self.repository}@{self.revision} ({short})"


def look_up(
    repository: str, revision: str | None, notice: Callable[[str], None] = lambda _text: None
) -> RemoteRepository:
    """Ask the hub for a repository; one request, and more where it says that it is busy.

    Args:
        repository: ``org/name``.
        revision: Branch, tag or commit; ``None``: the default branch.
        notice: Called with a line for people before a wait.

    Raises:
        ModelNotFoundError: There is none, or no such revision.
        NotAllowedError: The hub does not let us see it.
        OfflineError: The hub cannot be asked, or does not answer like one.
        CheckpointError: It lists no files.
        UsageError: A variable of the hub makes no sense.
    """
    if is_offline():
        raise offline_error(repository, revision)
    has_token()  # raises where the one that is set, or a variable, makes no sense
    failures = Patience().begin()
    while True:
        with explained(repository, revision):
            try:
                return _ask(repository, revision)
            except http_library().HTTPError as problem:
                # Who has no connection should hear it at once.
                pause = failures.pause(problem) if getattr(problem, "response", None) is not None else None
                if pause is None:
                    raise
                notice(f"the hub answers with status {problem.response.status_code}; again in {pause:.3g} s")
        time.sleep(pause)


def _ask(repository: str, revision: str | None) -> RemoteRepository:
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=endpoint(), library_name="moechat").model_info(
            repository, revision=revision, files_metadata=True, timeout=_ANSWER_WITHIN_S
        )
        return _repository(info, repository, revision)
    except http_library().HTTPError:
        raise
    except _NONSENSE as problem:  # a page for people: a captive portal, a proxy
        raise OfflineError(
            f"{shown_endpoint()} does not answer like a model hub ({type(problem).__name__})",
            hint="check HF_ENDPOINT; a network may also want you to log in with a browser first",
        ) from problem


def _repository(info: Any, repository: str, revision: str | None) -> RemoteRepository:
    """Take what was said apart; a mirror may say anything, and names and commits become paths.

    Files whose names are no plain paths below a directory are left out.

    Raises:
        CheckpointError: No files, or a commit or a file that cannot be one.
        ValueError: As other exceptions of :data:`_NONSENSE`: it has another form.
    """
    files: dict[str, RemoteFile] = {}
    for entry in info.siblings or ():
        file = _file(entry)
        if _stays_inside(file.path):
            files[file.path] = file
    if not files or info.sha is None:
        wish = "" if has_token() else "; without a token some repositories show no files"
        raise CheckpointError(f"the hub lists no files of {repository}{wish}")
    if not _COMMIT.fullmatch(info.sha):
        raise ValueError("no commit")
    require_repository(info.id)
    card = getattr(info, "card_data", None)
    licence = card.get("license") if card is not None else None
    return RemoteRepository(
        repository=info.id,
        revision=revision,
        commit=info.sha,
        files=files,
        licence=licence if isinstance(licence, str) else None,
    )


def _stays_inside(path: str) -> bool:
    """Whether a name means a file below whatever directory it is joined to."""
    parts = path.split("/")  # an absolute one has an empty part
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _file(entry: Any) -> RemoteFile:
    path, size, lfs = entry.rfilename, entry.size, entry.lfs
    if not isinstance(path, str):
        raise TypeError("no name")
    sha256 = None if lfs is None else lfs.sha256
    size = lfs.size if size is None and lfs is not None else size
    blob = entry.blob_id if lfs is None else None
    if size is not None and (type(size) is not int or not 0 <= size <= _MAX_FILE_BYTES):
        raise ValueError("no size")
    if (sha256 is not None and not _SHA256.fullmatch(sha256)) or (
        blob is not None and not _SHA1.fullmatch(blob)
    ):
        raise ValueError("no hash")
    return RemoteFile(path, -1 if size is None else size, sha256, blob)
