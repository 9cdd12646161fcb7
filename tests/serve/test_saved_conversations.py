"""Conversations of the terminal in the server: ``/moechat/conversations``, over real connections."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from history_support import conversation
from serve_support import PATIENCE_S, ServerProcess, serving

from moechat.cli.commands.serve_arguments import ServeCommand
from moechat.errors import UsageError
from moechat.history.conversation import Conversation, Turn
from moechat.history.session_database import Sessions, sessions_path
from moechat.serve.settings import ServeSettings

ALL = "/moechat/conversations"
KEY = "secret-key-1234567890"
TURN = {"question": "What is a fox?", "answer": "An animal.", "model": "demo"}


@dataclass
class Home:
    """A server with a home of its own.

    Attributes:
        server: The process.
        path: Its database.
    """

    server: ServerProcess
    path: Path

    def sessions(self) -> Sessions:
        return Sessions(self.path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    directory = tmp_path_factory.mktemp("serve-history")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECHAT_HOME", str(directory / "home"))
        path = sessions_path()
        with serving(directory, "demo", "--origin", "http://localhost:3000", "-v") as server:
            yield Home(server, path)


@pytest.fixture
def home(running: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The server, without conversations."""
    monkeypatch.setenv("MOECHAT_HOME", str(running.path.parents[1]))
    for end in ("", "-wal", "-shm"):
        Path(f"{running.path}{end}").unlink(missing_ok=True)
    return running


@pytest.fixture
def client(home: Home) -> Iterator[httpx.Client]:
    with home.server.client() as client:
        yield client


