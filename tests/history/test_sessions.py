"""Conversations that are kept, in the database and in files."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from history_support import conversation
from hypothesis import given
from hypothesis import strategies as st

from moechat.errors import SessionNotFoundError, SessionsFullError, SessionsUnavailableError, UsageError
from moechat.history import database_schema as schema
from moechat.history.attachments import attach, without_files
from moechat.history.conversation import Conversation, Turn, title_of
from moechat.history.same_conversation import find_stored
from moechat.history.session_database import Sessions, sessions_path
from moechat.history.session_list import format_summary
from moechat.history.transcript import read_from, write_as

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@pytest.fixture
def path() -> Path:
    return sessions_path()


def test_a_conversation_is_restored_and_private_to_its_owner(path: Path) -> None:
    kept = conversation(("first", "one"), ("second", "two"))
    kept.system = "be brief"
    kept.turns[1] = replace(kept.turns[1], mark="stopped", thinking="hm")
    old = os.umask(0)
    try:
        with Sessions(path) as sessions:
            sessions.keep(kept)
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(old)
    assert set(modes.values()) == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with Sessions(path, existing=True) as sessions:
        assert sessions.get(1) == kept
        assert [(line.key, line.title, line.turns) for line in sessions.summaries()] == [(1, "first", 2)]


def test_only_new_turns_are_written_and_undone_ones_stay_readable(path: Path) -> None:
    kept = conversation(("first", "one"))
    with Sessions(path) as sessions:
        sessions.keep(kept)
        kept.add(Turn("second", "two"))
        kept.undo()
        kept.add(Turn("third", "three"))
        sessions.keep(kept)
        kept.undo()
        sessions.keep(kept)
        assert [turn.answer for turn in sessions.get(1).turns] == ["one"]
        assert [turn.answer for turn in sessions.get(1, all_turns=True).turns] == ["one", "three"]


def test_the_last_conversation_of_the_model_is_preferred(path: Path) -> None:
    with Sessions(path) as sessions:
        assert sessions.last("demo") is None
        for model in ("demo", "other"):
            sessions.keep(conversation(("hello", model), model=model))
        last = {model: sessions.last(model) for model in ("demo", "other", "third")}
    assert [found and found.key for found in last.values()] == [1, 2, 2]


def test_undone_turns_do_not_set_the_title_or_the_model(path: Path) -> None:
    with Sessions(path) as sessions:
        kept = conversation(("Hello there", "one"))
        sessions.keep(kept)
        kept.undo()
        sessions.keep(kept)
        kept.add(Turn("Who are you?", "two", model="demo"))
        sessions.keep(kept)
        kept.add(Turn("And now?", "three", model="other"))
        sessions.keep(kept)
        kept.undo()
        sessions.keep(kept)
        assert [(line.title, line.model) for line in sessions.summaries()] == [("Who are you?", "demo")]
        sessions.keep(conversation(("hello", "four"), model="other"))
        last = {model: sessions.last(model) for model in ("demo", "other")}
    assert [found and found.key for found in last.values()] == [1, 2]


def test_a_title_and_a_model_from_a_file_survive_undo() -> None:
    loaded = read_from(
        '{"title": "Foxes", "model": "theirs", "messages": ['
        '{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "file",
    )
    loaded.add(Turn("c", "d", model="demo"))
    loaded.undo()
    assert (loaded.title, loaded.model) == ("Foxes", "theirs")
    loaded.undo()
    assert (loaded.title, loaded.model) == ("Foxes", "theirs")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_search_finds_words_with_and_without_an_index(
    path: Path, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not indexed:
        monkeypatch.setattr("moechat.history.session_database.by_index", lambda connection, words: {})
    with Sessions(path) as sessions:
        sessions.keep(conversation(("a fox", "in the garden"), ("100 %", "x")))
        sessions.keep(conversation(("a fox", "elsewhere"), ("garden", 'a "quoted" word')))
        taken = conversation(("kept", "y"), ("fox garden", "z"))
        sessions.keep(taken)
        taken.undo()
        sessions.keep(taken)
        assert [line.key for line in sessions.search("garden fox")] == [1]
        assert [line.key for line in sessions.search("FOX")] == [2, 1]
        assert [line.key for line in sessions.search("100 %")] == [1]
        assert [line.key for line in sessions.search('"quoted"')] == [2]
        assert sessions.search("gar_en") == sessions.search("  ") == []
        assert "garden" in sessions.search("garden")[0].found
        sessions.keep(conversation(("北京的天气", "晴")))
        assert [line.key for line in sessions.search("天气")] == [4]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("天气", [2, 1]),
        ("北京", [1]),
        ("東京", [2]),
        ("c++", [3]),
        ('"', [4]),
        ("ＦＯＸ", [4]),
        ("fox", [4]),
        ("ÉTÉ", [5]),
        ("ete", [5]),
        ("été", [5]),
        ("c", [3]),
    ],
)
def test_a_search_finds_any_script_and_literal_punctuation(path: Path, words: str, keys: list[int]) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("天气 北京的天气怎么样", "晴")))
        sessions.keep(conversation(("東京の天气", "天气 晴れ")))
        sessions.keep(conversation(("what is c++ 20", "x")))
        sessions.keep(conversation(('the "fox"', "y")))
        sessions.keep(conversation(("un été", "z")))
        assert [line.key for line in sessions.search(words)] == keys


def test_a_conversation_without_turns_is_neither_listed_nor_continued(path: Path) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("first", "one")))
        empty = conversation(("second", "two"))
        sessions.keep(empty)
        empty.undo()
        sessions.keep(empty)
        assert [line.key for line in sessions.summaries()] == [1]
        last = sessions.last("demo")
        assert last is not None
        assert last.key == 1
        assert len(sessions.get(2, all_turns=True).turns) == 1
        empty.add(Turn("third", "three"))
        sessions.keep(empty)
        assert [line.key for line in sessions.summaries()] == [2, 1]


def test_a_database_readable_by_others_becomes_private(path: Path) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("first", "one")))
        for file in path.parent.iterdir():
            file.chmod(0o644)
    for file in path.parent.iterdir():
        file.chmod(0o644)
    with Sessions(path, existing=True):
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_a_chat_keeps_changes_of_another_chat_to_the_same_conversation(path: Path) -> None:
    with Sessions(path) as sessions:
        first = conversation(("first", "one"))
        first.system = "be brief"
        sessions.keep(first)
        second = sessions.get(1)
        second.system = "be kind"
        second.undo()
        second.add(Turn("second", "two", model="other"))
        sessions.keep(second)
        first.add(Turn("third", "three", model="demo"))
        sessions.keep(first)
        now = sessions.get(1)
        assert (now.title, now.system, now.model) == ("second", "be kind", "demo")
        assert [turn.answer for turn in now.turns] == ["two", "three"]
        first.undo()
        sessions.keep(first)
        assert sessions.get(1).model == "other"
        first.system = None
        first.undo()
        sessions.keep(first)
        assert sessions.get(1).title == "second"
        second.add(Turn("fourth", "four", model="other"))
        sessions.keep(second)
        assert sessions.get(1).system is None


READER = """
import os, sys
from pathlib import Path
from moechat.history.session_database import Sessions
if os.geteuid() == 0:
    os.seteuid(65534)
