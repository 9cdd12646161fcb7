"""Hubs that say what no hub says, and variables that make no sense: words, and nothing is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli
from hub_server import COMMIT, REPOSITORY, Hub
from library_support import shard_requests

from moechat.errors import MoechatError
from moechat.fetch.repository import fetch_repository


@pytest.mark.parametrize(
    "sha", ["/../../../..", "..", "0123456789ab", f"{COMMIT}x", COMMIT.upper(), "", None, 7, "../" * 8]
)
def test_an_invalid_commit_is_never_used_as_a_path(inside: Cli, hub: Hub, sha: Any) -> None:
    precious = inside.home / "precious"
    precious.mkdir(parents=True)
    hub.say = {"sha": sha}
    done = inside.call("download", REPOSITORY)
    assert done.status in (3, 5), done.err
    assert "Traceback" not in done.err
    assert precious.is_dir()
    assert not (inside.home / "data" / "sources").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../evil"},
        {"id": 7},
        {"siblings": 5},
        {"siblings": [{"rfilename": 7}]},
        {"siblings": [{"rfilename": "config.json", "size": "12"}]},
        {"siblings": [{"rfilename": "config.json", "size": -1}]},
        {"siblings": [{"rfilename": "config.json", "size": 1 << 60}]},
        {"siblings": [{"rfilename": "config.json", "size": 3, "blobId": 7}]},
        {"siblings": [{"rfilename": "config.json", "size": 3, "blobId": None}]},
        {"siblings": [{"rfilename": "m", "size": 3, "lfs": {"size": 3, "sha256": "x", "pointerSize": 1}}]},
        {"cardData": [1]},
        {"lastModified": 5},
    ],
    ids=lambda change: json.dumps(change)[:50],
)  # fmt: skip
def test_a_malformed_response_is_an_error_of_the_hub(inside: Cli, hub: Hub, change: dict[str, Any]) -> None:
    hub.say = change
    done = inside.call("download", REPOSITORY)
    assert done.status in (3, 5), done.err
    assert done.err.startswith("error: ")
    assert "MOECHAT_DEBUG" not in done.err


def test_a_response_nested_too_deeply_is_an_error_of_the_hub(inside: Cli, hub: Hub) -> None:
    hub.say_raw = b"[" * 200_000
    done = inside.call("download", REPOSITORY)
    assert (done.status, "does not answer like a model hub" in done.err) == (5, True), done.err


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HTTP_PROXY": ":::", "NO_PROXY": ""}, "hint: check HTTP_PROXY"),
        ({"HTTP_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": ""}, "hint: SOCKS proxies need one more package"),
        ({"ALL_PROXY": "foo://bar", "NO_PROXY": ""}, "hint: check ALL_PROXY"),
        ({"HF_ENDPOINT": "http://[::1"}, "error: a variable of the hub has a wrong value: Invalid IPv6"),
        ({"HF_ENDPOINT": "http://127.0.0.1:99999999"}, "error: HF_ENDPOINT is not an address"),
        (
            {"HF_ENDPOINT": "http://me:secretpw@[::1"},
            "error: a variable of the hub has a wrong value: Invalid IPv6",
        ),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "abc"}, "error: a variable of the hub has a wrong value"),
        ({"HF_TOKEN": "", "HF_TOKEN_PATH": "/"}, "error: the saved token of the hub cannot be read"),
        ({"HF_TOKEN": "hf_secretpw\u200b"}, "contains characters that no token has"),
        ({"SSL_CERT_FILE": "/nonexistent"}, "hint: check SSL_CERT_FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_invalid_variables(program: Cli, variables: dict[str, str], said: str) -> None:
    program.extra.update(variables)
    done = program.run("download", REPOSITORY)
    assert done.status == 2, done.err
    assert said in done.err
    assert "secretpw" not in done.err


def test_a_password_in_the_address_is_never_shown(program: Cli, hub: Hub) -> None:
    address = hub.endpoint.replace("//", "//me:epw12@")
    program.extra["HF_ENDPOINT"] = address
    for model in (f"{REPOSITORY}@nope", "tiny/none", REPOSITORY):
        hub.faults.gated = model == REPOSITORY
        done = program.run("download", model)
        assert done.status == 3, done.err
        assert hub.endpoint in done.err or "127.0.0.1" in done.err
        assert "epw12" not in done.err


def test_run_refuses_a_repository_without_a_tokenizer_before_its_weights(inside: Cli, hub: Hub) -> None:
    textless = "tiny/textless"
    hub.repositories[textless] = {
        name: data
        for name, data in hub.repositories[REPOSITORY].items()
        if not name.startswith(("tokenizer", "vocab", "chat_template"))
    }
    try:
        done = inside.call("run", textless, "--yes", "hello")
        assert done.status == 2
        assert f"{textless} " in done.err
        assert "has no tokenizer" in done.err
        assert shard_requests(hub) == []
        planned = inside.call("download", textless, "--dry-run")
        assert planned.status == 0
        assert "no tokenizer" in planned.out.decode()
    finally:
        del hub.repositories[textless]
    assert "no tokenizer" not in inside.call("download", REPOSITORY, "--dry-run").out.decode()


def test_a_title_is_the_repository_at_its_revision(inside: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = [fetch_repository(REPOSITORY, revision).title for revision in (None, "main", COMMIT)]
    assert titles == [
        f"{REPOSITORY}@{COMMIT[:12]}",
        f"{REPOSITORY}@main ({COMMIT[:12]})",
        f"{REPOSITORY}@{COMMIT[:12]}",
    ]


def test_invalid_repository_names_are_refused() -> None:
    from moechat.hub.model_ref import require_repository

    for name in ("a", "a/b/c", "../b", "a/..", "a--b/c", "a/b.git"):
        with pytest.raises(MoechatError, match="nor a repository name"):
            require_repository(name)


def test_a_name_with_parent_directories_does_not_touch_the_home(inside: Cli, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    done = inside.call("download", "../outside")
    assert done.status != 0
    assert outside.is_dir()
