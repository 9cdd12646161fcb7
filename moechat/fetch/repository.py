"""Reads a repository's commit and files, with sizes and hashes, from the hub."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from moechat.errors import CheckpointError, ModelNotFoundError, OfflineError
from moechat.fetch.bounded import ask_json
from moechat.fetch.hub_client import (
    endpoint,
    has_token,
    http_library,
    hub_headers,
    is_offline,
    shown_endpoint,
)
from moechat.fetch.hub_errors import offline_error, translate_hub_errors
from moechat.fetch.retry import RetryPolicy
from moechat.hub.model_ref import require_repository

T = TypeVar("T")

TIMEOUT_S = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_MAX_FILE_BYTES = 1 << 50
# Raised while reading a response that does not have the hub's format.
_MALFORMED_RESPONSE_ERRORS = (
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
        size: In bytes.
        sha256: SHA-256 of a file in large file storage; ``None`` for a file in git.
        blob: Git's hash of a file in git (SHA-1 of a header and the content); ``None`` for others.
    """

    path: str
    size: int
    sha256: str | None
    blob: str | None

    @property
    def identity(self) -> str:
        """The hash to check the content against."""
        return self.sha256 or self.blob or ""


@dataclass(frozen=True)
class RemoteRepository:
    """A repository at one commit.

    Attributes:
        repository: ``org/name`` in the hub's spelling.
        revision: Requested branch, tag or commit; ``None`` for the default branch.
        commit: The commit of that revision; all files are read at this commit.
        files: By name.
        licence: From the model card; ``None`` if it states none.
    """

    repository: str
    revision: str | None
    commit: str
    files: dict[str, RemoteFile]
    licence: str | None

    @property
    def title(self) -> str:
        """``org/name@commit``, or ``org/name@revision (commit)`` for a requested branch or tag."""
        short = self.commit[:12]
        if self.revision is None or self.commit.startswith(self.revision):
            return f"{self.repository}@{short}"
        return f"{self.repository}@{self.revision} ({short})"


def fetch_repository(
    repository: str, revision: str | None, notice: Callable[[str], None] = lambda _text: None
) -> RemoteRepository:
    """Read a repository's description from the hub, with retries while the hub is busy.

    Args:
        repository: ``org/name``.
        revision: Branch, tag or commit; ``None`` for the default branch.
        notice: Receives a message before each wait.

    Raises:
        ModelNotFoundError: There is no such repository or revision.
        NotAllowedError: The hub denies access.
        OfflineError: The hub cannot be reached, or its answer is malformed.
        CheckpointError: The repository has no files.
        UsageError: A variable of the hub is invalid.
    """
    if is_offline():
        raise offline_error(repository, revision)
    return ask_hub(lambda: _request(repository, revision), repository, revision, notice)


def ask_hub(request: Callable[[], T], subject: str, revision: str | None, notice: Callable[[str], None]) -> T:
    """The result of a request to the hub's API, with retries while the hub is busy.

    Args:
        request: Makes the request by huggingface_hub, and reads the answer.
        subject: ``org/name``, or what is asked for, for messages.
        revision: For messages.
        notice: Receives a message before each wait.

    Raises:
        MoechatError: As :func:`fetch_repository`.
    """
    has_token()  # raises if the token or a variable is invalid
    failures = RetryPolicy().start_file()
    while True:
        with translate_hub_errors(subject, revision):
            try:
                return _read(request)
            except http_library().HTTPError as problem:
                # A missing connection is reported at once.
                pause = failures.pause(problem) if getattr(problem, "response", None) is not None else None
                if pause is None:
                    raise
                notice(f"the hub answers with status {problem.response.status_code}; again in {pause:.3g} s")
        time.sleep(pause)


def _read(request: Callable[[], T]) -> T:
    try:
        return request()
    except http_library().HTTPError:
        raise
    except _MALFORMED_RESPONSE_ERRORS as problem:  # an HTML page of a captive portal or a proxy
        raise OfflineError(
            f"{shown_endpoint()} does not answer like a model hub ({type(problem).__name__})",
            hint="check HF_ENDPOINT; some networks require a login in a browser first",
        ) from problem


def _request(repository: str, revision: str | None) -> RemoteRepository:
    from huggingface_hub import ModelInfo

    # Not by HfApi.model_info(), which reads an answer of any length.
    at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    found = ask_json(
        f"{endpoint()}/api/models/{repository}{at}",
        params={"blobs": True},
        headers=hub_headers(),
        timeout=TIMEOUT_S,
    )
    info = ModelInfo(**found)  # type: ignore[no-untyped-call]
    return _parse_repository(info, repository, revision)


def _parse_repository(info: Any, repository: str, revision: str | None) -> RemoteRepository:
    """Parse a response strictly: it may come from any mirror, and names and commits become paths.

    Files whose names would leave their directory are skipped.

    Raises:
        CheckpointError: There are no files.
        ValueError: Like the others of :data:`_MALFORMED_RESPONSE_ERRORS`: the response is malformed.
    """
    files: dict[str, RemoteFile] = {}
    for entry in info.siblings or ():
        file = _parse_file(entry)
        if _stays_inside(file.path):
            files[file.path] = file
    if not files or info.sha is None:
        reason = "" if has_token() else "; without a token some repositories show no files"
        raise CheckpointError(f"the hub lists no files of {repository}{reason}")
    if not _COMMIT.fullmatch(info.sha):
        raise ValueError("not a commit")
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
    """Whether a name, joined to a directory, stays below that directory."""
    parts = path.split("/")  # an absolute path has an empty part
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _parse_file(entry: Any) -> RemoteFile:
    path, size, lfs = entry.rfilename, entry.size, entry.lfs
    if not isinstance(path, str):
        raise TypeError("not a name")
    sha256 = None if lfs is None else lfs.sha256
    size = lfs.size if size is None and lfs is not None else size
    blob = entry.blob_id if lfs is None else None
    if size is not None and (type(size) is not int or not 0 <= size <= _MAX_FILE_BYTES):
        raise ValueError("not a size")
    if (sha256 is not None and not _SHA256.fullmatch(sha256)) or (
        blob is not None and not _SHA1.fullmatch(blob)
    ):
        raise ValueError("not a hash")
    return RemoteFile(path, -1 if size is None else size, sha256, blob)
