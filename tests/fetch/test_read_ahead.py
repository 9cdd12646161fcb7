"""Shards that come while others are converted: that they do, how it fails, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import PATIENCE_S, Cli
from hub_server import REPOSITORY, Faults, Hub
from library_support import (
    EXPERTS,
    STORE,
    before_each_expert,
    body_bytes,
    events,
    finished,
    models,
    planned,
    pretend_free,
    shards,
    shards_until,
    sources,
    wait_until,
)

from moechat.cli.terminal.load_progress import LoadProgress
from moechat.errors import DownloadError
from moechat.fetch.prefetch import BackgroundCall, PrefetchingSource
from moechat.store.shard_supply import FetchedShard
from moechat.store.workspace import workspace_path

# Well below what a stalled connection is borne here, well above what a busy machine needs to end a process.
SOON_S = 15
BORNE_S = "90"


def fetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "moechat-fetch"]


def unfinished(program: Cli) -> list[Path]:
    return sorted(sources(program).rglob("*.part"))


def are_beginnings(program: Cli, hub: Hub) -> bool:
    """Whether all that is unfinished is how its file begins, and something."""
    files = hub.repositories[REPOSITORY]
    parts = unfinished(program)
    return bool(parts) and all(
        files[path.name.removesuffix(".part")].startswith(path.read_bytes()) and path.stat().st_size
        for path in parts
    )


def goes_on(program: Cli, hub: Hub, reference: dict[str, str]) -> None:
    """Another run finishes it, and continues the one file that is unfinished where that ends."""
    (part,) = unfinished(program)
    here = part.stat().st_size
    hub.faults = Faults()
    finished(program, program.call("download", REPOSITORY), reference)
    asked = [request.range for request in hub.requests if request.path == f"/cdn/{REPOSITORY}/{part.stem}"]
    assert (f"bytes={here}-" if here else "") in asked


def finished_layers(program: Cli) -> int:
    journal = json.loads((workspace_path(models(program) / STORE) / "journal.json").read_bytes())
    return sum(name.startswith("experts-") for name in journal["files"])


def test_only_the_next_shard_is_fetched_while_a_layer_is_converted(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.pace_s = 0.002
    most_asked: list[tuple[int, int]] = []

    def convert(layer: int, expert: int) -> None:
        hub.events.append(("converts", f"layer {layer}"))
        if expert == EXPERTS // 2:
            needed = shards_until(hub, layer)
            # If it were not coming meanwhile it would never come: this layer is not finished before.
            wait_until(lambda: len(events(hub, "sent")) >= min(needed + 1, len(shards(hub))))
            most_asked.append((len(events(hub, "requested")), needed + 1))

    before_each_expert(monkeypatch, convert)
    assert planned(inside)["overlap"]
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert len(most_asked) == 5
    assert all(asked <= allowed for asked, allowed in most_asked)
    # One connection at a time: no shard is asked for before the one before it has come.
    of_shards = [kind for kind, _ in hub.events if kind in ("requested", "sent")]
    assert of_shards == ["requested", "sent"] * len(shards(hub))
    assert events(hub, "sent") == sorted(shards(hub))
    assert not fetching()


def test_without_room_for_another_shard_there_is_no_read_ahead(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = planned(inside)
    pretend_free(monkeypatch, roomy["disk_bytes"] - 1)
    tight = planned(inside)
    assert tight["disk_bytes"] < roomy["disk_bytes"]
    assert not tight["overlap"]
    asked: list[tuple[int, int]] = []

    def convert(layer: int, _expert: int) -> None:
        time.sleep(0.002)
        asked.append((len(events(hub, "requested")), shards_until(hub, layer)))

    before_each_expert(monkeypatch, convert)
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert all(count == needed for count, needed in asked)
    assert "would let it download while it converts" in done.err
    assert "overlap" not in done.err


def test_a_background_failure_is_reported_after_the_layer_is_finished(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = sorted(shards(hub))[shards_until(hub, 0)]
    hub.faults.alter = name
    converted: list[tuple[int, int]] = []

    def convert(layer: int, expert: int) -> None:
        converted.append((layer, expert))
        wait_until(lambda: name in events(hub, "sent"))

    with pytest.MonkeyPatch.context() as patch:
        before_each_expert(patch, convert)
        done = inside.call("download", REPOSITORY)
    assert done.status == 3
    assert f"{name} ({shards(hub)[name]} bytes) was altered on its way" in done.err
    assert converted == [(0, expert) for expert in range(EXPERTS)]
    assert finished_layers(inside) == 1
    assert not fetching()
    hub.reset()
    finished(inside, inside.call("download", REPOSITORY), reference)


def test_background_connection_losses_are_reported_and_resumed(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults = Faults(cuts=2, cut_after=100_000, only=sorted(shards(hub))[3])
    before_each_expert(monkeypatch, lambda _layer, _expert: time.sleep(0.005))
    done = inside.call("download", REPOSITORY)
    finished(inside, done, reference)
    assert done.err.count("the connection was lost; trying again") == 2
    assert body_bytes(hub) == sum(shards(hub).values())


def test_progress_is_reported_by_the_calling_thread_between_experts(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.pace_s = 0.01
    seen: list[tuple[str, int]] = []
    show = LoadProgress.__call__

    def watch(self: LoadProgress, report: object) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append((report.detail, report.done))  # type: ignore[attr-defined]
        show(self, report)  # type: ignore[arg-type]

    monkeypatch.setattr(LoadProgress, "__call__", watch)
    before_each_expert(monkeypatch, lambda _layer, _expert: time.sleep(0.02))
    finished(inside, inside.call("download", REPOSITORY), reference)
    first = [done for detail, done in seen if detail.startswith("converting layer 0")]
    assert first[-1] > first[0]
    assert [done for _, done in seen] == sorted(done for _, done in seen)


@pytest.mark.parametrize("where", ["converting layer 1", "model-"])
@pytest.mark.parametrize("mute", [False, True])
def test_an_interrupted_callback_leaves_no_thread_and_valid_partial_files(
    inside: Cli, hub: Hub, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch, where: str, mute: bool
) -> None:
    from huggingface_hub import constants

    names = sorted(shards(hub))
    name = names[0] if where == "model-" else names[shards_until(hub, 1)]
    hub.faults = Faults(stall=not mute, mute=mute, cut_after=100_000, only=name)

    def interrupt(_self: LoadProgress, report: object) -> None:
        if report.detail.startswith(where):  # type: ignore[attr-defined]
            wait_until(lambda: name in events(hub, "requested"))
            wait_until(lambda: mute or are_beginnings(inside, hub))
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", float(BORNE_S))
        patch.setattr(LoadProgress, "__call__", interrupt)
        assert inside.call("download", REPOSITORY).status == 130
    assert not fetching()
    assert mute or are_beginnings(inside, hub)
    goes_on(inside, hub, reference)


def blocked(program: Cli, hub: Hub, faults: Callable[[str], Faults]) -> subprocess.Popen[bytes]:
    """The program, reading ahead from a connection over which nothing comes any more."""
    name = sorted(shards(hub))[shards_until(hub, 0)]
    hub.faults = faults(name)
    program.extra["HF_HUB_DOWNLOAD_TIMEOUT"] = BORNE_S
    process = program.start("download", REPOSITORY, forked=True)
    wait_until(lambda: events(hub, "requested")[-1:] == [name] or process.poll() is not None)
    if hub.faults.stall:
        wait_until(lambda: are_beginnings(program, hub) and finished_layers(program) > 0)
        wait_until(lambda: unfinished(program)[0].stat().st_size >= hub.faults.cut_after - 8192)
    else:
        wait_until(lambda: finished_layers(program) > 0)
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(lambda name: Faults(stall=True, cut_after=100_000, only=name), id="in a body"),
        pytest.param(lambda name: Faults(mute=True, only=name), id="before an answer"),
    ],
)
def test_a_signal_ends_a_stalled_download_promptly(
    inside: Cli,
    hub: Hub,
    reference: dict[str, str],
    number: signal.Signals,
    status: int,
    faults: Callable[[str], Faults],
) -> None:
    process = blocked(inside, hub, faults)
    process.send_signal(number)
    begin = time.monotonic()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - begin < SOON_S
    assert process.returncode == status
    assert b"Traceback" not in err
    assert b"trying again" not in err
    if hub.faults.stall:
        assert are_beginnings(inside, hub)
        assert unfinished(inside)[0].stat().st_size == 100_000
    goes_on(inside, hub, reference)


def test_a_download_killed_during_read_ahead_is_resumed(
    inside: Cli, hub: Hub, reference: dict[str, str]
) -> None:
    process = blocked(inside, hub, lambda name: Faults(stall=True, cut_after=100_000, only=name))
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert are_beginnings(inside, hub)
    plan = planned(inside)
    assert 0 < plan["missing_bytes"] < plan["download_bytes"]
    goes_on(inside, hub, reference)


class Shelf:
    """Shards that come when the test lets them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.may_come = threading.Event()

    def fetch(self, name: str) -> FetchedShard:
        self.asked.append(name)
        assert self.may_come.wait(PATIENCE_S)
        if name in self.errors:
            raise self.errors[name]
        return FetchedShard(Path(name))

    def expect(self, name: str | None) -> None:
        raise AssertionError

    def discard(self, name: str) -> None:
        raise AssertionError


