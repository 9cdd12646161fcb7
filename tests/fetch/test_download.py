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
from pathlib import Path

import pytest
from cli_support import PATIENCE_S, Cli
from hub_server import COMMIT, REPOSITORY, Faults, Hub
from library_support import (
    STORE,
    before_each_expert,
    body_bytes,
    disk_usage,
    events,
    finished,
    models,
    planned,
    pretend_free,
    shard_requests,
    shards,
    shards_until,
    sources,
    wait_until,
)

from moechat.store.checkpoint import Checkpoint
from moechat.store.lock import exclusive_lock
from moechat.store.store import Store


def test_a_download_gives_the_same_store_as_converting_the_directory(
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


def test_a_dry_run_shows_sizes_and_writes_nothing(inside: Cli, hub: Hub) -> None:
    done = inside.call("download", REPOSITORY + "@main", "--dry-run", "--bits", "8")
    assert done.status == 0, done.err
    text = done.out.decode()
    assert f"{REPOSITORY}@main ({COMMIT[:12]}), licence apache-2.0" in text
    assert "2.2 MiB in 5 files of weights" in text
    for word in ("store", "8 bits", "free", "memory", "available", "at 100 Mbit/s", "converting"):
        assert word in text
    assert not inside.home.exists()
    assert shard_requests(hub) == []


def test_a_download_interrupted_killed_and_cut_is_resumed(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    running: list[subprocess.Popen[bytes]] = []
    # The fourth shard is asked for when the first layer, which needs two, is finished.
    hub.faults = Faults(
        pace_s=0.01, reached=1_450_000, at_reached=lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    interrupted = inside.call("download", REPOSITORY)
    assert interrupted.status == 130
    assert "Traceback" not in interrupted.err
    layers = list((models(inside) / f".{STORE}.partial" / "store").glob("experts-*"))
    assert layers  # what the first shards were good for is converted
    hub.faults = Faults(pace_s=0.01, reached=500_000, at_reached=lambda: running[0].kill())
    running.append(inside.start("download", REPOSITORY, forked=True))
    running[0].communicate(timeout=PATIENCE_S)
    assert running[0].returncode == -signal.SIGKILL
    assert "unfinished downloads" in inside.call("list").err
    hub.faults = Faults(cuts=1, cut_after=100_000)
    resumed = inside.call("download", REPOSITORY)
    finished(inside, resumed, reference)
    assert resumed.err.count("is here after ") == 1
    # Every byte once, except what had not reached the disk when the program ended.
    assert body_bytes(hub) < 1.3 * sum(shards(hub).values())
    continued = [request for request in hub.requests if "/cdn/" in request.path and request.range[-1:] == "-"]
    assert len(continued) >= 3


def test_a_connection_cut_three_times_is_resumed(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    hub.faults = Faults(cuts=3, cut_after=150_000)
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert done.err.count("trying again") == 3
    assert body_bytes(hub) == sum(shards(hub).values())


def test_a_server_without_ranges_sends_the_whole_file_again(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    hub.faults = Faults(cuts=1, cut_after=150_000, ignore_ranges=True)
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_requests_to_a_busy_hub_are_retried(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    hub.faults.busy = 3
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert "status 503; trying again" in done.err


def test_a_stalled_connection_times_out_and_the_next_run_resumes(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.fetch import retry

    monkeypatch.setattr(retry, "_MAX_OUTAGE_S", 0.3)
    hub.faults = Faults(stall=True, cut_after=0)
    done = inside.call("download", REPOSITORY)
    assert done.status == 5
    assert "has stalled" in done.err
    assert "what has arrived is kept" in done.err
    hub.faults = Faults()
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_json_prints_the_plan_and_then_the_result(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    plan = planned(inside)
    assert shard_requests(hub) == []
    assert plan["status"] == "planned"
    assert plan["name"] == plan["repository"] == REPOSITORY
    assert (plan["revision"], plan["commit"], plan["licence"]) == (None, COMMIT, "apache-2.0")
    assert (plan["bits"], plan["weight_files"], plan["files"]) == (4, 5, 12)
    assert plan["download_bytes"] == plan["missing_bytes"] > sum(shards(hub).values())
    assert plan["download_s"] == plan["missing_bytes"] * 8 / 100e6
    assert plan["convert_s"] > 0
    assert plan["ram_least_bytes"] < plan["ram_all_bytes"]
    assert plan["ram_available_bytes"] > 0
    assert plan["store_bytes"] < plan["disk_bytes"] < plan["free_bytes"]
    assert plan["destination"] == str(models(inside) / STORE)
    assert (plan["overlap"], plan["finished"]) == (True, False)
    changing = ("free_bytes", "ram_available_bytes", "ram_least_bytes", "ram_all_bytes", "convert_s", "speed")

    done = inside.call("download", REPOSITORY, "--json", "--quiet")
    finished(inside, done, reference)
    assert done.err == ""
    result = json.loads(done.out)
    assert list(result) == list(plan)
    assert {key: value for key, value in result.items() if key not in changing} == {
        **{key: value for key, value in plan.items() if key not in changing},
        "status": "finished",
        "finished": True,
    }

    named = json.loads(inside.call("download", f"{REPOSITORY}@main", "--dry-run", "--json").out)
    assert (named["name"], named["revision"], named["commit"]) == (f"{REPOSITORY}@main", "main", COMMIT)


def test_json_reports_a_model_already_downloaded_and_errors_print_none(inside: Cli, hub: Hub) -> None:
    assert inside.call("download", REPOSITORY).status == 0
    hub.requests.clear()
    again = inside.call("download", REPOSITORY, "--json")
    assert "is here already" in again.err
    result = json.loads(again.out)
    assert (result["status"], result["finished"]) == ("already here", True)
    assert (result["missing_bytes"], result["disk_bytes"], result["overlap"]) == (0, 0, False)
    assert shard_requests(hub) == []
    assert planned(inside)["finished"]
    refused = inside.call("download", "tiny/none", "--json")
    assert (refused.status, refused.out) == (3, b"")


@pytest.mark.parametrize("ahead", [True, False])
def test_disk_use_stays_within_the_plan_and_below_two_copies(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    plan = planned(inside)
    least = plan["disk_bytes"]
    if not ahead:
        pretend_free(monkeypatch, plan["disk_bytes"] - 1)
        plan = planned(inside)
    assert plan["overlap"] is ahead
    sizes = sorted(shards(hub).values())
    most = 0
    sync = os.fsync

    def all_has_come(layer: int, _expert: int) -> None:
        wait_until(lambda: len(events(hub, "sent")) >= min(5, shards_until(hub, layer) + ahead))

    def watch(descriptor: int) -> None:  # a file has got all its bytes
        nonlocal most
        most = max(most, disk_usage(inside.home))
        sync(descriptor)

    before_each_expert(monkeypatch, all_has_come)
    monkeypatch.setattr(os, "fsync", watch)
    finished(inside, inside.call("download", REPOSITORY), reference)
    # The manifest's room, 2 MiB, is most of what was not needed.
    assert most <= plan["disk_bytes"] < most + (2 << 20) + 100_000
    store = disk_usage(models(inside) / STORE)
    # The layers of this model lie across two shards each; dense tensors that were put aside are small.
    assert most < store + sum(sizes[-3 if ahead else -2 :]) + 100_000
    if not ahead:
        assert most < sum(sizes)
        assert least - sizes[-1] <= plan["disk_bytes"] < least


def test_a_disk_too_small_is_refused_before_the_first_shard(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_free(monkeypatch, 1_000_000)
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


def test_a_corrupted_partial_file_is_fetched_again(inside: Cli, hub: Hub, reference: dict[str, str]) -> None:
    name = sorted(shards(hub))[0]
    directory = sources(inside) / f"tiny--moe-chat@{COMMIT[:12]}"
    directory.mkdir(parents=True)
    (directory / f"{name}.part").write_bytes(b"\0" * 1000)
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert "it is downloaded again" in done.err


def test_a_file_of_the_wrong_size_is_refused(inside: Cli, hub: Hub) -> None:
    name = sorted(shards(hub))[1]
    hub.faults.grow = name
    done = inside.call("download", REPOSITORY)
    assert done.status == 3
    assert f"{name} has at least 472449 bytes on the server, the hub says 472448" in done.err


def test_a_kept_source_is_a_checkpoint_and_serves_other_bits(inside: Cli, hub: Hub, checkpoint: Path) -> None:
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


def test_shards_in_the_huggingface_cache_are_used_and_kept(
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
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            "hf_secret",
            3,
            "does not accept the token",
            "it may have expired",
        ),
        (403, {}, "hf_secret", 3, "does not allow access", "needs read access"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "", 3, "has no revision", "commits/main"),
        (429, {"Retry-After": "120"}, "", 5, "refuses more requests", "in 120 seconds"),
        (500, {}, "", 5, "failed with status 500", "later"),
        (200, {}, "", 5, "does not answer like a model hub", "HF_ENDPOINT"),
    ],
)
def test_every_refusal_of_the_hub_has_its_own_message(
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


def test_a_gated_model_can_be_planned_but_not_downloaded(inside: Cli, hub: Hub) -> None:
    hub.faults.gated = True
    done = inside.call("download", REPOSITORY)
    assert done.status == 3
    assert f"{REPOSITORY} is gated: its makers ask for your name, and no token is sent" in done.err
    assert f"accept the terms at {hub.endpoint}/{REPOSITORY}" in done.err
    assert not inside.home.exists()


def test_the_error_names_the_setting_that_withholds_the_token(program: Cli, hub: Hub) -> None:
    hub.faults.gated = True
    program.extra |= {
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_ENDPOINT": hub.endpoint,
    }
    done = program.run("download", REPOSITORY)
    assert done.status == 3
    assert "no token is sent" in done.err
    assert "unset HF_HUB_DISABLE_IMPLICIT_TOKEN" in done.err
    assert "HF_HUB_DISABLE_IMPLICIT_TOKEN is set" in program.run("doctor").out.decode()


def test_an_unreachable_hub_a_proxy_and_offline_mode_have_their_own_messages(program: Cli, hub: Hub) -> None:
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
    assert {request.token for request in hub.requests if "/resolve/" in request.path} == {"Bearer hf_secret"}
    assert {request.token for request in hub.requests if "/cdn/" in request.path} == {""}
    for path in inside.home.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes()


def test_names_that_are_not_repositories_are_refused(inside: Cli, checkpoint: Path) -> None:
    assert inside.call("download", "demo").status == 2
    assert inside.call("download", str(checkpoint)).status == 2
    assert inside.call("download", "mixtrl").err.count("did you mean mixtral?") == 1
    assert inside.call("download", REPOSITORY, "--bits", "5").status == 2


def test_run_without_a_terminal_needs_yes_to_download(inside: Cli, hub: Hub) -> None:
    refused = inside.call("run", REPOSITORY, "hello")
    assert refused.status == 3
    assert f"moechat download {REPOSITORY}, or --yes" in refused.err
    assert hub.requests == []
    done = inside.call(
        "run", REPOSITORY, "hello", "--yes", "--json", "--max-tokens", "3", "--temperature", "0"
    )
    assert done.status == 0, done.err
    assert len(json.loads(done.out)["tokens"]) == 3
    assert "is here after " in done.err


def test_run_downloads_nothing_after_a_no(inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.cli.commands.run.can_ask", lambda: True)
    monkeypatch.setattr("moechat.cli.commands.run.read_prompt", lambda *_args, **_more: None)
    done = inside.call("run", REPOSITORY, stdin=b"what?\nn\n")
    assert done.status == 3
    assert done.err.count("Download and convert it now? [Y/n]") == 2
    assert "2.2 MiB in 5 files" in done.err
    assert "nothing was downloaded" in done.err
    assert shard_requests(hub) == []


def test_run_on_a_terminal_asks_once_downloads_and_starts_the_chat(program: Cli) -> None:
    terminal = program.terminal("run", REPOSITORY, forked=True)
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
