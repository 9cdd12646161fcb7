"""Links, FIFOs, sockets and permissions in a checkpoint directory that comes from anyone."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store_support import mixtral_plan

from moechat.errors import CheckpointError
from moechat.models.gguf_source import all_parts
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.files import DurableFile
from moechat.store.gguf_file import GgufFile
from moechat.store.source_files import require_inside
from moechat.store.store import Store

# Names that moechat reads, that transformers reads, and that people read.
READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.model",
    "chat_template.jinja",
    "model-00001-of-00003.safetensors",
    "model.safetensors.index.json",
    "LICENSE",
    "additional_chat_templates/rag.jinja",
)


def converted(source: Path, destination: Path) -> Store:
    checkpoint = Checkpoint.open(source)
    return convert(checkpoint, mixtral_plan(checkpoint), destination, bits=4, source_name="m")


def place(directory: Path, name: str) -> Path:
    """A free place for a file of this name."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "/dev/zero", "/proc/self/environ"])
def test_a_link_out_of_the_directory_is_refused_by_name(mixtral: Path, name: str, target: str) -> None:
    (mixtral.parent / "secret").write_text("{}")
    place(mixtral, name).symlink_to(
        os.path.relpath(mixtral.parent / "secret", (mixtral / name).parent) if target[0] == "." else target
    )
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leads out of ") as caught:
        Checkpoint.open(mixtral)
    assert caught.value.exit_code == 3


def test_a_linked_directory_of_templates_is_refused(mixtral: Path) -> None:
    (mixtral / "additional_chat_templates").symlink_to("/etc")
    with pytest.raises(CheckpointError, match="additional_chat_templates is a link that leads out of"):
        Checkpoint.open(mixtral)


def test_links_inside_and_a_linked_directory_itself_are_followed(mixtral: Path, tmp_path: Path) -> None:
    (mixtral / "tokenizer.json").rename(mixtral / "own-tokenizer.json")
    (mixtral / "tokenizer.json").symlink_to("own-tokenizer.json")
    (tmp_path / "link").symlink_to(mixtral)
    assert "tokenizer.json" in Checkpoint.open(tmp_path / "link").tokenizer_files()


def test_only_blobs_of_the_hubs_cache_may_be_outside(mixtral: Path, tmp_path: Path) -> None:
    for place_, good in (
        (f"models--org--name/blobs/{'a' * 40}", True),
        (f"models--org--name/blobs/{'0' * 64}", True),
        (f"models--org--name/blobs/{'g' * 40}", False),
        (f"models--org--name/refs/{'a' * 40}", False),
        (f"blobs/{'a' * 40}", False),
    ):
        target = tmp_path / place_
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("{}")
        place(mixtral, "generation_config.json").symlink_to(target)
        if good:
            assert Checkpoint.open(mixtral).tokenizer_files()["generation_config.json"] == target
        else:
            with pytest.raises(CheckpointError, match="leads out of"):
                Checkpoint.open(mixtral)
    # A blob that is a link itself is what it leads to.
    blob = tmp_path / f"models--org--name/blobs/{'a' * 40}"
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    place(mixtral, "generation_config.json").symlink_to(blob)
    with pytest.raises(CheckpointError, match=r"leads out of .*/etc/passwd"):
        Checkpoint.open(mixtral)


def test_a_circle_of_links_is_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("b.json")
    (tmp_path / "b.json").symlink_to("a.json")
    require_inside(tmp_path / "a.json", tmp_path)  # it is missing, as for any other reader


def a_socket(path: Path) -> None:
    # The addresses of sockets are short, so it is made by a name that leads through a descriptor.
    directory = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{directory}/s")
    finally:
        os.close(directory)
    (path.parent / "s").rename(path)


@pytest.mark.parametrize("make", [os.mkfifo, a_socket])
@pytest.mark.parametrize("name", READ)
def test_fifos_and_sockets_are_refused_by_name_without_being_opened(
    mixtral: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = place(mixtral, name)
    make(path)
    # A writer waits until a reader opens the FIFO; a socket cannot be opened.
    opened: list[int] = []
    writer = threading.Thread(target=lambda: opened.append(os.open(path, os.O_WRONLY)))
    if make is os.mkfifo:
        writer.start()
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file"):
        Checkpoint.open(mixtral)
    if make is os.mkfifo:
        writer.join(0.02)
        assert not opened
        # It stays open until the writer has found it: on a busy machine that may not even have begun to wait.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)
        os.close(opened[0])


@pytest.mark.parametrize("name", ["notes", "data.csv", ".lock"])
def test_files_that_nothing_reads_may_be_anything(mixtral: Path, name: str) -> None:
    os.mkfifo(mixtral / name)
    (mixtral / f"{name}.link").symlink_to("/etc/passwd")
    Checkpoint.open(mixtral)


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o600, 0o640, 0o644)), (0o077, (0o600,) * 3)])
def test_kept_files_are_readable_by_no_more_users_than_their_sources(
    mixtral: Path, tmp_path: Path, umask: int, modes: tuple[int, ...]
) -> None:
    (mixtral / "tokenizer.json").chmod(0o600)
    (mixtral / "config.json").chmod(0o640)
    (mixtral / "generation_config.json").chmod(0o666)
    before = os.umask(umask)
    try:
        store = converted(mixtral, tmp_path / "store")
    finally:
        os.umask(before)
    found = [
        stat.S_IMODE((store.path / name).stat().st_mode)
        for name in ("tokenizer.json", "config.json", "generation_config.json")
    ]
    assert tuple(found) == modes


def test_weights_of_a_private_checkpoint_stay_private(mixtral: Path, tmp_path: Path) -> None:
    (mixtral / "model-00002-of-00003.safetensors").chmod(0o600)
    store = converted(mixtral, tmp_path / "store")
    for name in store.manifest.files:
        assert stat.S_IMODE((store.path / name).stat().st_mode) == 0o600, name


def test_a_leftover_of_an_interrupted_conversion_does_not_lend_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "x.tmp").write_text("old")
    (tmp_path / "x.tmp").chmod(0o666)
    with DurableFile(tmp_path / "x", 0o600) as file:
        file.write(b"new")
        file.commit()
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_further_parts_of_a_gguf_model_may_not_be_links_out_of_its_directory(tmp_path: Path) -> None:
    parts = [f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    (tmp_path / "m").mkdir()
    (tmp_path / "elsewhere.gguf").write_bytes(b"GGUF")
    first, second = (tmp_path / "m" / name for name in parts)
    for path in (first, second):
        path.symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf is a link that leads out of"):
        all_parts(first)
    second.unlink()
    second.write_bytes(b"GGUF")
    assert all_parts(first) == [first, second]  # the user has named the link


def test_a_gguf_fifo_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a regular file"):
        GgufFile.open(tmp_path / "m.gguf")
