"""Downloads files of a repository: resumes them after interruptions, and checks them before renaming.

Bytes are appended to ``<name>.part``, which is renamed to ``<name>`` once size and hash match. Addresses,
headers and the connection come from huggingface_hub. The loop over the bytes is our own, because its file
download starts again in each process, which costs hours with shards of gigabytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from moechat.errors import DownloadError, OfflineError
from moechat.fetch.bounded import SLOWEST_BYTES_PER_S, pieces, requested
from moechat.fetch.hub_client import (
    endpoint,
    http_library,
    hub_constants,
    hub_headers,
)
from moechat.fetch.hub_errors import translate_hub_errors
from moechat.fetch.repository import RemoteFile, RemoteRepository
from moechat.fetch.retry import RetryPolicy
from moechat.fetch.stop_switch import StopSwitch
from moechat.store.range_sums import RangeSums

PART_SUFFIX = ".part"
_CHUNK = 1 << 20
_CONNECT_TIMEOUT_S = 15.0
# Longer than most headers of shards, so that one request fetches all of it.
_HEADER_GUESS_BYTES = 256 << 10
_MAX_HEADER_BYTES = 16 << 20

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Transfer:
    """Fetches files of one repository at its commit.

    Attributes:
        remote: The repository.
        advance: Receives the number of bytes that arrived or were present; negative for bytes to fetch again.
            May raise ``KeyboardInterrupt``.
        notice: Receives a message before each retry.
        stop: Stops the transfer from another thread.
        retry: When to retry failed requests.
    """

    remote: RemoteRepository
    advance: Advance
    notice: Callable[[str], None]
    stop: StopSwitch = field(default_factory=StopSwitch)
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def fetch(self, file: RemoteFile, destination: Path, sums: RangeSums | None = None) -> None:
        """Download a file, unless it is present, and check it.

        Args:
            file: The file.
            destination: Where it goes.
            sums: Gets exactly the bytes whose hash is right.

        Raises:
            DownloadError: Size or hash do not match; the bytes are discarded.
            ModelNotFoundError: The file does not exist any more.
            NotAllowedError: The hub denies access.
            OfflineError: All retries failed; the bytes so far are kept.
            OSError: The file cannot be written.
            TransferStopped: ``stop`` was used; the bytes so far are kept.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        if is_whole(destination, file, self.stop.check, sums):
            self.advance(file.size)
            return
        part = destination.with_name(destination.name + PART_SUFFIX)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(part, flags, 0o644), "r+b") as target:
            download = _Download(self, file, target, sums)
            resumed = download.resume()
            download.complete()
            found = download.hash()
            if found != file.identity and resumed:
                # The bytes of an earlier run may be damaged, for example by a power failure.
                self.notice(f"{file.path} does not match its hash; it is downloaded again")
                download.restart()
                download.complete()
                found = download.hash()
            if found != file.identity:
                download.restart()
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
            DownloadError: It is not a safetensors file.
            MoechatError: As :meth:`fetch`.
        """
        data = self.read_range(file, 0, min(_HEADER_GUESS_BYTES, file.size))
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(_MAX_HEADER_BYTES, file.size - 8):
            raise DownloadError(
                f"{file.path} of {self.remote.repository} is no safetensors file: its header claims "
                f"{length} bytes, it has {file.size}"
            )
        if len(data) < 8 + length:
            data += self.read_range(file, len(data), 8 + length)
        return data[: 8 + length]

    def read_range(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)`` of a file, unchecked. Servers that ignore ranges are supported.

        Raises:
            DownloadError: The file is too short.
            MoechatError: As :meth:`fetch`.
        """
        chunks: list[bytes] = []
        missing = end - begin

        def read(response: Any) -> None:
            nonlocal missing
            chunks.clear()
            missing = end - begin
            skip = 0 if response.status_code == 206 else begin
            for data in pieces(response):
                self.retry.record_progress()
                kept = data[skip:][:missing]
                skip = max(0, skip - len(data))
                chunks.append(kept)
                missing -= len(kept)
                if missing <= 0:
                    return

        _Requests(self, file).run(lambda: {"Range": f"bytes={begin}-{end - 1}"}, read, lambda: 0)
        data = b"".join(chunks)
        if len(data) != end - begin:
            raise DownloadError(f"{file.path}: {len(data)} bytes arrived instead of {end - begin}")
        return data


