"""What the shell completes, asked as bash asks."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import PROGRAM, Cli

from moechat.cli import completion


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
    assert completed(cli, "moechat run demo --system moe") == ["moepic"]
    assert "rtx3060-12g" in completed(cli, "moechat plan mixtral --gpu rtx30")


def test_models_are_completed_the_librarys_too(stored: Cli) -> None:
    assert completed(stored, "moechat run mix") == ["mixtral"]
    assert completed(stored, "moechat run org") == ["org/little@0123456789ab"]
    assert completed(stored, "moechat rm org") == ["org/little@0123456789ab"]


def test_begun_paths_are_completed_to_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "models" / "other").mkdir()
    (tmp_path / "models" / "onfile").write_text("")
    monkeypatch.chdir(tmp_path)
    assert completion.complete_models("./mo") == ["./models/"]
    assert completion.complete_models("./models/on") == ["./models/one/"]
    assert completion.complete_models(f"{tmp_path}/models/o") == [
        f"{tmp_path}/models/one/",
        f"{tmp_path}/models/other/",
    ]
    assert completion.complete_models("/nowhere/at/all/x") == []