def test_only_one_shard_is_read_ahead() -> None:
    shelf = Shelf()
    with BackgroundCall(shelf.may_come.set) as background:
        source = PrefetchingSource(shelf, background, lambda _name: None, ahead=True)
        source.expect("a")
        source.expect("b")
        wait_until(lambda: shelf.asked == ["a"])
        shelf.may_come.set()
        assert source.fetch("a").path == Path("a")
        source.expect(None)
        assert source.fetch("b").path == Path("b")
    assert shelf.asked == ["a", "b"]
    assert not fetching()


def test_a_background_failure_is_raised_at_the_next_file() -> None:
    shelf = Shelf()
    shelf.errors["b"] = DownloadError("b was altered")
    shelf.may_come.set()
    with BackgroundCall(lambda: None) as background:
        source = PrefetchingSource(shelf, background, lambda _name: None, ahead=True)
        source.expect("b")
        wait_until(lambda: not fetching())
        with pytest.raises(DownloadError, match="b was altered"):
            source.expect("b")


def test_close_stops_the_background_task_and_drops_its_last_reports() -> None:
    reported: list[str] = []
    stop = threading.Event()

    def call() -> None:
        report("begins")
        stop.wait(PATIENCE_S)
        report("ends")

    def work() -> None:
        background.start(call)
        wait_until(lambda: background.run_callbacks() is None and bool(reported))
        os.kill(os.getpid(), signal.SIGINT)
        background.wait()

    background = BackgroundCall(stop.set)
    report = background.in_owner_thread(reported.append)
    with pytest.raises(KeyboardInterrupt), background:
        work()
    assert reported == ["begins"]
    assert not fetching()


def test_a_stuck_background_task_does_not_delay_the_end() -> None:
    awake = threading.Event()
    background = BackgroundCall(lambda: None)
    begin = time.monotonic()
    with background:
        background.start(lambda: awake.wait(PATIENCE_S) and None)
    assert time.monotonic() - begin < SOON_S
    (thread,) = fetching()
    assert thread.daemon
    awake.set()
    thread.join()