class _Requests:
    """Requests for one file, repeated according to the retry policy."""

    def __init__(self, transfer: Transfer, file: RemoteFile) -> None:
        self._transfer = transfer
        self._file = file

    def run(
        self, headers: Callable[[], dict[str, str]], read: Callable[[Any], None], done: Callable[[], int]
    ) -> None:
        """Send requests until one succeeds.

        Args:
            headers: Returns the headers of the next request.
            read: Reads a response; returns when it has all the bytes it needs.
            done: Returns the number of bytes so far; failures are counted only while it does not grow, or
                more slowly than :data:`SLOWEST_BYTES_PER_S`.
        """
        library = http_library()
        failures, before, since = self._transfer.retry.start_file(), done(), time.monotonic()
        while True:
            try:
                with translate_hub_errors(self._transfer.remote.repository, self._transfer.remote.revision):
                    try:
                        self._send(headers(), read)
                        return
                    except library.HTTPError as problem:
                        self._transfer.stop.check()  # stopping closes the connection
                        now = time.monotonic()
                        if done() - before > SLOWEST_BYTES_PER_S * (now - since):
                            failures.reset()
                            before, since = done(), now
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

    def _send(self, more: dict[str, str], read: Callable[[Any], None]) -> None:
        from huggingface_hub import hf_hub_url

        remote = self._transfer.remote
        url = hf_hub_url(remote.repository, self._file.path, revision=remote.commit, endpoint=endpoint())
        headers = {**hub_headers(), **more}
        timeout = http_library().Timeout(hub_constants().HF_HUB_DOWNLOAD_TIMEOUT, connect=_CONNECT_TIMEOUT_S)
        stop = self._transfer.stop
        with requested(url, headers=headers, timeout=timeout, stop=stop) as response:
            stop.check()
            read(response)


def _reason(problem: Any) -> str:
    response = getattr(problem, "response", None)
    if response is not None:
        return f"the hub answers with status {response.status_code}"
    if isinstance(problem, http_library().TimeoutException):
        return "no more data arrives"
    return "the connection was lost"


class _Download:
    """The download of one file into an open file.

    Invariant: the file holds ``_done`` bytes, and ``_digest`` is the hash of exactly these, which ``_sums``
    has been given.
    """

    def __init__(
        self, transfer: Transfer, file: RemoteFile, target: BinaryIO, sums: RangeSums | None = None
    ) -> None:
        self._sums = RangeSums() if sums is None else sums
        self._sums.restart()
        self._transfer = transfer
        self._file = file
        self._target = target
        self._done = 0
        self._digest = _new_digest(file)

    def resume(self) -> bool:
        """Count and hash the bytes of an earlier run; returns whether there are any."""
        if os.fstat(self._target.fileno()).st_size > self._file.size:
            self.restart()
            return False
        self._target.seek(0)
        while data := self._target.read(_CHUNK):
            self._transfer.stop.check()
            self._count(data)
        return self._done > 0

    def restart(self) -> None:
        """Discard all bytes."""
        self._target.seek(0)
        self._target.truncate()
        self._transfer.advance(-self._done)
        self._done = 0
        self._digest = _new_digest(self._file)
        self._sums.restart()

    def hash(self) -> str:
        """The hash of the bytes so far, in the form of :attr:`RemoteFile.identity`."""
        return str(self._digest.hexdigest())

    def complete(self) -> None:
        """Fetch the missing bytes."""
        if self._done < self._file.size:
            _Requests(self._transfer, self._file).run(self._range, self._read, lambda: self._done)

    def _range(self) -> dict[str, str]:
        return {"Range": f"bytes={self._done}-"} if self._done else {}

    def _read(self, response: Any) -> None:
        start = self._done if self._is_continuation(response) else 0
        length = response.headers.get("content-length", "")
        if length.isdecimal() and start + int(length) != self._file.size:
            # Perhaps a login page; the bytes so far are not affected and stay.
            raise self._wrong_size(start + int(length))
        if self._done > start:
            self.restart()  # the server sends the whole file
        # Written piece by piece: bytes gathered in a buffer would be lost with the connection.
        try:
            for data in pieces(response):
                self._transfer.stop.check()
                self._transfer.retry.record_progress()
                size = self._done + len(data)
                if size > self._file.size:
                    self.restart()
                    raise self._wrong_size(size)
                self._target.write(data)
                self._count(data)
        finally:
            self._target.flush()  # a thread that is abandoned in a later retry then has nothing left to write
        if self._done < self._file.size:
            raise http_library().RemoteProtocolError("the file ended early")

    def _is_continuation(self, response: Any) -> bool:
        if response.status_code != 206:
            return False
        return str(response.headers.get("content-range", "")).startswith(f"bytes {self._done}-")

    def _wrong_size(self, size: int) -> DownloadError:
        return DownloadError(
            f"{self._file.path} has at least {size} bytes on the server, the hub says {self._file.size}",
            hint="run the same command again; if it stays so, a network that requires a login in a browser, "
            "a proxy, or the repository is at fault",
        )

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._sums.add(data)
        self._done += len(data)
        self._transfer.advance(len(data))


def _new_digest(file: RemoteFile) -> Any:
    if file.sha256:
        return hashlib.sha256()
    digest = hashlib.sha1(usedforsecurity=False)  # git's blob hash
    digest.update(b"blob %d\0" % file.size)
    return digest


def is_whole(
    path: Path,
    file: RemoteFile,
    check: Callable[[], None] = lambda: None,
    sums: RangeSums | None = None,
) -> bool:
    """Whether a file is present with the size and hash of the hub's.

    Args:
        path: Where it lies.
        file: The hub's.
        check: Called regularly.
        sums: Gets its bytes.
    """
    sums = RangeSums() if sums is None else sums
    sums.restart()
    try:
        if path.stat().st_size != file.size:
            return False
        digest = _new_digest(file)
        with open(path, "rb", buffering=0) as source:
            while data := source.read(_CHUNK):
                check()
                digest.update(data)
                sums.add(data)
    except OSError:
        return False
    return str(digest.hexdigest()) == file.identity
