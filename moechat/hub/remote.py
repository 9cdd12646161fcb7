"""What the hub says of a repository: its commit and its files, with sizes and hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moechat.errors import CheckpointError, OfflineError
from moechat.hub.failures import endpoint, explained, has_token, is_offline, offline_error

_ANSWER_WITHIN_S = 30.0


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
        """``org/name@revision (commit)``."""
        asked = "" if self.revision in (None, self.commit) else f"@{self.revision}"
        return f"{self.repository}{asked} ({self.commit[:12]})"


def look_up(repository: str, revision: str | None) -> RemoteRepository:
    """Ask the hub for a repository; one request.

    Raises:
        ModelNotFoundError: There is none, or no such revision.
        NotAllowedError: The hub does not let us see it.
        OfflineError: The hub cannot be asked.
        CheckpointError: Its answer makes no sense.
    """
    if is_offline():
        raise offline_error(repository, revision)
    from huggingface_hub import HfApi

    with explained(repository, revision):
        try:
            info = HfApi(endpoint=endpoint()).model_info(
                repository, revision=revision, files_metadata=True, timeout=_ANSWER_WITHIN_S
            )
        except (ValueError, KeyError, TypeError) as problem:  # a page for people: a captive portal, a proxy
            raise OfflineError(
                f"{endpoint()} does not answer like a model hub ({type(problem).__name__})",
                hint="check HF_ENDPOINT; a network may also want you to log in with a browser first",
            ) from problem
    return _repository(info, repository, revision)


def _repository(info: Any, repository: str, revision: str | None) -> RemoteRepository:
    files: dict[str, RemoteFile] = {}
    for entry in info.siblings or ():
        lfs, size = entry.lfs, entry.size
        if lfs is not None:
            file = RemoteFile(entry.rfilename, lfs.size if size is None else size, lfs.sha256, None)
        else:
            file = RemoteFile(entry.rfilename, -1 if size is None else size, None, entry.blob_id)
        files[file.path] = file
    if not isinstance(info.sha, str) or not files:
        wish = "" if has_token() else "; without a token some repositories show no files"
        raise CheckpointError(f"the hub lists no files of {repository}{wish}")
    card = getattr(info, "card_data", None)
    licence = card.get("license") if card is not None else None
    return RemoteRepository(
        repository=info.id if isinstance(info.id, str) else repository,
        revision=revision,
        commit=info.sha,
        files=files,
        licence=licence if isinstance(licence, str) else None,
    )
