"""Files of a repository brought here: continued where they stopped, and checked before they get their name.

``<name>.part`` grows; once its size and its hash are what the hub says it becomes ``<name>``. huggingface_hub
makes addresses, headers and the connection; its own file download begins anew in each process, which costs
hours where shards have gigabytes, so the loop over the bytes is ours.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from moechat.errors import DownloadError, OfflineError
from moechat.hub.failures import (
    endpoint,
    explained,
    http_library,
    hub_constants,
    hub_headers,
    hub_utilities,
    session,
)
from moechat.hub.patience import Patience
from moechat.hub.remote import RemoteFile, RemoteRepository
from moechat.hub.stop import StopSwitch

PART_SUFFIX = ".part"
_CHUNK = 1 << 20
_CONNECT_WITHIN_S = 15.0
# A header of a shard is mostly shorter; one request then gives all of it.
_HEADER_GUESS = 256 << 10
_MAX_HEADER = 16 << 20

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Transfer:
    """Fetches files of one repository at its commit.

    Attributes:
        remote: The repository.
        advance: Called with the number of bytes that have come (or were here already); negative when some
            have to come again. It may raise ``KeyboardInterrupt``.
        notice: Called with a line for people when a connection is lost and tried again.
        stop: Ends it from another thread, with :class:`moechat.hub.stop.Stopped`.
        patience: With a hub that fails.
    """

    remote: RemoteRepository
    advance: Advance
    notice: Callable[[str], None]
    stop: StopSwitch = field(default_factory=StopSwitch)
    patience: Patience = field(default_factory=Patience)

    def fetch(self, file: RemoteFile, destination: Path) -> None:
        """Bring a file here, unless it is, and check it.

        Raises:
            DownloadError: What comes is not what the hub promised; nothing of it is kept.
            ModelNotFoundError: The file is gone.
            NotAllowedError: The hub does not give it to us.
            OfflineError: The connection fails for good; what has come is kept.
            OSError: It cannot be written.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        if is_whole(destination, file, self.stop.check):
            self.advance(file.size)
            return
        part = destination.with_name(destination.name + PART_SUFFIX)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(part, flags, 0o644), "r+b") as target:
            download = _Download(self, file, target)
            continued = download.take_what_is_here()
            download.complete()
            found = download.hash()
            if found != file.identity and continued:
                # The beginning came in another run, and power may have failed since: once more, all of it.
                self.notice(f"{file.path} does not fit its hash; it is downloaded again")
                download.begin_anew()
                download.complete()
                found = download.hash()
            if found != file.identity:
                download.begin_anew()
                kind = "SHA-256" if file.sha256 else "git hash"
                raise DownloadError(
                    f"{file.path} ({file.size} bytes) was altered on its way: its {kind} is {found[:12]}…, "
                    f"the hub says {file.identity[:12]}…",
                    hint="run the same command again; if it stays so, a proxy or the repository is at fault",
                )
            os.fsync(target.fileno())
        self.stop.check()
        os.replace(part, destination)

    def read_header(self, file: RemoteFile) -> bytes:
        """The first bytes of a safetensors file: the length of its header, and the header.

        Raises:
            DownloadError: It is no such file.
            MoechatError: As :meth:`fetch`.
        """
        data = self.read_range(file, 0, min(_HEADER_GUESS, file.size))
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(_MAX_HEADER, file.size - 8):
            raise DownloadError(
                f"{file.path} of {self.remote.repository} is no safetensors file: its header claims "
                f"{length} bytes, it has {file.size}"
            )
        if len(data) < 8 + length:
            data += self.read_range(file, len(data), 8 + length)
        return data[: 8 + length]

    def read_range(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)`` of a file, not checked; a server that ignores the range is cut off.

        Raises:
            DownloadError: Fewer came.
            MoechatError: As :meth:`fetch`.
        """
        chunks: list[bytes] = []
        missing = end - begin

        def take(response: Any) -> None:
            nonlocal missing
            chunks.clear()
            missing = end - begin
            skip = 0 if response.status_code == 206 else begin
            for data in response.iter_bytes():
                self.patience.came()
                kept = data[skip:][:missing]
                skip = max(0, skip - len(data))
                chunks.append(kept)
                missing -= len(kept)
                if missing <= 0:
                    return

        _Attempts(self, file).run(lambda: {"Range": f"bytes={begin}-{end - 1}"}, take, lambda: 0)
        data = b"".join(chunks)
        if len(data) != end - begin:
            raise DownloadError(f"{file.path}: {len(data)} bytes came instead of {end - begin}")
        return data


class _Attempts:
    """Asks for a file until it has come, as long as something comes."""

    def __init__(self, transfer: Transfer, file: RemoteFile) -> None:
        self._transfer = transfer
        self._file = file

    def run(
        self, headers: Callable[[], dict[str, str]], take: Callable[[Any], None], done: Callable[[], int]
    ) -> None:
        """Request, and request again after failures that may pass.

        Args:
            headers: Of the next request.
            take: Reads a response; it returns when it has all it wanted.
            done: Bytes that are here; tries count only while it does not grow.
        """
        library = http_library()
        failures, before = self._transfer.patience.begin(), done()
        while True:
            try:
                with explained(self._transfer.remote.repository, self._transfer.remote.revision):
                    try:
                        self._once(headers(), take)
                        return
                    except library.HTTPError as problem:
                        self._transfer.stop.check()  # it may be why the connection has ended
                        if done() > before:
                            failures.forget()
                            before = done()
                        pause = failures.pause(problem)
                        if pause is None:
                            raise
                        self._transfer.notice(
                            f"{self._file.path}: {_reason(problem)}; trying again in {pause:.3g} s"
                        )
            except OfflineError as error:
                kept = done()
                if kept:
                    error.args = (f"{error.args[0]}; {kept:,} of {self._file.size:,} bytes are here",)
                raise
            self._transfer.stop.sleep(pause)

    def _once(self, more: dict[str, str], take: Callable[[Any], None]) -> None:
        from huggingface_hub import hf_hub_url

        utilities = hub_utilities()
        remote = self._transfer.remote
        url = hf_hub_url(remote.repository, self._file.path, revision=remote.commit, endpoint=endpoint())
        # Compressed, the bytes could not be counted, nor a download continued.
        headers = {
            **hub_headers(),
            "Accept-Encoding": "identity",
            **more,
        }
        # The client leaves the token out where it is redirected to another host.
        timeout = http_library().Timeout(hub_constants().HF_HUB_DOWNLOAD_TIMEOUT, connect=_CONNECT_WITHIN_S)
        stop = self._transfer.stop
        stop.check()
        with session().stream(
            "GET", url, headers=headers, timeout=timeout, extensions={"trace": stop.trace}
        ) as response:
            for answer in (*response.history, response):  # their connections may have been there before
                stop.watch(answer.extensions.get("network_stream"))
            if response.status_code >= 400:
                response.read()
            utilities.hf_raise_for_status(response)
            stop.check()
            take(response)


def _reason(problem: Any) -> str:
    response = getattr(problem, "response", None)
    if response is not None:
        return f"the hub answers with status {response.status_code}"
    if isinstance(problem, http_library().TimeoutException):
        return "nothing comes any more"
    return "the connection was lost"


class _Download:
    """One file on its way into an open file.

    Invariant: ``_done`` bytes lie in the file, and ``_digest`` has seen exactly those.
    """

    def __init__(self, transfer: Transfer, file: RemoteFile, target: BinaryIO) -> None:
        self._transfer = transfer
        self._file = file
        self._target = target
        self._done = 0
        self._digest = _new_digest(file)

    def take_what_is_here(self) -> bool:
        """Continue what an earlier run left; returns whether there was anything."""
        if os.fstat(self._target.fileno()).st_size > self._file.size:
            self.begin_anew()
            return False
        self._target.seek(0)
        while data := self._target.read(_CHUNK):
            self._transfer.stop.check()
            self._count(data)
        return self._done > 0

    def begin_anew(self) -> None:
        self._target.seek(0)
        self._target.truncate()
        self._transfer.advance(-self._done)
        self._done = 0
        self._digest = _new_digest(self._file)

    def hash(self) -> str:
        return str(self._digest.hexdigest())

    def complete(self) -> None:
        """Fetch what is missing."""
        if self._done < self._file.size:
            _Attempts(self._transfer, self._file).run(self._range, self._take, lambda: self._done)

    def _range(self) -> dict[str, str]:
        return {"Range": f"bytes={self._done}-"} if self._done else {}

    def _take(self, response: Any) -> None:
        begun = self._done if self._continues(response) else 0
        announced = response.headers.get("content-length", "")
        plain = response.headers.get("content-encoding", "identity") == "identity"
        if plain and announced.isdecimal() and begun + int(announced) != self._file.size:
            # A page to log in at, perhaps; what has come is no worse for it, and stays.
            raise self._wrong_size(begun + int(announced))
        if self._done > begun:
            self.begin_anew()  # the server sends all of it
        # As they come: gathered into larger pieces, those of a connection that is lost would be lost too.
        try:
            for data in response.iter_bytes():
                self._transfer.stop.check()
                self._transfer.patience.came()
                size = self._done + len(data)
                if size > self._file.size:
                    self.begin_anew()
                    raise self._wrong_size(size)
                self._target.write(data)
                self._count(data)
        finally:
            self._target.flush()  # nothing is left to be written by a thread that then waits to connect again
        if self._done < self._file.size:
            raise http_library().RemoteProtocolError("the file ended early")

    def _continues(self, response: Any) -> bool:
        if response.status_code != 206:
            return False
        return str(response.headers.get("content-range", "")).startswith(f"bytes {self._done}-")

    def _wrong_size(self, size: int) -> DownloadError:
        return DownloadError(
            f"{self._file.path} has {size} bytes or more where it comes from, the hub says {self._file.size}",
            hint="run the same command again; if it stays so, a network that wants you to log in with a "
            "browser, a proxy, or the repository is at fault",
        )

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._done += len(data)
        self._transfer.advance(len(data))


def _new_digest(file: RemoteFile) -> Any:
    if file.sha256:
        return hashlib.sha256()
    digest = hashlib.sha1(usedforsecurity=False)  # what git names its content by
    digest.update(b"blob %d\0" % file.size)
    return digest


def is_whole(path: Path, file: RemoteFile, check: Callable[[], None] = lambda: None) -> bool:
    """Whether the file is here and is the one that the hub has; ``check`` is called now and then."""
    try:
        if path.stat().st_size != file.size:
            return False
        digest = _new_digest(file)
        with open(path, "rb", buffering=0) as source:
            while data := source.read(_CHUNK):
                check()
                digest.update(data)
    except OSError:
        return False
    return str(digest.hexdigest()) == file.identity
