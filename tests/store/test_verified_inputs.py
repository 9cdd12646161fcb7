"""Tokenizer, template and settings of a store are used as they were compared with the manifest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from tiny import write_tiny_chat_model

import moechat
from moechat.errors import CheckpointError, StoreDamagedError
from moechat.store.store import Store
from moechat.store.verified_inputs import compared_inputs, verified_inputs

MESSAGES = [{"role": "user", "content": "a fox"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "model"
    write_tiny_chat_model(directory)
    return directory


@pytest.fixture
def store(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    with moechat.load(source) as engine:
        return engine.loaded.store


def flip(path: Path) -> None:
    """Change one letter; size and times stay, as where a medium rots."""
    status, content = path.stat(), bytearray(path.read_bytes())
    place = next(at for at, byte in enumerate(content) if chr(byte).isalpha())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def answer(store: Store) -> list[int]:
    with moechat.load(store.path) as engine:
        return [step.token_id for step in engine.generate(MESSAGES, max_new_tokens=4, temperature=0.0)]


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"]
)
def test_a_file_that_differs_is_refused_by_name_when_the_model_is_loaded(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in store.manifest.files
    flip(store.path / name)
    # Its times say that nothing changed since the last verification.
    monkeypatch.setattr(Store, "ensure_verified", lambda *_: False)
    with pytest.raises(StoreDamagedError, match=rf"/{name} \(.+\) is damaged: its SHA-256") as raised:
        moechat.load(store.path)
    assert raised.value.hint


def test_a_byte_that_a_read_gets_wrong_once_changes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(store)
    whole, read = Path.read_bytes, []

    def wrong_once(path: Path) -> bytes:
        content = whole(path)
        if path.parent == store.path and path.name in store.manifest.files and path not in read:
            read.append(path)
            return bytes([content[0] ^ 4]) + content[1:]
        return content

    monkeypatch.setattr(Path, "read_bytes", wrong_once)
    assert answer(store) == expected
    assert {"chat_template.jinja", "tokenizer.json"} <= {path.name for path in read}


def test_the_copy_has_what_results_depend_on_and_is_removed(store: Store) -> None:
    with verified_inputs(store) as directory:
        assert directory != store.path
        names = {path.name for path in directory.iterdir()}
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
        assert not any(name.endswith(".safetensors") for name in names)
        for name in names:
            assert (directory / name).read_bytes() == (store.path / name).read_bytes()
    assert not directory.exists()


def test_where_no_copy_can_be_made_the_compared_files_are_used(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(store)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no/such/place")
    with verified_inputs(store) as directory:
        assert directory == store.path
    assert answer(store) == expected
    flip(store.path / "tokenizer.json")
    with pytest.raises(StoreDamagedError, match=r"tokenizer\.json .* is damaged"), verified_inputs(store):
        pass


def test_messages_name_the_store_and_not_the_copy(store: Store) -> None:
    with moechat.load(store.path) as engine:
        assert engine.prompts.tokenizer.name_or_path == str(store.path)


def test_the_inputs_of_a_source_are_read_twice_and_copied(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compared_inputs(source) as directory:
        assert directory != source
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (directory / name).read_bytes() == (source / name).read_bytes()
        assert not list(directory.glob("*.safetensors"))
    assert not directory.exists()
    whole = Path.read_bytes

    def wrong(path: Path) -> bytes:
        content = whole(path)
        return content if path.name != "tokenizer_config.json" else content[:-1] + bytes([content[-1] ^ 1])

    monkeypatch.setattr(Path, "read_bytes", wrong)
    with (
        pytest.raises(CheckpointError, match=r"tokenizer_config\.json was read twice with different bytes"),
        compared_inputs(source),
    ):
        pytest.fail("it was not refused")
