"""Which user of this machine is behind a local connection."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

# Columns of the kernel's tables of TCP sockets.
_LOCAL, _REMOTE, _USER = 1, 2, 7
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_MAPPED = "0000000000000000FFFF0000"


def is_same_user(client: tuple[str, int], server: tuple[str, int]) -> bool | None:
    """Whether the program at the other end of a connection runs as this process's user.

    Args:
        client: Its address and port.
        server: The address and port that it connected to.

    Returns:
        ``None`` where that cannot be told: on systems other than Linux.
    """
    ends = {(mine, theirs) for mine in _forms(*client) for theirs in _forms(*server)}
    readable = False
    for table in _TABLES:
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        readable = True
        for line in lines:
            fields = line.split()
            if len(fields) > _USER and (fields[_LOCAL], fields[_REMOTE]) in ends:
                return int(fields[_USER]) == os.geteuid()
    return False if readable else None


def _forms(host: str, port: int) -> list[str]:
    """An address and port as the tables have them: words of 32 bits as the machine orders them, in hex."""
    try:
        packed = ipaddress.ip_address(host).packed
    except ValueError:
        return []
    words = [packed[begin : begin + 4][::-1] for begin in range(0, len(packed), 4)]
    text = b"".join(words).hex().upper()
    # An IPv4 connection may be that of an IPv6 socket.
    return [f"{form}:{port:04X}" for form in ([text, _MAPPED + text] if len(packed) == 4 else [text])]
