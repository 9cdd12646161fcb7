"""Asks a fork server (see ``fork_server.py``) to start the program: SOCKET ARGUMENTS...

As a command it takes the place of the program in a shell. It needs only the standard library and starts in
some 30 ms.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any


def request_start(path: str, request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Send a start to the server at a socket.

    Args:
        request: As ``fork_server.py`` reads it, and ``wait``: answer with the
            status when the program has ended.
        descriptors: Standard input, output and error; -1 for one that is closed.

    Returns:
        Process id or status of the program.
    """
    data = json.dumps({**request, "open": [one >= 0 for one in descriptors]}).encode()
    rights = array.array("i", [one for one in descriptors if one >= 0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(len(data).to_bytes(4, "little"))
        sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        connection.sendall(data[sent:])
        answer = connection.recv(64)
    if not answer:
        raise RuntimeError("the fork server started nothing")
    return int(answer)


def start_from_shell(path: str, arguments: list[str]) -> int:
    """Start the program with the descriptors, variables and directory of this process, and wait for it."""

    def is_open(descriptor: int) -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return False
        return True

    request = {
        "arguments": arguments,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "new_session": False,
        "terminal": False,
        "wait": True,
    }
    status = request_start(path, request, [one if is_open(one) else -1 for one in (0, 1, 2)])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(start_from_shell(sys.argv[1], sys.argv[2:]))
