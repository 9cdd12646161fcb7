"""Completion in a real bash on a terminal: what a line becomes with Tab, and what Enter then does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from cli_support import PROGRAM, Cli

_SHOWN = re.compile(r"<<(.*?)>>")


class Bash:
    """An interactive bash that completes ``moechat``."""

    def __init__(self, cli: Cli, script: Path) -> None:
        self._session: pexpect.spawn[str] = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile", "-i"],
            cwd=str(cli.directory),
            env={**cli.environment, "PS1": "ready$ ", "PATH": f"{script.parent}:{cli.environment['PATH']}"},  # type: ignore[arg-type]
            encoding="utf-8",
            timeout=60,
            dimensions=(40, 300),
        )
        self._session.setecho(False)
        self.enter("bind 'set enable-bracketed-paste off'; bind 'set bell-style none'")
        # Ctrl-G says what the line has become.
        self.enter('bind -x \'"\\C-g": printf "<<%s>>" "$READLINE_LINE"\'')
        self.enter(f"source {shlex.quote(str(script))}")

    def enter(self, line: str) -> None:
        """A line, and until it is done."""
        self._session.sendline(f"{line}; echo do''ne")
        self._session.expect_exact("done")

    def completed(self, line: str) -> str:
        """What a line becomes with Tab; the line is then left."""
        self._session.send(f"{line}\t\x07")
        self._session.expect(_SHOWN)
        match = self._session.match
        assert isinstance(match, re.Match)
        self._session.send("\x05\x15")  # to its end, and delete it
        return str(match[1])

    def close(self) -> None:
        self._session.close(force=True)


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """In a directory with a home of its own."""
    work = tmp_path / "work"
    work.mkdir()
    return replace(cli, directory=work, home=tmp_path / "home")


def store(cli: Cli, directory: str, name: str, commit: str = "0123456789abcdef") -> None:
    place = cli.home / "data" / "models" / directory
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(
        f'{{"source": {{"name": "{name}", "revision": "{commit}"}}, "model_type": "olmoe", '
        '"geometry": {"bits": 4}, "files": {}}'
    )


@pytest.fixture
def bash(cli: Cli, tmp_path: Path) -> Iterator[Bash]:
    place = tmp_path / "bin"
    place.mkdir()
    program = place / "moechat"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    script = place / "completion.sh"
    script.write_bytes(cli.run("--show-completion", "bash").out)
    session = Bash(cli, script)
    yield session
    session.close()


def test_names_of_directories_are_quoted_and_run_no_commands(cli: Cli, bash: Bash) -> None:
    for name in ("$(touch pwned)", "my model", "it's", "plain"):
        (cli.directory / name).mkdir()
    # As bash completes for commands that it knows nothing of, where it also begins with a path.
    assert bash.completed("moechat show ./my") == r"moechat show ./my\ model/"
    assert bash.completed("moechat show ./it") == r"moechat show ./it\'s/"
    assert bash.completed("moechat show ./pl") == "moechat show ./plain/"
    line = bash.completed(r"moechat show ./\$")
    assert line == r"moechat show ./\$\(touch\ pwned\)/"
    bash.enter(line)
    assert not (cli.directory / "pwned").exists()


def test_names_from_manifests_run_no_commands(cli: Cli, bash: Bash) -> None:
    store(cli, "evil-4bit", "evil$(touch pwned)")
    store(cli, "evil$(touch pwned)-8bit", "evil;touch pwned")
    assert bash.completed("moechat show ev") == "moechat show evil-4bit "


def test_a_revision_is_completed_after_the_at_sign(cli: Cli, bash: Bash) -> None:
    store(cli, "tiny--moe-chat-4bit", "tiny/moe-chat")
    store(cli, "tiny--moe-code-4bit", "tiny/moe-code", "fedcba98765432100")
    whole = "moechat run tiny/moe-chat@0123456789ab "
    for begun in ("tiny/moe-ch", "tiny/moe-chat@", "tiny/moe-chat@0", "tiny/moe-chat@01234"):
        assert bash.completed(f"moechat run {begun}") == whole
    assert bash.completed("moechat rm tiny/moe-code@f") == "moechat rm tiny/moe-code@fedcba987654 "
    assert bash.completed("moechat rm tiny/moe-chat@0123456789ab tiny/moe-code@f") == (
        "moechat rm tiny/moe-chat@0123456789ab tiny/moe-code@fedcba987654 "
    )
    assert bash.completed("moechat run tiny/moe-chat@5") == "moechat run tiny/moe-chat@5"


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("run demo --dty", "run demo --dtype "),
        ("run demo --dtype b", "run demo --dtype bfloat16 "),
        ("run demo --dtype=b", "run demo --dtype=bfloat16 "),
        ("run demo --dev", "run demo --device "),
        ("run demo --device cp", "run demo --device cpu "),
        ("run demo --bits 1", "run demo --bits 16 "),
        ("run demo --dense-bits 8", "run demo --dense-bits 8 "),
        ("run demo --kv-bits 1", "run demo --kv-bits 16 "),
        ("bench --synthetic olm", "bench --synthetic olmoe-1b-7b "),
        ("bench demo --systems on", "bench demo --systems on-demand "),
        ("bench demo --systems auto:split=0.5,on", "bench demo --systems auto:split=0.5,on-demand "),
        ("plan mixtral-8", "plan mixtral-8x7b "),
        ("sessions export 1 --format j", "sessions export 1 --format json "),
    ],
)
def test_values_of_options_are_completed(bash: Bash, line: str, completed: str) -> None:
    assert bash.completed(f"moechat {line}") == f"moechat {completed}"
