"""Searches the hub for models that fit into the memory of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointError, ModelNotFoundError, MoechatError, OfflineError, UsageError
from moechat.fetch.bounded import ask_json
from moechat.fetch.file_selection import CONFIG, require_described
from moechat.fetch.hub_client import (
    endpoint,
    hub_headers,
    is_offline,
    offline_variable,
)
from moechat.fetch.repository import TIMEOUT_S, RemoteRepository, ask_hub, fetch_repository
from moechat.fetch.sources import Choice, choose_source, list_sources, speeds_of
from moechat.fetch.transfer import Transfer
from moechat.hub.known_shapes import find_shape
from moechat.hub.model_ref import require_repository
from moechat.planning.expect import Expected
from moechat.store.checkpoint_files import read_config
from moechat.store.files import called
from moechat.store.quantised.schemes import require_readable
from moechat.store.quantised.settings import read_settings

_BASE = "base_model:"
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Hit:
    """A repository that the hub found.

    Attributes:
        repository: ``org/name``.
        downloads: Downloads in the last month, as the hub counts them; ``None`` if it does not say.
        base: Repository of the model that these files were made from; ``None`` if it names none.
    """

    repository: str
    downloads: int | None
    base: str | None


@dataclass(frozen=True)
class Candidate:
    """A repository with what it would be on this machine.

    Attributes:
        hit: The repository.
        choice: The files to take, and bits; ``None`` if it cannot be run.
        expected: The speed with them; ``None`` if it cannot be run.
        licence: From the model card.
        commit: The commit that was looked at; ``None`` if it could not be read.
        refused: Why it cannot be run here; empty if it can.
    """

    hit: Hit
    choice: Choice | None
    expected: Expected | None
    licence: str | None
    commit: str | None
    refused: str


def search_hub(words: Sequence[str], limit: int, notice: Notice) -> list[Hit]:
    """The repositories whose names have all words, those with most downloads first.

    Args:
        words: The words.
        limit: Most repositories.
        notice: Receives a message before each wait.

    Raises:
        OfflineError: The hub cannot be reached, or must not be.
        MoechatError: As :func:`moechat.fetch.repository.fetch_repository`.
    """
    if is_offline():
        raise OfflineError(
            f"a search needs the hub, and {offline_variable()} forbids the network",
            hint=f"unset {offline_variable()}; `moechat plan NAME` needs no network: moechat plan qwen3.6",
        )
    query = " ".join(words)

    def request() -> list[Hit]:
        # Not by HfApi.list_models(), which retries for half a minute where there is no connection.
        found = ask_json(
            f"{endpoint()}/api/models",
            params={"search": query, "sort": "downloads", "limit": limit},
            headers=hub_headers(),
            timeout=TIMEOUT_S,
        )
        return [_hit(entry) for entry in found[:limit]]

    return ask_hub(request, f"the search for {query!r}", None, notice)


def _hit(entry: Any) -> Hit:
    """Read strictly: the answer may come from any mirror.

    Raises:
        ValueError: As KeyError, TypeError and others: it does not have the hub's format.
        ModelNotFoundError: A name breaks the hub's rules.
    """
    name, downloads = entry["id"], entry.get("downloads")
    require_repository(name)
    if downloads is not None and (type(downloads) is not int or downloads < 0):
        raise ValueError("not a count")
    bases = [tag.rpartition(":")[2] for tag in entry.get("tags") or () if tag.startswith(_BASE)]
    return Hit(name, downloads, next((base for base in bases if _is_repository(base)), None))


def _is_repository(name: str) -> bool:
    try:
        require_repository(name)
    except ModelNotFoundError:
        return False
    return True


class Judge:
    """Decides for one repository after another whether it runs here, and how fast.

    Repositories of one configuration are planned once.

    Args:
        bits: Bits of an expert weight that the user gave; ``None`` chooses them.
        notice: Receives a message before each wait.
    """

    def __init__(self, bits: int | None, notice: Notice) -> None:
        self._bits, self._notice = bits, notice
        self._speeds: dict[bytes | str, dict[int, Expected] | MoechatError] = {}

    def judge(self, hit: Hit) -> Candidate:
        """Read one repository. If it cannot be run, the result has the reason.

        Raises:
            OfflineError: The connection to the hub was lost.
        """
        remote: RemoteRepository | None = None
        try:
            remote = fetch_repository(hit.repository, None, self._notice)
            sources = list_sources(remote, original=True)
            if not sources:
                raise CheckpointError("it has no weights as safetensors or GGUF files")
            speeds = self._speeds_of(hit, remote)
            choice = choose_source(sources, speeds, bits=self._bits)
            if choice.bits not in speeds:
                raise CheckpointError("it does not fit into the memory of this machine")
            expected = speeds[choice.bits]
            return Candidate(hit, choice, expected, remote.licence, remote.commit, "")
        except OfflineError:
            raise
        except MoechatError as error:
            licence, commit = (None, None) if remote is None else (remote.licence, remote.commit)
            return Candidate(hit, None, None, licence, commit, str(error))

    def _speeds_of(self, hit: Hit, remote: RemoteRepository) -> dict[int, Expected]:
        """Expected speed by bits.

        Raises:
            MoechatError: The model cannot be run, or does not fit; remembered by configuration.
        """
        with tempfile.TemporaryDirectory(prefix="moechat-") as temporary:
            target, key = self._shape(hit, remote, Path(temporary))
            found = self._speeds.get(key)
            if found is None:
                try:
                    found = speeds_of(target, self._bits)
                except MoechatError as error:
                    found = error
                self._speeds[key] = found
        if isinstance(found, MoechatError):
            raise found
        return found

    def _shape(self, hit: Hit, remote: RemoteRepository, directory: Path) -> tuple[str | Path, bytes | str]:
        """The configuration to plan with, and a key that is equal for equal ones."""
        if CONFIG not in remote.files:
            # GGUF files alone: the model that they were made from.
            shape = None if hit.base is None else find_shape(hit.base)
            if shape is not None:
                return shape, shape
            if hit.base is None or hit.base == hit.repository:
                raise UsageError(
                    "its GGUF files name no model that they were made from: "
                    f"`moechat download {hit.repository} --dry-run` reads their headers"
                )
            remote = fetch_repository(hit.base, None, self._notice)
            if CONFIG not in remote.files:
                raise CheckpointError(f"{hit.base}, which its files were made from, has no {CONFIG}")
        path = directory / CONFIG
        require_described(remote, (remote.files[CONFIG],))
        Transfer(remote, lambda _size: None, self._notice).fetch(remote.files[CONFIG], path)
        if remote.repository == hit.repository:
            _require_readable_weights(path, hit.repository)
        return path, path.read_bytes()


def _require_readable_weights(config: Path, repository: str) -> None:
    """Check that the weights are in a format that is read.

    Raises:
        UnsupportedModelError: They are not.
        CheckpointError: The configuration is malformed.
    """
    with called(config.parent, repository):
        settings = read_settings(read_config(config.parent), config.parent)
    if settings is not None:
        require_readable(settings.method, repository)


def by_fit(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that run here in the hub's order, then the others."""
    return sorted(candidates, key=lambda candidate: bool(candidate.refused))
