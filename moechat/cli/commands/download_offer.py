"""The repositories that a download may come from, and the one that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.config import user_paths
from moechat.errors import (
    CheckpointError,
    DoesNotFitError,
    ModelNotFoundError,
    MoechatError,
    NotAllowedError,
    UnsupportedModelError,
)
from moechat.fetch.repository import RemoteRepository, fetch_repository
from moechat.hub.model_ref import PREFERRED_BITS, USUAL_FORMS, ModelRef
from moechat.hub.sources import sources_of

if TYPE_CHECKING:
    from moechat.fetch.download import Download
    from moechat.fetch.sources import Choice, Source


@dataclass(frozen=True)
class Offer:
    """What the hub offers for a name.

    Attributes:
        model: The name.
        ref: The model that it stands for.
        remote: Its repository; with several sources, the first that can be read.
        sources: All sources of a known model; empty where the name leaves no choice.
    """

    model: str
    ref: ModelRef
    remote: RemoteRepository
    sources: tuple[Source, ...] = ()

    def stores_here(
        self, models: Path, bits: int | None, is_made_of: Callable[[Path, str], bool]
    ) -> Iterator[tuple[str, int]]:
        """Title and bits of the stores in the library that were made of the present commit of a source.

        Args:
            models: The library.
            bits: Bits of the store; ``None``: any where there is a choice, else the usual ones.
            is_made_of: Whether a store was made of a commit.
        """
        found = [(source.ref, source.remote) for source in self.sources] or [(self.ref, self.remote)]
        any_bits = PREFERRED_BITS if self.sources else USUAL_FORMS
        for ref, remote in found:
            for candidate in any_bits if bits is None else (bits,):
                if is_made_of(ref.library_path(models, candidate), remote.commit):
                    yield remote.title, candidate

    def choose(self, bits: int | None, load: Mapping[str, Any]) -> Choice | None:
        """The sources in order, and the bits, for this machine; ``None`` where there is no choice.

        Args:
            bits: Bits that the user gave.
            load: Options of loading that the user gave.

        Raises:
            DoesNotFitError: The model does not fit into this machine's memory.
        """
        if not self.sources:
            return None
        from moechat.fetch.sources import USUAL_BITS, choose_source, speeds_by_bits

        try:
            speeds = speeds_by_bits(self.model, bits, load=load)
        except DoesNotFitError as error:
            raise DoesNotFitError(
                f"{self.model} does not fit here: {error}",
                hint=f"free memory, or choose a smaller model: moechat plan --list-models; "
                f"moechat download {self.model} --bits {USUAL_BITS} fetches it all the same",
                least_bytes=error.least_bytes,
            ) from error
        return choose_source(self.sources, speeds, bits=bits)


def find_offer(model: str, ref: ModelRef, say: Callable[[str], None]) -> Offer:
    """Ask the hub for the repositories of a name.

    Args:
        model: The name.
        ref: The model that it stands for.
        say: Receives notices.

    Raises:
        MoechatError: As :func:`moechat.fetch.repository.fetch_repository`.
    """
    repositories = sources_of(model)
    if not repositories:
        return Offer(model, ref, fetch_repository(str(ref.repository), ref.revision, say))
    from moechat.fetch.sources import list_sources

    remotes, problem = [], None
    for repository in repositories:
        try:
            remotes.append(fetch_repository(repository, None, say))
        except (ModelNotFoundError, NotAllowedError, CheckpointError) as error:
            problem = problem or error
            say(f"({repository} is left out: {error})")
    if not remotes:
        assert problem is not None
        raise problem
    found = [
        source
        for remote in remotes
        for source in list_sources(remote, original=remote.repository == repositories[0])
    ]
    return Offer(model, ref, remotes[0], tuple(found))


def open_download(
    offer: Offer,
    choice: Choice | None,
    bits: int | None,
    stack: ExitStack,
    *,
    keep_source: bool,
    notice: Callable[[str], None],
) -> tuple[Download, Choice | None]:
    """Plan the download of the first source that can be read and has room on the disk.

    Args:
        offer: What the hub offers.
        choice: The order of its sources, if there is a choice.
        bits: Bits of an expert weight that the user wants, where there is none; ``None``: see
            :func:`moechat.store.kept.choose_bits`.
        stack: Closes the download.
        keep_source: Keep the shards.
        notice: Receives messages.

    Returns:
        The download, and the choice with the sources that are left, the one taken first.

    Raises:
        MoechatError: No source can be used: the error of the first.
    """
    from moechat.fetch.download import prepare_download

    def prepare(ref: ModelRef, remote: RemoteRepository, bits: int | None) -> Download:
        return stack.enter_context(
            prepare_download(ref, remote, bits, user_paths(), keep_source=keep_source, notice=notice)
        )

    if choice is None:
        return prepare(offer.ref, offer.remote, bits), None
    problem: MoechatError | None = None
    full: tuple[Download, Choice] | None = None
    lossy: tuple[Download, Choice] | None = None
    unread: set[str] = set()  # repositories whose GGUF files have an architecture that is not read
    for number, source in enumerate(choice.sources):
        if source.variant is not None and source.remote.repository in unread:
            continue
        try:
            stays = choice.stays and source.may_stay
            work = prepare(source.ref, source.remote, None if stays else choice.bits)
        except (UnsupportedModelError, CheckpointError, NotAllowedError) as error:
            problem = problem or error
            notice(f"({source.name} is left out: {error})")
            if source.variant is not None and isinstance(error, UnsupportedModelError):
                unread.add(source.remote.repository)
            continue
        left = replace(choice, sources=choice.sources[number:])
        if stays and not source.original and not work.plan.geometry.kept:
            notice(f"({source.name} is left out: its experts would be quantised again)")
            lossy = lossy or (work, left)
            continue
        if work.plan.disk_bytes <= work.plan.free_bytes:
            return work, left
        full = full or (work, left)
    if lossy is not None or full is not None:
        found = lossy or full  # of the latter, running it says how much room is missing
        assert found is not None
        return found
    assert problem is not None
    raise problem
