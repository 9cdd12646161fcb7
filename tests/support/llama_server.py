"""Runs llama.cpp's server over a GGUF file until its standard input ends; prints its address."""

from __future__ import annotations

import socket
import sys


def main(path: str) -> None:
    """Serve a file.

    Args:
        path: The GGUF file.
    """
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = 1024
    parameters.warmup = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        parameters.port = free.getsockname()[1]
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
