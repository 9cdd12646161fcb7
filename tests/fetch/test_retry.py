"""Downloads over bad connections and edited repositories: what has come is not fetched again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli
from hub_server import COMMIT, REPOSITORY, Faults, Hub
from library_support import STORE, body_bytes, finished, models, shards, sources, wait_until

from moechat.fetch import retry
from moechat.fetch.retry import RetryPolicy
from moechat.store.store import Store

OTHER = "f" * 40


def stop_at(share: float, hub: Hub, program: Cli) -> int:
    """Interrupt a download; returns how many bytes of shards are kept."""
    reached = int(share * sum(shards(hub).values()))
    hub.faults = Faults(pace_s=0.005, reached=reached, at_reached=lambda: os.kill(os.getpid(), signal.SIGINT))
    done = program.call("download", REPOSITORY)
    assert done.status == 130, done.err
    assert "are here or converted; the same command goes on" in done.err
    hub.faults = Faults()
    hub.requests.clear()
    return sum(path.stat().st_size for path in sources(program).rglob("*.part"))


def test_a_new_commit_with_the_same_weights_fetches_no_shard_again(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    stop_at(0.5, hub, inside)
    before = len(list(sources(inside).glob("*@*")))
    files = hub.repositories[REPOSITORY]
    card = files["README.md"]
    try:
        files["README.md"] = card + b"A word more.\n"
        hub.commit = OTHER
        done = inside.call("download", REPOSITORY)
        assert done.status == 0, done.err
        assert body_bytes(hub) < 0.75 * sum(shards(hub).values())
        assert Store.open(models(inside) / STORE).manifest.source.revision == OTHER
        assert (models(inside) / STORE / "README.md").read_bytes() == files["README.md"]
        assert before == 1
        assert not any(path.is_dir() for path in sources(inside).iterdir())
        hub.requests.clear()
        hub.commit = COMMIT
        again = inside.call("download", REPOSITORY)
        assert "is here already" in again.err
        assert body_bytes(hub) == 0
        assert Store.open(models(inside) / STORE).manifest.source.revision == COMMIT
    finally:
        files["README.md"] = card


def test_a_login_page_does_not_damage_partial_files(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    kept = stop_at(0.3, hub, inside)
    assert kept > 0
    hub.faults.page = b"<html>please log in</html>"
    done = inside.call("download", REPOSITORY)
    assert done.status == 3, done.err
    assert "a network that requires a login in a browser" in done.err
    assert sum(path.stat().st_size for path in sources(inside).rglob("*.part")) == kept
    hub.faults = Faults()
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_after_the_first_byte_requests_are_retried_through_an_outage(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_MAX_OUTAGE_S", 600.0)
    hub.faults.busy = 6  # more than the tries that a hub gets which never answered
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_a_hub_that_never_answers_fails_soon(inside: Cli, hub: Hub) -> None:
    hub.faults = Faults(status=503)
    done = inside.call("download", REPOSITORY)
    assert (done.status, "failed with status 503" in done.err) == (5, True), done.err
    wait_until(lambda: len([request for request in hub.requests if "/api/models/" in request.path]) == 5)


def test_a_busy_model_request_is_retried(inside: Cli, hub: Hub) -> None:
    hub.faults = Faults(status=429, headers={"Retry-After": "0"}, times=2)
    done = inside.call("download", REPOSITORY, "--dry-run")
    assert done.status == 0, done.err
    assert done.err.count("the hub answers with status 429; again in") == 2


class Answer:
    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.response = self
        self.status_code = status
        self.headers = headers


@pytest.mark.parametrize(
    ("problem", "pause"),
    [
        (Answer(429, {"retry-after": "120"}), 120.0),
        (Answer(503, {"retry-after": "7"}), 7.0),
        (Answer(429, {"retry-after": "601"}), None),
        (Answer(429, {"retry-after": "²"}), 0.5),
        (Answer(429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), 0.5),
        (Answer(429, {"ratelimit": '"resolvers";r=0;t=250'}), 250.0),
        (Answer(404, {}), None),
        (Answer(403, {"retry-after": "1"}), None),
    ],
)
def test_retries_wait_as_long_as_the_hub_says(problem: Any, pause: float | None) -> None:
    assert RetryPolicy().start_file().pause(problem) == pause


def test_waits_double_and_are_reset_by_progress() -> None:
    failures = RetryPolicy().start_file()
    busy = Answer(503, {})
    assert [failures.pause(busy) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]
    failures.reset()
    assert failures.pause(busy) == 0.5
    policy = RetryPolicy()
    policy.record_progress()
    later = policy.start_file()
    assert [later.pause(busy) for _ in range(9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_offline_a_downloaded_model_needs_no_hub(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert inside.call("download", REPOSITORY).status == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    here = inside.call("download", REPOSITORY)
    assert here.status == 0, here.err
    assert f"{REPOSITORY} ({COMMIT[:12]}) with 4 bits is here already" in here.err
    assert "the hub was not checked for a newer version" in here.err
    other = inside.call("run", REPOSITORY, "hi", "--bits", "8")
    assert (other.status, f"{REPOSITORY} with 8 bits is not in the library" in other.err) == (5, True), (
        other.err
    )


def test_oversized_small_files_are_refused_before_they_are_fetched(inside: Cli, hub: Hub) -> None:
    siblings = [
        {"rfilename": "config.json", "size": 100 << 20, "blobId": "a" * 40},
        {
            "rfilename": "model.safetensors",
            "size": 10,
            "lfs": {"size": 10, "sha256": "b" * 64, "pointerSize": 1},
        },
    ]
    hub.say = {"siblings": siblings}
    done = inside.call("download", REPOSITORY)
    assert (done.status, "config.json of tiny/moe-chat@0123456789ab has 104857600 bytes" in done.err) == (
        3,
        True,
    )
    siblings[0]["size"] = 100
    hub.say["siblings"].append({"rfilename": "README.md", "size": 10**12, "blobId": "a" * 40})
    done = inside.call("download", REPOSITORY)
    assert (done.status, "README.md of" in done.err) == (3, True), done.err
    assert not [request for request in hub.requests if "/resolve/" in request.path]


def test_messages_name_the_repository_and_no_temporary_directory(inside: Cli, hub: Hub) -> None:
    files = dict(hub.repositories[REPOSITORY])
    try:
        for name, content in (
            ("config.json", b'{"model_type": "nobody-knows", "auto_map": {"AutoConfig": "x.Y"}}'),
            ("config.json", b"{"),
            ("model.safetensors.index.json", b"[]"),
        ):
            hub.repositories[REPOSITORY] = {**files, name: content}
            done = inside.call("download", REPOSITORY)
            assert done.status == 3, done.err
            assert REPOSITORY in done.err, done.err
            assert "/tmp" not in done.err, done.err
    finally:
        hub.repositories[REPOSITORY] = files


def test_a_finished_download_prints_its_result(inside: Cli, hub: Hub, tmp_path: Path) -> None:
    done = inside.call("download", REPOSITORY)
    assert done.status == 0
    last = done.err.splitlines()[-2:]
    assert last[0].startswith(f"{REPOSITORY}@{COMMIT[:12]} is here after ")
    assert last[0].endswith(f", in {models(inside) / STORE}")
    assert last[1] == f"moechat run {REPOSITORY} talks to it"


def test_an_error_common_to_all_headers_is_reported_once(inside: Cli, hub: Hub) -> None:
    hub.faults.busy_headers = 5
    done = inside.call("download", REPOSITORY, "--dry-run")
    assert done.status == 0, done.err
    assert done.err.count("the hub answers with status 503; trying again in 0.01 s") == 1
