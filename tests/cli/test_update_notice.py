"""The notice of a newer version: off by default, once a day, never in the way of a command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pexpect
import pytest
from cli_support import Cli
from local_server import serving_with

from moechat import __version__
from moechat.cli import update_notice
from moechat.cli.update_notice import announce, look


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A home of its own; the processes that would be started, by the file that they write."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("MOECHAT_UPDATE_CHECK", raising=False)
    found: list[Path] = []
    monkeypatch.setattr(update_notice, "_start", found.append)
    return found


def switch_on(home: Path, value: str = "true") -> None:
    path = home / "config" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"update-check = {value}\n")


@contextmanager
def index(*versions: str, status: int = 200, delay_s: float = 0.0) -> Iterator[None]:
    """A package index with these releases, to which pip is set."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(delay_s)
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            files = [f"moechat-{version}-py3-none-any.whl" for version in versions]
            links = "".join(f'<a href="{file}">{file}</a>' for file in files)
            self.wfile.write(f"<!DOCTYPE html><html><body>{links}</body></html>".encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving_with(Server) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", f"{url}/simple")
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        yield


def test_it_is_off_by_default_and_offline(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce()
    switch_on(tmp_path / "home", "false")
    announce()
    switch_on(tmp_path / "home", "1")  # not a switch
    announce()
    switch_on(tmp_path / "home")
    for name, value in (("MOECHAT_UPDATE_CHECK", "0"), ("HF_HUB_OFFLINE", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            announce()
    assert started == []
    assert not (tmp_path / "home" / "cache").exists()
    announce()
    assert len(started) == 1


def test_the_index_is_asked_once_a_day(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_on(tmp_path / "home")
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for elapsed, count in ((0, 1), (10, 1), (86_000, 1), (86_401, 2), (86_500, 2), (-5, 3)):
        now[0] = 1_000_000.0 + elapsed
        announce()
        assert len(started) == count


def test_a_newer_version_is_shown_once(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("moechat.cli.terminal.consoles.print_notice", shown.append)
    switch_on(tmp_path / "home")
    announce()
    (path,) = started
    for version, count in ((__version__, 0), ("0.0.9", 0), ("99.0", 1), ("99.0", 1), ("99.0.1", 2)):
        with index("0.0.1", version):
            look(path)
        announce()
        announce()
        assert len(shown) == count, version
    assert "moechat 99.0 is there" in shown[0]
    assert "config unset update-check" in shown[0]


@pytest.mark.parametrize("versions", [(), ("2.0rc1",), ("1.0; rm",)])
def test_what_is_no_release_is_not_kept(versions: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "update.json"
    with index(*versions), pytest.raises((ValueError, subprocess.CalledProcessError)):
        look(path)
    assert not path.exists()


def test_an_index_that_fails_or_is_slow_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "update.json"
    with index("9", status=503), pytest.raises(subprocess.CalledProcessError):
        look(path)
    monkeypatch.setattr(update_notice, "_TIMEOUT_S", 0.5)
    with index("9", delay_s=2.0), pytest.raises(subprocess.TimeoutExpired):
        look(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "state", ["", "[]", "{", '{"asked": "x"}', '{"latest": 3}', '{"latest": "\\u001b[2J"}']
)
def test_a_broken_file_fails_no_command(
    state: str, started: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    switch_on(tmp_path / "home")
    path = tmp_path / "home" / "cache" / "update.json"
    path.parent.mkdir(parents=True)
    path.write_text(state)
    announce()
    assert capsys.readouterr().err == ""
    assert started == [path]
    (tmp_path / "home" / "config" / "config.toml").write_text("what is this")
    announce()


def test_a_command_does_not_wait_for_the_process_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Path]
) -> None:
    monkeypatch.undo()
    with index("99.0", delay_s=1.0):
        path = tmp_path / "cache" / "update.json"
        path.parent.mkdir()
        begun = time.monotonic()
        update_notice._start(path)
        assert time.monotonic() - begun < 0.9
        for _ in range(600):
            if path.exists():
                break
            time.sleep(0.05)
    assert json.loads(path.read_text()) == {"latest": "99.0", "shown": False}


def test_it_is_for_terminals_alone(cli: Cli, tmp_path: Path) -> None:
    own = Cli(cli.directory, tmp_path / "home", {"HF_HUB_OFFLINE": "", "TERM": "dumb"})
    switch_on(own.home)
    newest = own.home / "cache" / "update.json"
    newest.parent.mkdir(parents=True)
    newest.write_text(json.dumps({"latest": "99.0", "asked": time.time()}))
    assert "99.0" not in own.run("list").err
    chat = own.terminal("list")
    chat.expect("moechat 99.0 is there")
    chat.expect(pexpect.EOF)
    assert json.loads(newest.read_text())["shown"] is True


def test_the_setting_is_one_of_the_program(cli: Cli, tmp_path: Path) -> None:
    own = Cli(cli.directory, tmp_path / "home", {})
    assert own.call("config", "get", "update-check").out == b"false\n"
    assert own.call("config", "set", "update-check", "true").status == 0
    assert own.call("config", "get", "update-check").out == b"true\n"
    assert own.call("list").status == 0
    wrong = own.call("config", "set", "update-check", "daily")
    assert (wrong.status, "it must be true or false" in wrong.err) == (2, True)
    switch_on(own.home, "'yes'")
    assert "update-check = 'yes'; it must be true or false" in own.call("list").err
