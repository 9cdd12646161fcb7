"""``moechat download``: what arrives is the store, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from cli_support import PATIENCE_S, Cli, Result
from hub_server import COMMIT, REPOSITORY, Faults, Hub

from moechat.cli.progress import LoadProgress
from moechat.models.mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.lock import exclusive_lock
from moechat.store.store import Store

STORE = "tiny--moe-chat-4bit"


def models(program: Cli) -> Path:
    return program.home / "data" / "models"


def sources(program: Cli) -> Path:
    return program.home / "data" / "sources"


def shards(hub: Hub) -> dict[str, int]:
    return {
        name: len(data)
        for name, data in hub.repositories[REPOSITORY].items()
        if name.endswith(".safetensors")
    }


def hashes(store: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in Store.open(store).manifest.files.items()}


def shard_requests(hub: Hub) -> list[str]:
    """Shards of which more than the header was asked for."""
    return [
        request.path.rpartition("/")[2]
        for request in hub.requests
        if request.path.startswith("/cdn/") and not request.range.startswith("bytes=0-")
    ]


def body_bytes(hub: Hub) -> int:
    """Bytes of shards that were sent, headers apart."""
    return sum(
        request.sent
        for request in hub.requests
        if request.path.startswith("/cdn/") and not request.range.startswith("bytes=0-")
    )


def disk_usage(directory: Path) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


@pytest.fixture(scope="session")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the store that converting the directory gives."""
    opened = Checkpoint.open(checkpoint)
    destination = tmp_path_factory.mktemp("reference") / "store"
    convert(opened, plan_checkpoint(opened), destination, bits=4, source_name="reference")
    return hashes(destination)


def finished(program: Cli, done: Result, reference: dict[str, str]) -> None:
    assert done.status == 0, done.err
    assert hashes(models(program) / STORE) == reference
    Store.open(models(program) / STORE).verify()
    assert sorted(path.name for path in models(program).iterdir()) == [STORE]
    assert list(sources(program).iterdir()) == []


