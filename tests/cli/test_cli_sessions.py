"""moechat sessions: what is listed, found, shown, exported and deleted; without torch."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from cli_support import Cli

from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import Sessions


@pytest.fixture
def own(tmp_path: Path) -> Cli:
    """The program with two conversations."""
    cli = Cli(directory=tmp_path, home=tmp_path / "home")
    with Sessions(cli.home / "state" / "sessions.db") as sessions:
        for question, answer in (("a fox\x1b[31m", "in the *garden*"), ("weather", "rain")):
            conversation = Conversation(system="be brief")
            conversation.add(Turn(question, answer, "hm", "stopped", "demo", 1.0))
            sessions.keep(conversation)
    return cli


def test_conversations_are_listed_and_found(own: Cli) -> None:
    listed = own.call("sessions").out.decode().splitlines()
    assert [line.split()[0] for line in listed] == ["2", "1"]
    assert "demo  a fox␛[31m" in listed[1]
    assert [row["id"] for row in json.loads(own.call("sessions", "--json", "--limit", "1").out)] == [2]
    found = own.call("sessions", "search", "GARDEN", "fox").out.decode()
    assert found.startswith("1 ")
    assert "garden" in found.splitlines()[1]
    nothing = own.call("sessions", "search", "nothing")
    assert (nothing.status, nothing.out) == (0, b"")
    assert "no conversation contains nothing" in nothing.err


def test_a_conversation_is_shown_and_exported(own: Cli) -> None:
    assert "in the *garden*\n\n*(stopped by the user)*" in own.call("sessions", "show", "1").out.decode()
    exported = json.loads(own.call("sessions", "export", "1", "--format", "json").out)
    assert [message["role"] for message in exported["messages"]] == ["system", "user", "assistant"]
    assert own.call("sessions", "export", "2", "-o", "rain.json").status == 0
    assert json.loads((own.directory / "rain.json").read_text())["title"] == "weather"
    again = own.call("sessions", "export", "1", "-o", "rain.json")
    assert again.status == 2
    assert "exists already" in again.err
    assert own.call("sessions", "export", "1", "--format", "pdf").status == 2


def test_undone_turns_are_marked_in_a_pipe(own: Cli) -> None:
    with Sessions(own.home / "state" / "sessions.db") as sessions:
        conversation = sessions.get(2)
        conversation.undo()
        conversation.add(Turn("news", "none", model="demo"))
        sessions.keep(conversation)
    shown = own.call("sessions", "show", "2", "--all").out.decode()
    assert "rain\n\n*(stopped by the user, undone)*\n\n## User\n\nnews" in shown
    assert shown.endswith("## Assistant\n\nnone\n")
    assert "undone" not in own.call("sessions", "show", "2").out.decode()


@pytest.mark.parametrize("name", ["/etc/passwd/x.md", "new/", "x.txt", "a" * 300 + ".md"])
def test_an_export_that_cannot_be_written_is_a_clean_error(own: Cli, name: str) -> None:
    result = own.call("sessions", "export", "1", "-o", name)
    assert result.status in (1, 2)
    assert result.err.startswith("error: ")
    assert "hint: " in result.err
    assert [path.name for path in own.directory.iterdir()] == ["home"]


def test_a_conversation_on_a_terminal_is_rendered_without_control_sequences(own: Cli) -> None:
    session = own.terminal("sessions", "show", "1")
    shown = session.read()
    session.close()
    assert session.exitstatus == 0
    assert ">>> a fox␛[31m\r\n" in shown
    assert "\x1b[3mgarden\x1b[0m" in shown
    assert "\x1b[31m" not in shown


def test_conversations_are_deleted(own: Cli) -> None:
    result = own.call("sessions", "rm", "1", "7")
    assert result.status == 2
    assert "no conversation 7" in result.err
    assert [row["id"] for row in json.loads(own.call("sessions", "--json").out)] == [2]
    assert own.call("sessions", "show", "1").status == 2


def test_the_error_for_a_damaged_database_names_its_path(own: Cli) -> None:
    path = own.home / "state" / "sessions.db"
    path.write_bytes(b"no database " * 1000)
    result = own.call("sessions")
    assert result.status == 9
    assert "sessions.db: file is not a database" in result.err
    assert "hint: move that file away" in result.err


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE turns SET answer = x'ff00' WHERE conversation = 1",
        "UPDATE turns SET answer = CAST(x'ff00' AS TEXT) WHERE conversation = 1",
        "ALTER TABLE turns RENAME TO answers",
    ],
)
def test_the_error_for_an_unreadable_row_names_the_database(own: Cli, change: str) -> None:
    with closing(sqlite3.connect(own.home / "state" / "sessions.db")) as other:
        other.execute(change)
        other.commit()
    for arguments in (["show", "1"], ["export", "1", "--format", "json"], ["search", "rain", "+"]):
        result = own.call("sessions", *arguments)
        assert result.status == 9
        assert "sessions.db: the database is damaged (" in result.err
        assert "move that file away" in result.err


def test_an_unreadable_conversation_can_be_deleted(own: Cli) -> None:
    with closing(sqlite3.connect(own.home / "state" / "sessions.db")) as other:
        other.execute("UPDATE conversations SET title = x'ff' WHERE id = 1")
        other.commit()
    result = own.call("sessions")
    assert result.status == 9
    assert "conversation 1 has bytes" in result.err
    assert "`moechat sessions rm 1`" in result.err
    assert own.call("sessions", "rm", "1").status == 0
    assert own.call("sessions").status == 0


def test_a_directory_in_place_of_the_database_is_an_error_and_stays_unchanged(
    tmp_path: Path,
) -> None:
    cli = Cli(directory=tmp_path, home=tmp_path / "home")
    path = cli.home / "state" / "sessions.db"
    path.mkdir(parents=True, mode=0o755)
    result = cli.call("sessions")
    assert result.status == 9
    assert "sessions.db is a directory" in result.err
    assert "hint: move it away" in result.err
    assert path.stat().st_mode & 0o777 == 0o755


def test_neither_torch_nor_the_editor_is_imported(own: Cli) -> None:
    script = (
        "import sys; from moechat.cli.main import main; status = main(sys.argv[1:]); "
        "heavy = [name for name in ('torch', 'prompt_toolkit') if name in sys.modules]; "
        "print(status, heavy, file=sys.stderr)"
    )
    for arguments in (["sessions"], ["sessions", "show", "1"], ["--version"], ["run", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=own.environment,
            cwd=own.directory,
            capture_output=True,
            text=True,
        )
        assert done.stderr.splitlines()[-1] == "0 []", done.stderr