def made(client: httpx.Client, *turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = client.post(ALL, json={"turns": list(turns) or [TURN], **fields})
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


def listed(client: httpx.Client, **parameters: Any) -> list[dict[str, Any]]:
    response = client.get(ALL, params=parameters)
    assert response.status_code == 200, response.text
    assert response.json()["saved"] is True
    found: list[dict[str, Any]] = response.json()["conversations"]
    return found


# ---- the same conversations as on the terminal


def test_conversations_of_the_terminal_are_listed_and_read(home: Home, client: httpx.Client) -> None:
    assert listed(client) == []
    kept = conversation(("first", "one"), ("second", "two"))
    kept.system = "be brief"
    kept.turns[1] = replace(kept.turns[1], mark="stopped", thinking="hm")
    with home.sessions() as sessions:
        sessions.keep(kept)
        sessions.keep(conversation(("other", "x")))
    found = listed(client)
    assert [(row["id"], row["title"], row["turns"], row["model"]) for row in found] == [
        (2, "other", 1, "demo"),
        (1, "first", 2, "demo"),
    ]
    assert found[0]["updated"] >= found[1]["updated"] > 1.6e9
    one = client.get(f"{ALL}/1").json()
    assert one["system"] == "be brief"
    assert [(turn["id"], turn["question"], turn["answer"]) for turn in one["turns"]] == [
        (1, "first", "one"),
        (2, "second", "two"),
    ]
    assert (one["turns"][1]["mark"], one["turns"][1]["thinking"]) == ("stopped", "hm")


def test_a_conversation_goes_on_here_and_there(home: Home, client: httpx.Client) -> None:
    begun = made(client, system="be brief")
    with home.sessions() as sessions:
        found = sessions.get(begun["id"])
        assert (found.system, found.title, found.model) == ("be brief", "What is a fox?", "demo")
        found.add(Turn("And a dog?", "Another.", model="other"))
        sessions.keep(found)
    added = client.post(
        f"{ALL}/{begun['id']}/turns", json={"turns": [{"question": "And a cat?", "answer": "A third."}]}
    ).json()
    assert added["id"] == begun["id"]
    # Whoever sends only new turns learns of those of others.
    assert added["turn_ids"] == [1, 2, 3]
    assert added["added_ids"] == [3]
    with home.sessions() as sessions:
        assert [turn.answer for turn in sessions.get(begun["id"]).turns] == [
            "An animal.",
            "Another.",
            "A third.",
        ]


def test_the_command_line_continues_a_conversation_of_the_page(home: Home, client: httpx.Client) -> None:
    begun = made(client)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moechat", "run", "demo", "And a dog?", "--session", str(begun["id"])),
            *("--temperature", "0", "--max-tokens", "5", "-q"),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    turns = client.get(f"{ALL}/{begun['id']}").json()["turns"]
    assert [turn["question"] for turn in turns] == ["What is a fox?", "And a dog?"]
    assert turns[1]["answer"] == done.stdout.rstrip("\n")


def test_an_edited_question_replaces_its_turn_which_stays_readable(home: Home, client: httpx.Client) -> None:
    begun = made(client, TURN, {"question": "old", "answer": "old answer"})
    change = {"undone": [2], "turns": [{"question": "new", "answer": "new answer", "mark": "cut"}]}
    after = client.post(f"{ALL}/{begun['id']}/turns", json=change).json()
    assert after["turn_ids"] == [1, 3]
    with home.sessions() as sessions:
        everything = sessions.get(begun["id"], all_turns=True).turns
    assert [turn.question for turn in everything] == ["What is a fox?", "old", "new"]
    assert everything[2].mark == "cut"
    # Taken back twice, or never there: nothing more happens.
    again = client.post(f"{ALL}/{begun['id']}/turns", json={"undone": [2, 99]}).json()
    assert again["turn_ids"] == [1, 3]


def test_an_unchanged_system_prompt_replaces_nobody_elses(home: Home, client: httpx.Client) -> None:
    begun = made(client, system="one")
    with home.sessions() as sessions:
        found = sessions.get(begun["id"])
        found.system = "two"
        sessions.keep(found)
    address = f"{ALL}/{begun['id']}"
    client.post(f"{address}/turns", json={"turns": [TURN]})
    assert client.get(address).json()["system"] == "two"
    client.post(f"{address}/turns", json={"turns": [TURN], "system": ""})
    assert client.get(address).json()["system"] is None
    client.patch(address, json={"system": "three"})
    assert client.get(address).json()["system"] == "three"


def test_renaming_forking_deleting(home: Home, client: httpx.Client) -> None:
    begun = made(client, TURN, {"question": "second", "answer": "2"})
    renamed = client.patch(f"{ALL}/{begun['id']}", json={"title": "  Of\n foxes \x1b "}).json()
    assert renamed["title"] == "Of foxes ␛"
    copied = client.post(f"{ALL}/{begun['id']}/fork", json={}).json()
    part = client.post(f"{ALL}/{begun['id']}/fork", json={"through": 1}).json()
    assert (copied["turns"], part["turns"], part["title"]) == (2, 1, "Of foxes ␛")
    assert set(copied["turn_ids"]).isdisjoint(begun["turn_ids"])
    assert client.post(f"{ALL}/{begun['id']}/fork", json={"through": 99}).status_code == 404
    gone = client.delete(f"{ALL}/{begun['id']}")
    assert gone.json() == {"id": begun["id"], "title": "Of foxes ␛", "deleted": True}
    assert [row["id"] for row in listed(client)] == [part["id"], copied["id"]]
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/turns"), ("PATCH", "")):
        body = {"title": "x", "turns": [TURN]} if method != "DELETE" else None
        response = client.request(method, f"{ALL}/{begun['id']}{end}", json=body)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "conversation_not_found"
    # Its text is gone from the disk.
    for each in (copied, part):
        client.delete(f"{ALL}/{each['id']}")
    for file in home.path.parent.glob("sessions.db*"):
        assert b"An animal." not in file.read_bytes()


def test_search_and_limits_of_the_list(client: httpx.Client) -> None:
    made(client, {"question": "a fox", "answer": "in the garden"})
    made(client, {"question": "北京的天气", "answer": "晴"})
    assert [row["title"] for row in listed(client, search="garden fox")] == ["a fox"]
    assert "garden" in listed(client, search="garden")[0]["found"]
    assert [row["title"] for row in listed(client, search="天气")] == ["北京的天气"]
    assert listed(client, search="nowhere") == []
    response = client.get(ALL, params={"limit": 1}).json()
    assert (len(response["conversations"]), response["more"]) == (1, True)
    assert client.get(ALL, params={"limit": 2}).json()["more"] is False
    for wrong in ({"limit": 0}, {"limit": "x"}, {"limit": 10**30}, {"search": "x" * 201}):
        assert client.get(ALL, params=wrong).status_code == 400


# ---- who may


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},  # may ask the model
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_no_other_page_reads_or_changes_conversations(
    home: Home, client: httpx.Client, headers: dict[str, str]
) -> None:
    begun = made(client)
    one = f"{ALL}/{begun['id']}"
    for method, path in (
        *(("GET", ALL), ("POST", ALL), ("GET", one), ("PATCH", one), ("DELETE", one)),
        *(("POST", f"{one}/turns"), ("POST", f"{one}/fork")),
    ):
        body = {"turns": [TURN], "title": "x"} if method in ("POST", "PATCH") else None
        response = client.request(method, path, json=body, headers=headers)
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "wrong_origin"
        assert "fox" not in response.text
    assert [row["turns"] for row in listed(client)] == [1]


