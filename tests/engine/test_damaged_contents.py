"""Media that rot, and files that others cut short: never a wrong token, always an error that says where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from rotten import age, flip, look_unchanged, record_place
from tiny import write_tiny_chat_model

import moechat
from moechat import Engine
from moechat.config import user_paths
from moechat.errors import StoreDamagedError
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.store.background_check import MAPPED_EXPIRES_S
from moechat.store.stamps import EXPIRES_S
from moechat.store.store import Store

PROMPT = [5, 60, 7, 81, 9, 100, 11, 12]
DAY = 86400.0


def answer(engine: Engine, count: int = 8) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0)]


def paged(io: Literal["auto", "uring", "threads"] = "auto") -> OffloadOptions:
    return OffloadOptions(pages=6, link=LinkSettings(io=io))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rotten") / "model"
    write_tiny_chat_model(directory)
    return directory


@pytest.fixture
def model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a library of its own, whose store may be damaged."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return source


def store_of(engine: Engine) -> Store:
    return engine.loaded.store


def damage_every_expert(store: Store) -> None:
    for record in store.layers:
        for expert in range(store.geometry.num_experts):
            flip(*record_place(store, record.layer, expert))


@pytest.mark.parametrize("io", ["threads", "uring"])
def test_records_that_have_rotted_are_an_error_when_they_are_read(
    model: Path, io: Literal["uring", "threads"]
) -> None:
    with moechat.load(model, offload=paged()) as engine:
        expected = answer(engine)
        store = Store.open(store_of(engine).path)
    damage_every_expert(store)
    look_unchanged(store.path, user_paths().state)
    try:
        damaged = moechat.load(model, offload=paged(io))  # nothing is verified again
    except OSError as error:
        pytest.skip(f"io_uring is not to be had: {error}")
    with damaged as engine:
        for _ in range(2):
            with pytest.raises(StoreDamagedError) as caught:
                answer(engine)
            assert caught.value.exit_code == 6
            layer = store.layers[0]
            assert f"{layer.file} is damaged: block" in str(caught.value)
            assert f"of layer {layer.layer} is not as it was" in str(caught.value)
            assert f"moechat verify {store.path.name} --repair" in str(caught.value.hint)
        damage_every_expert(store)  # the same bits again: as they were
        assert answer(engine) == expected


def test_checksums_come_with_the_next_verification_of_a_store_of_an_older_version(model: Path) -> None:
    with moechat.load(model, offload=paged()) as engine:
        path = store_of(engine).path
    state = user_paths().state
    [place] = (state / "verified").iterdir()
    record = Store.open(path).verification(state)
    assert record is not None
    old = {name: list(file.status) for name, file in record.files.items()}
    place.write_text(json.dumps({"manifest": record.manifest, "files": old}))
    with moechat.load(model, offload=paged()) as engine:
        store = store_of(engine)
        assert all(store.record_checksums(layer.layer) is None for layer in store.layers)
        answer(engine)
        engine.idle()
        engine.loaded.check.wait(20)
        assert engine.notices() == []
    with moechat.load(model, offload=paged()) as engine:
        store = store_of(engine)
        for layer in store.layers:
            sums = store.record_checksums(layer.layer)
            assert sums is not None
            assert len(sums) == store.geometry.num_experts * store.geometry.blocks_per_expert


def test_mapped_files_are_read_again_while_nothing_else_is_done(model: Path) -> None:
    state = user_paths().state
    with moechat.load(model) as engine:
        expected, path = answer(engine), store_of(engine).path
        engine.idle()
        assert not engine.loaded.check.running, "all was verified a moment ago"
    age(path, state, MAPPED_EXPIRES_S + 1)
    with moechat.load(model) as engine:
        engine.idle()
        engine.loaded.check.wait(20)
        assert answer(engine) == expected
    record = Store.open(path).verification(state)
    assert record is not None
    assert all(file.is_recent(600) for name, file in record.files.items() if name != "manifest.json")


def test_damage_found_while_waiting_is_an_error_of_the_next_turn(model: Path) -> None:
    state = user_paths().state
    with moechat.load(model) as engine:
        answer(engine)
        path = store_of(engine).path
    age(path, state, MAPPED_EXPIRES_S + 1)
    store = Store.open(path)
    layer = store.layers[1].layer
    flip(*record_place(store, layer, 2))
    look_unchanged(path, state)
    with moechat.load(model) as engine:
        engine.idle()
        engine.loaded.check.wait(20)
        for _ in range(2):
            with pytest.raises(StoreDamagedError, match=rf"layer {layer}, expert 2\)") as caught:
                answer(engine)
            assert caught.value.exit_code == 6
            assert "--repair" in str(caught.value.hint)
    # A new start does not believe the record either.
    with pytest.raises(StoreDamagedError, match=store.layers[1].file):
        moechat.load(model)


def test_files_that_a_link_reads_are_due_after_a_month_and_damage_is_a_notice(model: Path) -> None:
    state = user_paths().state
    with moechat.load(model, offload=paged()) as engine:
        path = store_of(engine).path
    store = Store.open(path)
    age(path, state, 29 * DAY)
    engine = moechat.load(model, offload=paged())
    with engine:
        dense = [name for name in store.manifest.files if not name.startswith("experts-")]
        check = engine.loaded.check
        assert set(store.due_files(state, check._expires)) == set(dense)
        # The rest of the month passes while it runs.
        age(path, state, EXPIRES_S - 29 * DAY + 1)
        flip(*record_place(store, store.layers[0].layer, 1))
        look_unchanged(path, state)
        engine.idle()
        check.wait(20)
        notices = engine.notices()
        assert any(store.layers[0].file in notice and "expert 1" in notice for notice in notices)


def test_a_small_store_is_verified_at_the_next_start_when_it_is_due(model: Path) -> None:
    with moechat.load(model) as engine:
        path = store_of(engine).path
    store = Store.open(path)
    flip(*record_place(store, store.layers[0].layer, 0))
    look_unchanged(path, user_paths().state)
    moechat.load(model).close()  # believed, as it was verified a moment ago
    age(path, user_paths().state, EXPIRES_S + 1)
    with pytest.raises(StoreDamagedError, match=store.layers[0].file):
        moechat.load(model)


def test_a_pass_over_the_files_ends_when_work_comes_and_goes_on_later(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.store import file_check

    monkeypatch.setattr(file_check, "_PIECE", 512)
    with moechat.load(model) as engine:
        expected, path = answer(engine), store_of(engine).path
    age(path, user_paths().state, MAPPED_EXPIRES_S + 1)
    with moechat.load(model) as engine:
        check = engine.loaded.check
        turns = 0
        while turns < 500:
            engine.idle()
            if not check.running:
                break
            assert answer(engine) == expected
            assert not check.running
            turns += 1
        assert turns > 1, "the first wait was too short for all files"
        check.wait(20)
        record = Store.open(path).verification(user_paths().state)
        assert record is not None
        assert all(file.is_recent(600) for name, file in record.files.items() if name != "manifest.json")


CUT = """\
import os, sys
import moechat
from moechat.errors import StoreDamagedError
from moechat import _native
_native.set_num_threads(4)
prompt = [5, 60, 7, 81, 9, 100, 11, 12] * 8
with moechat.load(sys.argv[1], dense_bits=int(sys.argv[3])) as engine:
    assert engine.loaded.near is None, "mapped"
    if sys.argv[4] == "used before":
        list(engine.generate(prompt, max_new_tokens=4, temperature=0.0))
        engine.drop_prompt_cache()
    for path in sorted(engine.loaded.store.path.glob(sys.argv[2])):
        os.truncate(path, 4096)
    for _ in range(2):
        try:
            tokens = list(engine.generate(prompt, max_new_tokens=4, temperature=0.0))
        except StoreDamagedError as error:
            print(error.exit_code, error)
            print(error.hint)
        else:
            sys.exit(f"{tokens} from a file that is gone")
"""


@pytest.mark.parametrize(
    ("files", "bits", "use"), [("experts-*", 8, "used before"), ("dense-*", 16, "not used")]
)
def test_a_mapped_file_that_others_cut_short_is_an_error_and_the_process_goes_on(
    model: Path, files: str, bits: int, use: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(model), files, str(bits), use], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("6 ")
    assert "has 4096 bytes, the manifest says" in lines[0]
    assert files[:5] in lines[0]
    assert lines[0] == lines[2]
