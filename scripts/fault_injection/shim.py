"""The preloaded library that makes calls fail (shim.c), and the page of memory that sets its fault."""

from __future__ import annotations

import errno
import mmap
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

# In the order of shim.c.
GROUPS = (
    "open",
    "create",
    "read",
    "write",
    "sync",
    "rename",
    "mmap",
    "truncate",
    "link",
    "uring",
    "change",
)
MODES = ("once", "forever", "short", "wrong", "kill", "torn")
_HEAD = struct.Struct("IIIIiII")
_COUNTS = struct.Struct(f"{len(GROUPS)}I")
_UNDER, _UNDER_BYTES, _WHERE_BYTES = 4, 512, 1024
_BYTES = 8192
_COUNT, _FAIL = 1, 2


@dataclass(frozen=True)
class Fault:
    """One fault of one run.

    Attributes:
        group: Which calls; see ``GROUPS``.
        index: The call that fails, from 0.
        mode: See ``MODES``.
        error: Name of the errno of ``once`` and ``forever``; empty for the others.
    """

    group: str
    index: int
    mode: str
    error: str = ""

    def __str__(self) -> str:
        return ":".join([self.group, str(self.index), self.mode, *([self.error] if self.error else [])])

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read what ``str`` gives.

        Raises:
            ValueError: It is no fault.
        """
        group, index, mode, error = [*text.split(":"), ""][:4]
        if group not in GROUPS or mode not in MODES or (error and not hasattr(errno, error)):
            raise ValueError(f"{text!r} is no fault: GROUP:INDEX:MODE[:ERRNO]")
        return cls(group, int(index), mode, error)


def build_shim(directory: Path) -> Path:
    """Compile the library into a directory, with the compiler ``cc``; returns its path."""
    library = directory / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Control:
    """The shared page.

    Args:
        path: Its file; created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_BYTES))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _BYTES)

    def close(self) -> None:
        """Release the page."""
        self._page.close()

    def arm(self, under: list[Path], fault: Fault | None, *, uring: bool = True) -> None:
        """Count calls anew, in programs that start or run from now on.

        Args:
            under: At most four directories; calls on other files are left alone.
            fault: What fails; ``None`` only counts.
            uring: Whether the kernel has io_uring.
        """
        page = bytearray(_BYTES)
        values = (0, 0, 0, 0)
        if fault is not None:
            code = getattr(errno, fault.error) if fault.error else 0
            values = (GROUPS.index(fault.group), fault.index, MODES.index(fault.mode), code)
        _HEAD.pack_into(page, 0, _COUNT if fault is None else _FAIL, *values, int(not uring), 0)
        place = _HEAD.size + _COUNTS.size
        if len(under) > _UNDER:
            raise ValueError(f"{len(under)} directories; at most {_UNDER} can be watched")
        for number, directory in enumerate(under):
            name = str(directory).encode()
            if len(name) >= _UNDER_BYTES:
                raise ValueError(f"the path of {directory} is longer than {_UNDER_BYTES} bytes")
            begin = place + number * _UNDER_BYTES
            page[begin : begin + len(name)] = name
        self._page[:] = bytes(page)

    def disarm(self) -> None:
        """Neither count nor fail."""
        self._page[:4] = bytes(4)

    def counts(self) -> dict[str, int]:
        """Calls since :meth:`arm`, by group."""
        return dict(zip(GROUPS, _COUNTS.unpack_from(self._page, _HEAD.size), strict=True))

    def fired(self) -> int:
        """How many calls failed."""
        return int(_HEAD.unpack_from(self._page)[-1])

    def where(self) -> str:
        """The file of the first fault."""
        begin = _HEAD.size + _COUNTS.size + _UNDER * _UNDER_BYTES
        return bytes(self._page[begin : begin + _WHERE_BYTES]).split(b"\0")[0].decode(errors="replace")