with Sessions(Path(sys.argv[1]), existing=True) as sessions:
    print([line.title for line in sessions.summaries()], [line.key for line in sessions.search("first")])
    print(sessions.get(1).turns[0].answer)
"""


def test_conversations_in_a_read_only_directory_can_be_read() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        path = Path(place) / "state" / "sessions.db"
        with Sessions(path) as sessions:
            sessions.keep(conversation(("first", "one")))
        for name, mode in ((place, 0o755), (path.parent, 0o555), (path, 0o444)):
            os.chmod(name, mode)
        done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True)
        os.chmod(path.parent, 0o755)
    assert done.stdout == "['first'] [1]\none\n", done.stderr


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE turns SET mark = 'of a newer version'",
        "UPDATE turns SET created = 1e300",
        "UPDATE conversations SET created = 'noon', updated = 1e18",
        "UPDATE conversations SET created = -1e12, updated = 253402300799",
    ],
)
def test_an_invalid_row_can_still_be_listed_shown_and_exported(path: Path, change: str) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("first", "one")))
    with closing(sqlite3.connect(path)) as other:
        other.execute(change)
        other.commit()
    with Sessions(path) as sessions:
        (line,) = sessions.summaries()
        assert format_summary(line).endswith("1 turn   demo  first")
        for form in ("md", "json"):
            assert "one" in write_as(sessions.get(1), form)  # type: ignore[arg-type]


def test_deleted_text_is_gone_from_the_disk(path: Path) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("confidential", "unmentionable")))
        sessions.keep(conversation(("other", "x")))
        assert sessions.search("confidential")
        sessions.delete(1)
        with pytest.raises(SessionNotFoundError, match="no conversation 1"):
            sessions.get(1)
        with pytest.raises(SessionNotFoundError):
            sessions.delete(1)
        assert sessions.search("unmentionable") == []
        sessions.keep(conversation(("third", "y")))
        assert [line.key for line in sessions.summaries()] == [3, 2]
    for file in path.parent.iterdir():
        assert b"unmentionable" not in file.read_bytes()


def test_an_older_schema_is_migrated_and_a_newer_one_is_unchanged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("first", "one")))
    monkeypatch.setattr(
        schema, "MIGRATIONS", [*schema.MIGRATIONS, "ALTER TABLE turns ADD COLUMN stars INTEGER; "]
    )
    with Sessions(path) as sessions:
        assert sessions.get(1).turns[0].answer == "one"
    monkeypatch.undo()
    monkeypatch.setenv("MOECHAT_HOME", str(path.parents[1]))
    before = path.read_bytes()
    with pytest.raises(SessionsUnavailableError, match="newer moechat"):
        Sessions(path)
    assert path.read_bytes() == before


def test_a_failed_migration_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sessions(path) as sessions:
        sessions.keep(conversation(("first", "one")))
    broken = [*schema.MIGRATIONS, "CREATE TABLE more (x); SELECT nonsense;"]
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", broken)
        with pytest.raises(SessionsUnavailableError):
            Sessions(path)
    with Sessions(path) as sessions:
        assert sessions.get(1).turns[0].answer == "one"


WRITER = """
import sys
from pathlib import Path
from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import Sessions
with Sessions(Path(sys.argv[1])) as sessions:
    talk = Conversation()
    for n in range(40):
        talk.add(Turn(f"{sys.argv[2]} {n}", "x"))
        sessions.keep(talk)
