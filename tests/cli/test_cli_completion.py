"""What the shell completes, asked as bash asks."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import PROGRAM, Cli

from moechat.cli.completion import completers as completion
from moechat.cli.completion.shell import join_words


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """With a home of its own."""
    return replace(cli, home=tmp_path / "home")


def completed(cli: Cli, line: str) -> list[str]:
    words = line.split(" ")
    environment = {
        **cli.environment,
        "_MOECHAT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        PROGRAM, env=environment, cwd=cli.directory, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split()


@pytest.fixture
def stored(cli: Cli) -> Cli:
    store = cli.home / "data" / "models" / "org--little-4bit"
    store.mkdir(parents=True)
    (store / "manifest.json").write_text(
        '{"source": {"name": "org/little", "revision": "0123456789abcdef"}, "model_type": "olmoe", '
        '"geometry": {"bits": 4}, "files": {}}'
    )
    return cli


def test_commands_systems_and_machines_are_completed(cli: Cli) -> None:
    assert completed(cli, "moechat si") == ["simulate"]
    assert completed(cli, "moechat run demo --system moe") == ["moepic", "moe-infinity"]
    assert "rtx3060-12g" in completed(cli, "moechat plan mixtral --gpu rtx30")


def test_aliases_and_models_of_the_library_are_completed(stored: Cli) -> None:
    assert completed(stored, "moechat run mix") == ["mixtral"]
    assert completed(stored, "moechat run org") == ["org/little@0123456789ab"]
    assert completed(stored, "moechat rm org") == ["org/little@0123456789ab"]


def test_partial_paths_are_left_to_the_shell(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for begun in ("./mo", f"{tmp_path}/mo", "~/"):
        assert completion.complete_models(begun) == []
        assert completion.complete_library(begun) == []


@pytest.mark.parametrize(
    ("words", "cursor", "joined", "before"),
    [
        (["moechat", "run", "a/b", "@", "0"], 4, ["moechat", "run", "a/b@0"], "a/b"),
        (["moechat", "run", "a/b", "@"], 3, ["moechat", "run", "a/b@"], "a/b"),
        (["moechat", "run", "a/b", "@", "0", ":", "Q4"], 6, ["moechat", "run", "a/b@0:Q4"], "a/b@0:"),
        (["moechat", "run", "a/b", "@", "0", ""], 5, ["moechat", "run", "a/b@0", ""], ""),
        (["moechat", "run", "a/b", "@", "0"], 2, ["moechat", "run", "a/b"], ""),
        (["moechat", "bench", "--systems", "=", "auto", ":", "sp"], 6, None, "auto:"),
        (["moechat", "run", "de"], 2, ["moechat", "run", "de"], ""),
    ],
)
def test_words_split_by_bash_are_joined(
    words: list[str], cursor: int, joined: list[str] | None, before: str
) -> None:
    environment = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(cursor)}
    assert join_words(environment) == before
    joined = joined or ["moechat", "bench", "--systems=auto:sp"]
    assert environment == {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}


def test_the_completion_script_matches_the_named_shell(cli: Cli) -> None:
    assert b"#compdef moechat" in cli.call("--show-completion", "zsh").out
    assert b"complete -o default" in cli.call("--show-completion=bash").out
    refused = cli.call("--show-completion", "tcsh")
    assert (refused.status, refused.out) == (2, b"")
    assert "there is no completion for 'tcsh'" in refused.err
    assert "bash, zsh, fish" in refused.err
    assert b"<bool>" not in cli.run("--help").out + cli.run("sessions", "rm", "--help").out


def test_completion_is_installed_where_the_shell_reads_it(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "user"
    result = replace(cli, extra={**cli.extra, "HOME": str(home)}).run("--install-completion", "fish")
    assert result.status == 0
    assert "completion for fish is in" in result.err
    assert "moechat" in (home / ".config" / "fish" / "completions" / "moechat.fish").read_text()


def test_ambiguous_model_names_are_completed_to_store_names(stored: Cli) -> None:
    for digit in "12":
        store = stored.home / "data" / "models" / f"tiny-{digit * 8}-4bit"
        store.mkdir()
        (store / "manifest.json").write_text(
            '{"source": {"name": "tiny", "revision": null}, "model_type": "olmoe", '
            '"geometry": {"bits": 4}, "files": {}}'
        )
    assert completed(stored, "moechat run ti") == ["tiny-11111111-4bit", "tiny-22222222-4bit"]
