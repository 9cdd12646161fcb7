"""Completion in a real zsh and a real fish on a terminal, where they are installed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import PROGRAM, Cli
from terminal_support import Terminal

_READY = "ready$"


class Shell:
    """An interactive shell for which completion has been installed."""

    def __init__(self, name: str, cli: Cli, home: Path) -> None:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        programs = home / "bin"
        programs.mkdir(parents=True)
        program = programs / "moechat"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
        program.chmod(0o755)
        installed = replace(cli, extra={**cli.extra, "HOME": str(home)}).run("--install-completion", name)
        assert installed.status == 0, installed.err
        # compinit asks about directories that others could write to, which those of tests may be.
        with open(home / ".zshrc", "a") as file:
            file.write(f"autoload -Uz compinit; compinit -u\nunsetopt beep\nPS1='{_READY} '\n")
        config = home / ".config" / "fish"
        config.mkdir(parents=True, exist_ok=True)
        (config / "config.fish").write_text(f"function fish_prompt; echo -n '{_READY} '; end\n")
        self._terminal = Terminal(
            [name, "-i"],
            cwd=cli.directory,
            environment={
                **cli.environment,
                "HOME": str(home),
                "PATH": f"{programs}:{cli.environment['PATH']}",
            },
            columns=150,
            rows=40,
            patience_s=60,
        )
        self._terminal.wait(_READY)

    def completes(self, line: str, wanted: str) -> None:
        """A line becomes this with Tab, or offers it below."""
        self._terminal.type(line, line.rstrip())
        self._terminal.type("\t", wanted)
        self._terminal.type("\x15\x0c")  # delete the line, clear the screen
        self._terminal.until(lambda: self._terminal.shown.strip() == _READY)

    def close(self) -> None:
        self._terminal.close()


@pytest.fixture(params=["zsh", "fish"])
def shell(request: pytest.FixtureRequest, cli: Cli, tmp_path: Path) -> Iterator[Shell]:
    work = tmp_path / "work"
    work.mkdir()
    (work / "$(touch pwned)").mkdir()
    cli = replace(cli, directory=work, home=tmp_path / "home")
    for directory, name in (("a", "org/big-model"), ("b", "org/other:Q4_K_M"), ("c", "bad$(touch pwned)")):
        place = tmp_path / "home" / "data" / "models" / directory
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(
            f'{{"source": {{"name": "{name}", "revision": "0123456789abcdef"}}, "model_type": "olmoe", '
            '"geometry": {"bits": 4}, "files": {}}'
        )
    made = Shell(request.param, cli, tmp_path / "of the shell")
    yield made
    made.close()
    assert [entry.name for entry in work.iterdir()] == ["$(touch pwned)"]


def test_commands_models_systems_and_values_are_completed(shell: Shell) -> None:
    shell.completes("moechat downl", "moechat download")
    shell.completes("moechat run org/b", "moechat run org/big-model@0123456789ab")
    shell.completes("moechat run org/o", "moechat run org/other@0123456789ab:Q4_K_M")
    shell.completes("moechat run demo --system-", "moechat run demo --system-prompt")
    shell.completes("moechat run demo --system mixtral-o", "--system mixtral-offloading")
    shell.completes("moechat run demo --system=mixtral-o", "--system=mixtral-offloading")
    shell.completes("moechat plan olmoe --gpu rtx3060-", "--gpu rtx3060-12g")
    shell.completes("moechat sessions export 1 --format j", "--format json")


def test_names_with_shell_syntax_are_not_executed(shell: Shell) -> None:
    shell.completes("moechat run ./", r"\$\(touch\ pwned\)/")
    shell.completes("moechat rm ", "org/big-model@0123456789ab")