def test_the_servers_own_page_may(home: Home, client: httpx.Client) -> None:
    own = {"origin": home.server.url, "sec-fetch-site": "same-origin"}
    response = client.post(ALL, json={"turns": [TURN]}, headers=own)
    assert response.status_code == 201
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert response.headers["cache-control"] == "no-store"


def test_forms_of_other_types_change_nothing(client: httpx.Client) -> None:
    text = '{"turns": [{"question": "a", "answer": "b"}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert client.post(ALL, content=text, headers={"content-type": kind}).status_code == 415
    assert listed(client) == []


def test_other_hosts_are_refused(client: httpx.Client) -> None:
    assert client.get(ALL, headers={"host": "evil.example"}).status_code == 403


# ---- wrong requests


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "turns is empty"),
        ({"turns": []}, "turns is empty"),
        ({"turns": "x"}, "turns"),
        ({"turns": ["x"]}, r"turns[0] must be an object"),
        ({"turns": [{"question": "a"}]}, "turns[0].answer is empty"),
        ({"turns": [{"answer": "a"}]}, "turns[0].question is empty"),
        ({"turns": [{**TURN, "mark": "odd"}]}, "turns[0].mark"),
        ({"turns": [{**TURN, "thinking": 3}]}, "turns[0].thinking"),
        ({"turns": [TURN], "system": 3}, "system"),
        ({"turns": [TURN], "title": []}, "title"),
        ({"turns": [TURN] * 1001}, "turns"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_kept(
    client: httpx.Client, body: dict[str, Any], said: str
) -> None:
    response = client.post(ALL, json=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    assert listed(client) == []


@pytest.mark.parametrize("undone", ["x", [0], [-1], [1.5], [True], ["1"], [10**30]])
def test_wrong_ids_of_turns_are_refused(client: httpx.Client, undone: object) -> None:
    begun = made(client)
    response = client.post(f"{ALL}/{begun['id']}/turns", json={"undone": undone})
    assert response.status_code == 400
    assert "undone" in response.json()["error"]["message"]


@pytest.mark.parametrize("end", ["0", "-1", "x", "1.5", str(2**63), "9" * 500, "1/x", "1/turns/2", "%2e%2e"])
def test_addresses_without_a_conversation_are_unknown(client: httpx.Client, end: str) -> None:
    made(client)
    for method in ("GET", "DELETE"):
        assert client.request(method, f"{ALL}/{end}").status_code in (404, 405)
    assert len(listed(client)) == 1


def test_a_title_is_never_empty(client: httpx.Client) -> None:
    begun = made(client)
    for body in ({}, {"title": ""}, {"title": " \n "}):
        assert client.patch(f"{ALL}/{begun['id']}", json=body).status_code == 400
    assert listed(client)[0]["title"] == "What is a fox?"


def test_any_text_comes_back_as_it_was_sent(client: httpx.Client) -> None:
    texts = [
        "\x00nul\x00",
        "\u2028 \u202e",
        "𝄞 e\u0301",
        "<script>alert(1)</script>",
        "'; DROP TABLE turns; --",
    ]
    begun = made(client, *({"question": text, "answer": text, "thinking": text} for text in texts))
    turns = client.get(f"{ALL}/{begun['id']}").json()["turns"]
    assert [(turn["question"], turn["answer"], turn["thinking"]) for turn in turns] == [
        (text,) * 3 for text in texts
    ]
    for text in texts:
        assert client.get(ALL, params={"search": text}).status_code == 200


# ---- other processes, and a database that cannot be used

WRITER = """
import sys
from pathlib import Path
from moechat.history.conversation import Turn
from moechat.history.session_database import Sessions
with Sessions(Path(sys.argv[1])) as sessions:
    talk = sessions.get(int(sys.argv[2]))
    for n in range(40):
        talk.add(Turn(f"terminal {n}", "x"))
        sessions.keep(talk)
"""


def test_turns_of_a_terminal_and_of_two_pages_at_once_are_all_kept(home: Home, client: httpx.Client) -> None:
    begun = made(client)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(home.path), str(begun["id"])])

    def page(name: str) -> None:
        with home.server.client() as own:
            for n in range(20):
                body = {"turns": [{"question": f"{name} {n}", "answer": "x"}]}
                response = own.post(f"{ALL}/{begun['id']}/turns", json=body)
                while response.status_code == 503:  # as a client does that is asked to try again
                    response = own.post(f"{ALL}/{begun['id']}/turns", json=body)
                assert response.status_code == 200, response.text

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(page, ("a", "b")))
    assert writer.wait(PATIENCE_S) == 0
    found = [turn["question"] for turn in client.get(f"{ALL}/{begun['id']}").json()["turns"]]
    wanted = {"terminal": 40, "a": 20, "b": 20}
    for name, count in wanted.items():
        assert [text for text in found if text.startswith(f"{name} ")] == [
            f"{name} {n}" for n in range(count)
        ]
    assert len(found) == 81


