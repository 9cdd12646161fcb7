"""Which user is behind a local connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serve_support import PATIENCE_S, ServerProcess, serving

from moechat.serve.peer_user import is_same_user

LINUX = Path("/proc/net/tcp").exists()
NOBODY = 65534


@pytest.mark.parametrize(
    ("family", "host", "target"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
    ],
)
@pytest.mark.skipif(not LINUX, reason="the tables are Linux's")
def test_an_own_connection_is_recognised(family: int, host: str, target: str) -> None:
    try:
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening:
        port = listening.getsockname()[1]
        with socket.create_connection((target, port)) as client:
            accepted, _ = listening.accept()
            with accepted:
                mine = client.getsockname()[:2]
                assert is_same_user(mine, (target, port)) is True
                assert is_same_user((mine[0], mine[1]), (target, port + 1)) is False
    assert is_same_user(("nonsense", 1), ("127.0.0.1", 1)) is False


# The other user may not be able to read Python's library, so all of it is imported before.
CLIENT = """
import encodings.idna, http.client, os, sys
connections = [http.client.HTTPConnection("127.0.0.1", int(sys.argv[1])) for _ in range(4)]
os.setgid(%d); os.setuid(%d)
for connection, (method, path, body) in zip(connections, (
    ("GET", "/moechat/conversations", None),
    ("GET", "/moechat/conversations/1", None),
    ("DELETE", "/moechat/conversations/1", None),
    ("POST", "/moechat/conversations", b'{"turns": [{"question": "x", "answer": "y"}]}'),
)):
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
"""


@pytest.mark.skipif(not LINUX or os.geteuid() != 0, reason="only root can be somebody else")
def test_conversations_are_those_of_the_user_of_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "demo") as server:
        with server.client() as client:
            turn = {"question": "a secret", "answer": "kept"}
            made = client.post("/moechat/conversations", json={"turns": [turn]})
            assert made.status_code == 201
            assert "a secret" in client.get("/moechat/conversations").text
        done = subprocess.run(
            [sys.executable, "-c", CLIENT % (NOBODY, NOBODY), server.url.rpartition(":")[2]],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
            cwd="/",
        )
        listed, *refused = done.stdout.splitlines()
        assert listed.startswith("200")
        assert '"saved":false' in listed.replace(" ", "")
        assert [line[:3] for line in refused] == ["403"] * 3
        assert "a secret" not in done.stdout


def test_a_conversation_with_a_number_out_of_all_proportion_is_not_found(demo: ServerProcess) -> None:
    with demo.client() as client:
        for key in ("9" * 5000, "9" * 19, "-1", "1.5", "%00", "x"):
            assert client.get(f"/moechat/conversations/{key}").status_code == 404