"""


def test_turns_of_two_processes_are_all_kept(path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    with Sessions(path, existing=True) as sessions:
        found = [[turn.question for turn in sessions.get(key).turns] for key in (1, 2)]
    assert sorted(found) == [[f"{name} {n}" for n in range(40)] for name in ("a", "b")]


def test_a_full_disk_has_its_own_status_and_loses_nothing(path: Path) -> None:
    with Sessions(path) as sessions:
        kept = conversation(("first", "one"))
        sessions.keep(kept)
        sessions._connection.execute("PRAGMA max_page_count = 1")  # no page more than there are
        kept.add(Turn("second", "long " * 100_000))
        with pytest.raises(SessionsFullError, match="full") as caught:
            sessions.keep(kept)
        assert (caught.value.exit_code, caught.value.hint) == (4, "free some space")
    with Sessions(path) as sessions:
        stored = sessions.get(1)
        assert [turn.question for turn in stored.turns] == ["first"]


def test_reading_creates_no_file(path: Path) -> None:
    with Sessions(path, existing=True) as sessions:
        assert sessions.summaries() == []
    assert not path.exists()


def saved(kept: Conversation) -> Conversation:
    """The conversation as a file gives it back."""
    return read_from(write_as(kept, "json"), "file")


def test_a_loaded_file_goes_on_in_the_conversation_that_it_was_saved_from(path: Path) -> None:
    with Sessions(path) as sessions:
        kept, other = conversation(("first", "one"), ("second", "two")), conversation(("first", "one"))
        other.created = 5.0
        for one in (kept, other):
            sessions.keep(one)
        found = find_stored(sessions, saved(kept))
        assert found == kept
        assert found is not None
        found.add(Turn("third", "three"))
        sessions.keep(found)
        assert [line.turns for line in sessions.summaries()] == [3, 1]
        # It has gone on since: the file is an earlier state, which becomes a conversation of its own.
        assert find_stored(sessions, saved(kept)) is None
        longer = saved(found)
        longer.add(Turn("fourth", "four"))
        extended = find_stored(sessions, longer)
        assert extended is not None
        assert (extended.key, [turn.key is None for turn in extended.turns]) == (1, [False] * 3 + [True])
        found.undo()
        sessions.keep(found)
        assert find_stored(sessions, saved(kept)) is not None


def test_a_file_that_only_begins_like_a_stored_conversation_is_a_new_one(path: Path) -> None:
    with Sessions(path) as sessions:
        stored = conversation(("first", "one"))
        stored.created = 1e9
        sessions.keep(stored)
        for turns, system in (
            ([("first", "one"), ("second", "two")], None),
            ([("first", "other")], None),
            ([("first", "one")], "be brief"),
            ([], None),
        ):
            loaded = conversation(*turns)
            loaded.system = system
            assert find_stored(sessions, loaded) is None
        messages = '[{"role": "user", "content": "first"}, {"role": "assistant", "content": "one"}]'
        assert find_stored(sessions, read_from(messages, "file")) == stored


def test_titles_leave_attached_files_out(path: Path) -> None:
    files = [("notes.txt", "buy milk\n```\ncode\n```\n"), ("empty", ""), ("b.md", "text")]
    for count in range(4):
        assert title_of(attach(files[:count], "what is\nthis?")) == "what is this?"
    assert title_of(attach(files[:1], " ")) == title_of("notes.txt: ```` buy milk ``` code ``` ````")
    assert title_of("notes.txt:\n```\nno end") == "notes.txt: ``` no end"


@given(st.lists(st.tuples(st.text("ab:`", min_size=1), st.text("`\n:a"))), st.text("`:a"))
def test_the_message_behind_any_files_is_found(files: list[tuple[str, str]], rest: str) -> None:
    question = f"what{rest}"
    assert without_files(attach(files, question)) == question


def test_titles_are_one_short_line() -> None:
    assert title_of("  tell\tme\n of a fox ") == "tell me of a fox"
    assert title_of("\x1b[31mred") == "␛[31mred"
    assert len(title_of("word " * 50)) <= 60


@given(st.lists(st.tuples(TEXT, TEXT, TEXT)), st.none() | TEXT)
def test_json_restores_the_conversation(turns: list[tuple[str, str, str]], system: str | None) -> None:
    kept = Conversation(system=system)
    for question, answer, thinking in turns:
        kept.add(Turn(question, answer, thinking, "stopped", "demo"))
    again = read_from(write_as(kept, "json"), "file")
    assert (again.turns, again.system) == (kept.turns, system)
    assert write_as(kept, "md").startswith("# ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("3", "holds no list of messages"),
        ('[{"role": "user"}]', "message 1 has no text"),
        ('[{"role": "assistant", "content": ""}]', "message 1 is of assistant, expected user"),
        ('[{"role": "user", "content": "a"}]', "the last question has no answer"),
        ('{"version": 9, "messages": []}', "newer moechat"),
    ],
)
def test_the_error_for_a_file_without_a_conversation_names_the_position(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_from(text, "a\x1bfile")
