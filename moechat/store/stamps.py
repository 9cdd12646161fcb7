"""The record of when each file of a store was verified, kept in the user's state directory.

For each file it has what `stat` said then, the time, and for files of experts a checksum of every block
record, with which the link compares records when it reads them. They were computed from bytes whose SHA-256
had just been found right. So stores of all versions have them, in any place, and none is made again.

A file is current while its status is as it was. It is due again :data:`EXPIRES_S` later, because media can
change bytes without any trace in the status. The record may be deleted at any time; then files are verified
at the next start. Records of earlier versions have no checksums and no times: they count as old.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import MoechatError
from moechat.store.files import write_durably

EXPIRES_S = 30 * 86400.0
_MOST_BYTES = 64 << 20
Status = tuple[int, ...]


def status_of(status: os.stat_result) -> Status:
    """Size, mtime, ctime and inode."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@dataclass(frozen=True)
class VerifiedFile:
    """One file, as it was when it was verified.

    Attributes:
        status: See :func:`status_of`.
        sha256: Its hash, hexadecimal; empty in records of earlier versions.
        at: When, in seconds since 1970.
        checksums: uint32 ``[records]`` of a file of experts; ``None`` for others, and if not known.
    """

    status: Status
    sha256: str
    at: float
    checksums: NDArray[np.uint32] | None = None

    def is_recent(self, seconds: float) -> bool:
        """Whether it was verified in the last ``seconds``; a time in the future does not count."""
        return 0 <= time.time() - self.at <= seconds


@dataclass(frozen=True)
class VerificationRecord:
    """What is known of the files of one store.

    Attributes:
        manifest: SHA-256 of the manifest in use.
        files: By name; the manifest too.
    """

    manifest: str
    files: Mapping[str, VerifiedFile]

    @classmethod
    def read(cls, path: Path) -> VerificationRecord | None:
        """Read a record; ``None`` if there is none, or it is damaged."""
        try:
            status = path.stat()
            if status.st_size > _MOST_BYTES:
                return None
            content = json.loads(path.read_bytes())
            if "checksum" not in content:  # of earlier versions
                files = {
                    name: VerifiedFile(_status(entry), "", status.st_mtime)
                    for name, entry in content["files"].items()
                }
            else:
                if content.pop("checksum") != _digest(content):
                    return None
                files = {name: _entry(entry) for name, entry in content["files"].items()}
            return cls(str(content["manifest"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, path: Path) -> None:
        """Write the record. Where that fails, every start verifies again; nothing else is lost."""
        files: dict[str, dict[str, Any]] = {}
        for name, file in self.files.items():
            files[name] = {"status": list(file.status), "sha256": file.sha256, "at": file.at}
            if file.checksums is not None:
                little = file.checksums.astype("<u4").tobytes()
                files[name]["crc32c"] = base64.b64encode(little).decode("ascii")
        content: dict[str, Any] = {"manifest": self.manifest, "files": files}
        content["checksum"] = _digest(content)
        with suppress(OSError, MoechatError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(content, sort_keys=True).encode())


def record_path(store: Path, state_dir: Path) -> Path:
    """The record of the store in a directory."""
    name = hashlib.sha256(os.fsencode(store.resolve())).hexdigest()[:32]
    return Path(state_dir) / "verified" / f"{name}.json"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _status(entry: Any) -> Status:
    if not isinstance(entry, list) or not all(type(value) is int for value in entry):
        raise ValueError("a status is malformed")
    return tuple(entry)


def _entry(entry: Mapping[str, Any]) -> VerifiedFile:
    checksums = None
    if "crc32c" in entry:
        try:
            data = base64.b64decode(entry["crc32c"], validate=True)
        except binascii.Error as problem:
            raise ValueError("checksums are malformed") from problem
        checksums = np.frombuffer(data, "<u4").astype(np.uint32)
    return VerifiedFile(_status(entry["status"]), str(entry["sha256"]), float(entry["at"]), checksums)