def test_a_locked_database_is_an_error_that_passes_and_names_no_path(
    home: Home, client: httpx.Client
) -> None:
    begun = made(client)
    with sqlite3.connect(home.path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        response = client.post(f"{ALL}/{begun['id']}/turns", json={"turns": [TURN]})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert error["code"] == "history_busy"
        assert str(home.path.parent) not in error["message"]
        # Answers go on meanwhile.
        assert client.get("/health").status_code == 200
        other.execute("COMMIT")
    other.close()
    response = client.post(f"{ALL}/{begun['id']}/turns", json={"turns": [TURN]})
    assert response.status_code == 200, response.text
    assert response.json()["turns"] == 2


def test_a_damaged_database_is_an_error_and_stays_as_it_is(home: Home, client: httpx.Client) -> None:
    damaged = b"this is no database " * 400
    home.path.write_bytes(damaged)
    for response in (client.get(ALL), client.post(ALL, json={"turns": [TURN]}), client.delete(f"{ALL}/1")):
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "history_unavailable"
        assert str(home.path) not in response.text
    assert home.path.read_bytes() == damaged


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE turns SET created = 1e300, mark = 'newer'",
        "UPDATE conversations SET created = 'noon', updated = 9e999",
        "UPDATE conversations SET created = -1e12, updated = -9e999",
    ],
)
def test_invalid_rows_can_be_read(home: Home, client: httpx.Client, change: str) -> None:
    begun = made(client)
    with sqlite3.connect(home.path) as other:
        other.execute(change)
    other.close()
    assert listed(client)[0]["title"] == "What is a fox?"
    assert client.get(f"{ALL}/{begun['id']}").json()["turns"][0]["answer"] == "An animal."


def test_the_log_has_no_contents(home: Home, client: httpx.Client) -> None:
    made(client, {"question": "unmentionable", "answer": "x"})
    client.get(ALL, params={"search": "unmentionable"})
    assert "unmentionable" not in home.server.log.read_text()


# ---- without


def test_a_server_without_history_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    with Sessions(sessions_path()) as sessions:
        sessions.keep(conversation(("first", "one")))
    with serving(tmp_path, "demo", "--no-save") as server, server.client() as client:
        assert client.get(ALL).json() == {"saved": False, "more": False, "conversations": []}
        for method, end in (("GET", "/1"), ("DELETE", "/1"), ("POST", ""), ("POST", "/1/turns")):
            response = client.request(method, f"{ALL}{end}", json={"turns": [TURN]})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "no_history"
    with Sessions(sessions_path()) as sessions:
        assert [line.turns for line in sessions.summaries()] == [1]


def test_other_machines_get_no_history_unless_it_is_shared(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text(KEY)

    def history(**options: Any) -> Path | None:
        command = ServeCommand(model="demo", api_key_file=str(tmp_path / "key.txt"), **options)
        settings: ServeSettings = command.with_history(command.with_key())
        return settings.history

    assert history() == history(host="::1") == sessions_path()
    assert history(host="0.0.0.0") is None
    assert history(host="0.0.0.0", share_history=True) == sessions_path()
    assert history(no_save=True) is None
    with pytest.raises(UsageError, match="exclude each other"):
        history(no_save=True, share_history=True)


def test_a_copy_holds_the_turns_up_to_one_and_the_model_of_the_last() -> None:
    talk = Conversation(
        [Turn("a", "1", model="x", key=4), Turn("b", "2", model="y", key=9)], title="t", model="y"
    )
    copied = talk.copy(4)
    assert ([turn.key for turn in copied.turns], copied.model, copied.title) == ([None], "x", "t")
    assert talk.copy(5).turns == []
    assert [turn.question for turn in talk.copy().turns] == ["a", "b"]
