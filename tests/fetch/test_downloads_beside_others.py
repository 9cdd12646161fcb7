"""Downloads beside a program that runs the model, another download, and a hub that means ill."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from cli_support import PROGRAM, Cli
from hub_server import COMMIT, REPOSITORY, Hub
from library_support import STORE, body_bytes, models, planned, shard_requests, shards, sources, wait_until

from moechat.config import user_paths
from moechat.errors import StoreDamagedError
from moechat.fetch import download
from moechat.fetch.download import Download, prepare_download
from moechat.fetch.parallel import map_in_threads
from moechat.fetch.repository import fetch_repository
from moechat.hub.library import KEEP_MARK
from moechat.hub.model_ref import hub_model
from moechat.loading.stores import open_store, require_in_place
from moechat.store.lock import exclusive_lock
from moechat.store.store import Store

LATER = "f" * 40


def planned_work(program: Cli, bits: int) -> AbstractContextManager[Download]:
    ref = hub_model(REPOSITORY)
    paths = user_paths({"MOECHAT_HOME": str(program.home)})
    return prepare_download(
        ref, fetch_repository(REPOSITORY, None), bits, paths, keep_source=False, notice=lambda _text: None
    )


def fill_cache(program: Cli, hub: Hub) -> None:
    """Everything lies in the cache of huggingface_hub."""
    snapshot = Path(program.extra["HF_HOME"], "hub", "models--tiny--moe-chat", "snapshots", COMMIT)
    snapshot.mkdir(parents=True)
    for name, data in hub.repositories[REPOSITORY].items():
        (snapshot / name).write_bytes(data)


def test_a_new_commit_of_the_same_weights_is_noted_unless_the_store_is_in_use(inside: Cli, hub: Hub) -> None:
    assert inside.call("download", REPOSITORY).status == 0
    path = models(inside) / STORE
    state = user_paths({"MOECHAT_HOME": str(inside.home)}).state
    running = Store.open(path)
    running.hold()
    running.ensure_verified(state)
    hub.commit = LATER
    assert inside.call("download", REPOSITORY).status == 0
    assert Store.open(path).manifest.source.revision == COMMIT
    assert running.is_in_place()
    assert inside.call("rm", REPOSITORY, "--yes").status == 8
    assert path.exists()
    running.release()
    assert inside.call("download", REPOSITORY).status == 0
    now = Store.open(path)
    assert now.manifest.source.revision == LATER
    assert now.ensure_verified(state) is False  # no file of the model has changed
    assert sorted(entry.name for entry in models(inside).iterdir()) == [STORE]


def test_a_store_replaced_during_loading_is_refused(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.hub.names import resolve

    assert inside.call("download", REPOSITORY).status == 0
    monkeypatch.setenv("MOECHAT_HOME", str(inside.home))
    store = open_store(resolve(REPOSITORY), None, lambda _progress: None)
    require_in_place(store)
    other = models(inside) / "other"
    store.path.rename(other)
    with pytest.raises(StoreDamagedError, match="replaced by another process"):
        require_in_place(store)
    other.rename(store.path)
    require_in_place(store)


def test_shards_kept_by_another_run_are_not_removed(inside: Cli, hub: Hub) -> None:
    with planned_work(inside, 8) as second:  # while nothing is kept yet
        assert inside.call("download", REPOSITORY, "--keep-source").status == 0
        second.run(lambda _progress: None, lambda _text: None)
    (kept,) = sources(inside).iterdir()
    assert (kept / KEEP_MARK).exists()
    assert {path.name for path in kept.glob("*.safetensors")} == set(shards(hub))


def test_the_source_is_kept_after_an_interrupt_at_the_very_end(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = download.convert

    def then_interrupted(*arguments: object, **more: object) -> Store:
        convert(*arguments, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "convert", then_interrupted)
        assert inside.call("download", REPOSITORY, "--keep-source").status == 130
    assert inside.call("download", REPOSITORY, "--keep-source").status == 0
    assert inside.call("rm", "--leftovers", "--yes").status == 0
    (kept,) = sources(inside).iterdir()
    assert {path.name for path in kept.glob("*.safetensors")} == set(shards(hub))


def test_kept_shards_are_hashed_once(inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.fetch import transfer

    hashed: list[str] = []
    make = transfer._new_digest

    def noted(file: object) -> object:
        hashed.append(file.path)  # type: ignore[attr-defined]
        return make(file)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "_new_digest", noted)
    assert inside.call("download", REPOSITORY, "--keep-source").status == 0
    assert sorted(name for name in hashed if name.endswith(".safetensors")) == sorted(shards(hub))


def test_cached_shards_need_no_disk_space_and_partial_copies_are_not_fetched(inside: Cli, hub: Hub) -> None:
    before = planned(inside)
    fill_cache(inside, hub)
    after = planned(inside)
    assert before["disk_bytes"] > after["disk_bytes"]
    # The store, its small files once more on their way, a manifest, and dense tensors that are put aside.
    side = sum(len(data) for name, data in hub.repositories[REPOSITORY].items() if name not in shards(hub))
    assert after["disk_bytes"] - after["store_bytes"] < 2 * side + (2 << 20) + max(shards(hub).values())
    name = min(shards(hub))
    with planned_work(inside, 4) as work:
        directory = work._source
    directory.mkdir(parents=True)
    half = hub.repositories[REPOSITORY][name][:100_000]
    (directory / f"{name}.part").write_bytes(half)  # a copy that was killed
    hub.requests.clear()
    assert inside.call("download", REPOSITORY, "--keep-source").status == 0
    assert (shard_requests(hub), body_bytes(hub)) == ([], 0)
    assert (directory / name).read_bytes() == hub.repositories[REPOSITORY][name]


def test_file_names_that_escape_the_directory_are_ignored(inside: Cli, hub: Hub, tmp_path: Path) -> None:
    victim = tmp_path / "precious.gguf"
    victim.write_bytes(b"my own model")
    odd = [
        str(victim),
        "../precious.gguf",
        "a/../../precious.gguf",
        "a//b.gguf",
        "a\\b.gguf",
        "a\nb.gguf",
        ".",
    ]
    hub.repositories["tiny/odd"] = dict.fromkeys([*odd, "fine/x.gguf"], b"GGUF")
    try:
        assert set(fetch_repository("tiny/odd", None).files) == {"fine/x.gguf"}
        for name in odd:
            hub.repositories["tiny/odd"] = {name: b"GGUF"}
            assert inside.call("download", "tiny/odd").status != 0
    finally:
        del hub.repositories["tiny/odd"]
    assert victim.read_bytes() == b"my own model"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_reading_of_headers_while_connecting(
    program: Cli, hub: Hub, number: signal.Signals, status: int
) -> None:
    with (
        closing(socket.socket()) as deaf,
        closing(socket.socket()) as first,
        closing(socket.socket()) as second,
    ):
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for one in (first, second):  # its queue is full: nobody else gets an answer
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        hub.storage = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        running = subprocess.Popen(
            [*PROGRAM, "download", REPOSITORY],
            cwd=program.directory,
            env=program.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: any(request.path.endswith(".safetensors") for request in hub.requests))
            time.sleep(0.5)
            began = time.monotonic()
            running.send_signal(number)
            assert running.wait(60) == status
            assert time.monotonic() - began < 8  # a connection is given up after 10
        finally:
            running.kill()
            running.wait()


def test_parallel_calls_keep_their_order_and_stop_at_the_first_failure() -> None:
    assert map_in_threads(lambda n: n * n, range(40), threads=4, stop=lambda: None) == [
        n * n for n in range(40)
    ]
    assert map_in_threads(str, [], threads=4, stop=lambda: None) == []
    stopped: list[bool] = []
    called: list[int] = []

    def failing(number: int) -> int:
        called.append(number)
        if number == 3:
            raise ValueError("three")
        time.sleep(0.01)
        return number

    with pytest.raises(ValueError, match="three"):
        map_in_threads(failing, range(1000), threads=4, stop=lambda: stopped.append(True))
    assert stopped == [True]
    assert len(called) < 100


def left_by_a_killed_run(program: Cli) -> Path:
    """What is there if a download is killed after its store was finished."""
    source = sources(program) / f"tiny--moe-chat@{COMMIT[:12]}"
    (source / ".aside").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / ".aside" / "model-00001-of-00005.safetensors.dense").write_bytes(b"x" * 100)
    (source.parent / f".{source.name}.lock").touch()
    return source


@pytest.mark.parametrize("more", ["nothing", "workspace", "lock"])
def test_shards_of_a_run_that_was_killed_at_its_end_are_removed_by_the_next(
    inside: Cli, hub: Hub, more: str
) -> None:
    assert inside.call("download", REPOSITORY).status == 0
    assert list(sources(inside).iterdir()) == []
    finished = set(models(inside).iterdir())
    source = left_by_a_killed_run(inside)
    if more == "workspace":  # killed between the renaming of the store and the removal of its work directory
        (models(inside) / ".tiny--moe-chat-4bit.partial").mkdir()
    if more == "lock":  # the disk failed when it was to be removed
        (models(inside) / ".tiny--moe-chat-4bit.lock").touch()
    assert inside.call("download", REPOSITORY, "--dry-run").status == 0
    assert source.exists()
    assert inside.call("download", REPOSITORY).status == 0
    assert list(sources(inside).iterdir()) == []
    assert set(models(inside).iterdir()) == finished


def test_shards_that_another_conversion_may_need_are_left(inside: Cli, hub: Hub) -> None:
    assert inside.call("download", REPOSITORY).status == 0
    source = left_by_a_killed_run(inside)
    unfinished = models(inside) / ".tiny--moe-chat-3bit.partial"
    unfinished.mkdir()
    assert inside.call("download", REPOSITORY).status == 0
    assert source.exists()
    unfinished.rmdir()
    with exclusive_lock(sources(inside) / f".{source.name}.lock"):
        assert inside.call("download", REPOSITORY).status == 0
        assert source.exists()
    assert inside.call("download", REPOSITORY, "--keep-source").status == 0
    assert (source / KEEP_MARK).exists()
    assert inside.call("download", REPOSITORY).status == 0
    assert source.exists()
