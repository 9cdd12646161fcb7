"""``moechat ps`` and ``moechat stop``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serve_support import PATIENCE_S

from moechat.cli.commands.servers import shown_model


def start(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    log = home / f"{time.monotonic_ns()}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moechat", "serve", *arguments, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stderr=file,
            env={**os.environ, "MOECHAT_HOME": str(home)},
        )
    while b"listening" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return process


def call(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moechat", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "MOECHAT_HOME": str(home)},
    )


def listed(home: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(call(home, "ps", "--json").stdout)
    return found


def test_servers_are_listed_and_ended(tmp_path: Path) -> None:
    none = call(tmp_path, "ps")
    assert (none.returncode, none.stdout) == (0, "")
    assert call(tmp_path, "stop").returncode == 2
    first, second = start(tmp_path, "demo"), start(tmp_path)
    try:
        rows = listed(tmp_path)
        assert [row["pid"] for row in rows] == [first.pid, second.pid]
        assert [row["model"] for row in rows] == ["demo", None]
        plain = call(tmp_path, "ps").stdout
        assert str(rows[0]["url"]) in plain
        assert "no model loaded" in plain
        assert "0 being answered, 0 waiting" in plain
        several = call(tmp_path, "stop")
        assert several.returncode == 2
        assert str(first.pid) in several.stderr
        assert call(tmp_path, "stop", "1").returncode == 2
        assert call(tmp_path, "stop", str(second.pid), "--all").returncode == 2
        assert call(tmp_path, "stop", str(second.pid)).returncode == 0
        assert second.wait(PATIENCE_S) == 143
        assert [row["pid"] for row in listed(tmp_path)] == [first.pid]
        assert call(tmp_path, "stop", "-q").returncode == 0
        assert first.wait(PATIENCE_S) == 143
        assert listed(tmp_path) == []
    finally:
        first.kill()
        second.kill()


def test_a_model_that_was_unloaded_is_not_shown_as_loaded(tmp_path: Path) -> None:
    server = start(tmp_path, "demo", "--keep-alive", "0.02")
    try:
        for wanted in ("demo", None):
            ends = time.monotonic() + PATIENCE_S
            while listed(tmp_path)[0]["loaded"] != wanted:
                assert time.monotonic() < ends
        assert "  demo (not loaded)  " in call(tmp_path, "ps").stdout
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("named", "told", "shown"),
    [
        ("demo", {}, "demo"),
        ("", {}, "no model loaded"),
        ("", {"model": "a", "loading": None}, "a"),
        ("demo", {"model": None, "loading": None}, "demo (not loaded)"),
        ("", {"model": None, "loading": {"model": "a"}}, "a (is being loaded)"),
    ],
)
def test_the_model_of_a_server_is_shown_with_its_state(named: str, told: dict[str, Any], shown: str) -> None:
    assert shown_model(named, told) == shown


def test_a_server_that_was_killed_is_forgotten_and_no_other_process_is_ended(tmp_path: Path) -> None:
    server = start(tmp_path, "demo")
    server.send_signal(signal.SIGKILL)
    server.wait()
    directory = next(tmp_path.rglob("servers"))
    left = {path.name for path in directory.iterdir()}
    assert left == {f"{server.pid}.json", f"{server.pid}.sock"}
    # A file that names a process that is no server, such as this one, and others that are no such files.
    (directory / "1.json").write_text(json.dumps({"pid": os.getpid(), "url": "x", "model": "", "started": 1}))
    (directory / "2.json").write_bytes(b"\xff")
    (directory / "3.json").write_text("[]")
    (directory / "4.json").symlink_to("/etc/passwd")
    assert call(tmp_path, "stop", "--all").returncode == 2
    assert list(directory.iterdir()) == []