def test_what_is_downloaded_is_the_store_that_converting_the_directory_gives(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert done.out == b""
    source = Store.open(models(inside) / STORE).manifest.source
    assert (source.name, source.revision) == (REPOSITORY, COMMIT)
    assert sorted(shard_requests(hub)) == sorted(shards(hub))
    asked = {request.path.rpartition("/")[2] for request in hub.requests}
    assert not asked & {"pytorch_model.bin", "modeling_evil.py"}
    hub.requests.clear()
    again = inside.call("pull", REPOSITORY)
    assert again.status == 0
    assert "is here already" in again.err
    assert [request.path for request in hub.requests if "/resolve/" in request.path] == []


def test_a_dry_run_says_what_it_takes_and_leaves_nothing(inside: Cli, hub: Hub) -> None:
    done = inside.call("download", REPOSITORY + "@main", "--dry-run", "--bits", "8")
    assert done.status == 0, done.err
    text = done.out.decode()
    assert f"{REPOSITORY}@main ({COMMIT[:12]}), licence apache-2.0" in text
    assert "2.2 MiB in 5 files of weights" in text
    for word in ("store", "8 bits", "free", "memory", "available", "at 100 Mbit/s", "converting"):
        assert word in text
    assert not inside.home.exists()
    assert shard_requests(hub) == []


def test_a_download_interrupted_killed_and_cut_goes_on_where_it_was(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    running: list[subprocess.Popen[bytes]] = []
    hub.faults = Faults(
        pace_s=0.01, reached=1_300_000, at_reached=lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    interrupted = inside.call("download", REPOSITORY)
    assert interrupted.status == 130
    assert "Traceback" not in interrupted.err
    layers = list((models(inside) / f".{STORE}.partial" / "store").glob("experts-*"))
    assert layers  # what the first shards were good for is converted
    hub.faults = Faults(pace_s=0.01, reached=800_000, at_reached=lambda: running[0].kill())
    running.append(inside.start("download", REPOSITORY))
    running[0].communicate(timeout=PATIENCE_S)
    assert running[0].returncode == -signal.SIGKILL
    assert "unfinished downloads" in inside.call("list").err
    hub.faults = Faults(cuts=1, cut_after=100_000)
    finished(inside, inside.call("download", REPOSITORY), reference)
    # Every byte once, except what had not reached the disk when the program ended.
    assert body_bytes(hub) < 1.3 * sum(shards(hub).values())
    continued = [request for request in hub.requests if "/cdn/" in request.path and request.range[-1:] == "-"]
    assert len(continued) >= 3


def test_a_connection_cut_three_times_is_taken_up_again(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    hub.faults = Faults(cuts=3, cut_after=150_000)
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert done.err.count("trying again") == 3
    assert body_bytes(hub) == sum(shards(hub).values())


def test_a_server_without_ranges_sends_all_of_it_again(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    hub.faults = Faults(cuts=1, cut_after=150_000, ignore_ranges=True)
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_a_busy_hub_is_asked_again(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    hub.faults.busy = 3
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert "status 503; trying again" in done.err


def test_a_stalled_connection_ends_and_the_next_run_goes_on(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.hub import transfer

    monkeypatch.setattr(transfer, "_TRIES", 2)
    hub.faults = Faults(stall=True, cut_after=0)
    done = inside.call("download", REPOSITORY)
    assert done.status == 5
    assert "has stalled" in done.err
    assert "what has arrived is kept" in done.err
    hub.faults = Faults()
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_the_disk_never_holds_two_copies(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    show = LoadProgress.__call__

    def watch(self: LoadProgress, report: object) -> None:
        nonlocal most
        most = max(most, disk_usage(inside.home))
        show(self, report)  # type: ignore[arg-type]

    planned = inside.call("download", REPOSITORY, "--dry-run").out.decode()
    monkeypatch.setattr(LoadProgress, "__call__", watch)
    finished(inside, inside.call("download", REPOSITORY), reference)
    store = disk_usage(models(inside) / STORE)
    sizes = sorted(shards(hub).values())
    # The layers of this model lie across two shards each; dense tensors that were put aside are small.
    assert most < store + sizes[-1] + sizes[-2] + 100_000
    assert most < sum(sizes)
    assert "3.4 MiB while it is made" in planned  # the manifest's room, 2 MiB, is most of what was not needed


def test_a_disk_that_is_too_small_is_refused_with_numbers_before_the_first_shard(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 1_000_000, 1_000_000))
    done = inside.call("download", REPOSITORY)
    assert done.status == 4
    assert "needs 3.4" in done.err
    assert "977 KiB are free" in done.err
    assert "hint: free 2.4" in done.err
    assert shard_requests(hub) == []


def test_a_wrong_hash_is_refused_and_finished_layers_are_kept(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    name = sorted(shards(hub))[2]
    hub.faults.alter = name
    done = inside.call("download", REPOSITORY)
    assert done.status == 3
    right = hashlib.sha256(hub.repositories[REPOSITORY][name]).hexdigest()
    assert f"{name} (447432 bytes) was altered on its way" in done.err
    assert f"the hub says {right[:12]}" in done.err
    assert not (models(inside) / STORE).exists()
    hub.reset()
    finished(inside, inside.call("download", REPOSITORY), reference)
    assert sorted(shards(hub))[0] not in shard_requests(hub)


def test_a_beginning_that_rotted_is_fetched_again(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    name = sorted(shards(hub))[0]
    directory = sources(inside) / f"tiny--moe-chat@{COMMIT[:12]}"
    directory.mkdir(parents=True)
    (directory / f"{name}.part").write_bytes(b"\0" * 1000)
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert "it is downloaded again" in done.err


def test_a_file_of_another_size_is_refused(inside: Cli, hub: Hub) -> None:
    name = sorted(shards(hub))[1]
    hub.faults.grow = name
    done = inside.call("download", REPOSITORY)
    assert done.status == 3
    assert f"{name} has 472449 bytes or more where it comes from, the hub says 472448" in done.err


def test_a_kept_source_serves_other_bits_and_is_a_checkpoint(inside: Cli, hub: Hub, checkpoint: Path) -> None:
    assert inside.call("download", REPOSITORY, "--keep-source").status == 0
    kept = sources(inside) / f"tiny--moe-chat@{COMMIT[:12]}"
    assert Checkpoint.open(kept).keys() == Checkpoint.open(checkpoint).keys()
    hub.requests.clear()
    done = inside.call("download", REPOSITORY, "--bits", "8")
    assert done.status == 0, done.err
    assert shard_requests(hub) == []
    assert (models(inside) / "tiny--moe-chat-8bit").is_dir()
    assert Checkpoint.open(kept).keys() == Checkpoint.open(checkpoint).keys()
    assert "unfinished" not in inside.call("list").err
    assert inside.call("rm", REPOSITORY, "--leftovers", "--yes").status == 0
    assert kept.is_dir()


def test_shards_in_the_cache_of_other_tools_are_used_and_stay(
    inside: Cli, hub: Hub, checkpoint: Path, reference: dict[str, str]
) -> None:
    snapshot = Path(inside.extra["HF_HOME"], "hub", "models--tiny--moe-chat", "snapshots", COMMIT)
    shutil.copytree(checkpoint, snapshot)
    finished(inside, inside.call("download", REPOSITORY), reference)
    assert shard_requests(hub) == []
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(
        path.name for path in checkpoint.iterdir()
    )


def test_a_repository_with_only_pickles_is_refused(inside: Cli, hub: Hub) -> None:
    hub.repositories["tiny/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    done = inside.call("download", "tiny/pickled")
    assert done.status == 3
    assert "they are pickles (pytorch_model.bin)" in done.err


@pytest.mark.parametrize(
    ("status", "headers", "token", "code", "message", "hint"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, "", 3, "no public repository", "check the spelling"),
        (403, {"X-Error-Code": "GatedRepo"}, "", 3, "is gated", "accept the terms at"),
        (403, {"X-Error-Code": "GatedRepo"}, "hf_secret", 3, "your token has no access", "accept the terms"),
        (401, {}, "hf_secret", 3, "does not accept the token", "it may have expired"),
        (403, {}, "hf_secret", 3, "does not allow access", "needs read access"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "", 3, "has no revision", "commits/main"),
        (429, {"Retry-After": "120"}, "", 5, "refuses more requests", "in 120 seconds"),
        (500, {}, "", 5, "failed with status 500", "later"),
        (200, {}, "", 5, "does not answer like a model hub", "HF_ENDPOINT"),
    ],
)
def test_every_refusal_of_the_hub_has_its_own_words(
    inside: Cli,
    hub: Hub,
    status: int,
    headers: dict[str, str],
    token: str,
    code: int,
    message: str,
    hint: str,
) -> None:
    inside.extra["HF_TOKEN"] = token
    hub.faults = Faults(status=status, headers=headers)
    done = inside.call("download", REPOSITORY)
    assert done.status == code, done.err
    error, _, rest = done.err.partition("hint: ")
    assert message in error
    assert hint in rest
    assert "hf_secret" not in done.err
    assert not inside.home.exists()


def test_a_gated_model_is_shown_but_not_given(inside: Cli, hub: Hub) -> None:
    hub.faults.gated = True
    done = inside.call("download", REPOSITORY)
    assert done.status == 3
    assert f"{REPOSITORY} is gated: its makers ask who you are, and no token is set" in done.err
    assert f"accept the terms at {hub.endpoint}/{REPOSITORY}" in done.err
    assert not inside.home.exists()


def test_a_hub_that_is_not_there_a_proxy_and_offline_mode_have_their_own_words(
    program: Cli, hub: Hub
) -> None:
    program.extra["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = program.run("download", "mixtral")
    assert done.status == 5
    assert "127.0.0.1:9 cannot be reached" in done.err
    program.extra["HF_ENDPOINT"] = "hub.example"
    done = program.run("download", "mixtral")
    assert done.status == 2
    assert "HF_ENDPOINT is hub.example" in done.err
    program.extra |= {
        "HTTP_PROXY": "http://user:secret@127.0.0.1:9",
        "NO_PROXY": "",
        "HF_ENDPOINT": hub.endpoint,
    }
    done = program.run("download", "mixtral")
    assert done.status == 5
    assert "proxy" in done.err
    assert "secret" not in done.err
    program.extra["HF_HUB_OFFLINE"] = "1"
    for arguments in (
        ["download", "mixtral"],
        ["run", "mixtral", "hello"],
        ["run", "mixtral", "hello", "--yes"],
    ):
        done = program.run(*arguments)
        assert done.status == 5
        assert "HF_HUB_OFFLINE forbids the network" in done.err


def test_the_token_goes_to_the_hub_and_nowhere_else(inside: Cli, hub: Hub) -> None:
    inside.extra["HF_TOKEN"] = "hf_secret"
    assert inside.call("download", REPOSITORY).status == 0
    assert {request.token for request in hub.requests if "/api/models" in request.path} == {
        "Bearer hf_secret"
    }
    for path in inside.home.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes()


def test_names_that_are_no_repositories_are_refused(inside: Cli, checkpoint: Path) -> None:
    assert inside.call("download", "demo").status == 2
    assert inside.call("download", str(checkpoint)).status == 2
    assert inside.call("download", "mixtrl").err.count("did you mean mixtral?") == 1
    assert inside.call("download", REPOSITORY, "--bits", "5").status == 2


def test_run_without_a_terminal_says_what_to_type_and_with_yes_it_answers(inside: Cli, hub: Hub) -> None:
    refused = inside.call("run", REPOSITORY, "hello")
    assert refused.status == 3
    assert f"moechat download {REPOSITORY}, or --yes" in refused.err
    assert hub.requests == []
    done = inside.call(
        "run", REPOSITORY, "hello", "--yes", "--json", "--max-tokens", "3", "--temperature", "0"
    )
    assert done.status == 0, done.err
    assert len(json.loads(done.out)["tokens"]) == 3
    assert "downloaded and converted in" in done.err


def test_run_asks_and_a_no_downloads_nothing(inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.cli.run.can_ask", lambda: True)
    monkeypatch.setattr("moechat.cli.run.read_prompt", lambda *_args, **_more: None)
    done = inside.call("run", REPOSITORY, stdin=b"what?\nn\n")
    assert done.status == 3
    assert done.err.count("Download and convert it now? [Y/n]") == 2
    assert "2.2 MiB in 5 files" in done.err
    assert "nothing was downloaded" in done.err
    assert shard_requests(hub) == []


def test_run_on_a_terminal_asks_once_and_ends_in_the_chat(program: Cli) -> None:
    terminal = program.terminal("run", REPOSITORY)
    terminal.expect("Download and convert it now")
    terminal.sendline("")
    terminal.expect(">>> ")
    terminal.sendeof()
    terminal.wait()
    assert terminal.exitstatus == 0


def test_two_downloads_of_one_model_wait_for_each_other(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    sources(inside).mkdir(parents=True)
    held = threading.Event()
    meanwhile: list[list[str]] = []

    def hold() -> None:
        with exclusive_lock(sources(inside) / f".tiny--moe-chat@{COMMIT[:12]}.lock"):
            held.set()
            time.sleep(0.8)
            meanwhile.append(shard_requests(hub))

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    finished(inside, inside.call("download", REPOSITORY), reference)
    other.join()
    assert meanwhile == [[]]
