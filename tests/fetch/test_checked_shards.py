"""Shards whose bytes on the disk are not those whose hash was right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import Cli
from hub_server import REPOSITORY, Hub
from library_support import STORE, finished, models

from moechat.fetch import download
from moechat.store.safetensors_file import SafetensorsFile
from moechat.store.shard_supply import FetchedShard


def flip(path: Path, place: int) -> None:
    """Change a bit of a file, and nothing of its status."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("wanted", [is_expert, lambda name: not is_expert(name)], ids=["expert", "dense"])
def test_a_byte_that_changes_on_the_disk_is_refused_and_fetched_again(
    inside: Cli,
    hub: Hub,
    reference: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    wanted: Callable[[str], bool],
    kept: bool,
) -> None:
    fetch = download._HubShards.fetch
    flipped: list[str] = []

    def changed(self: download._HubShards, name: str) -> FetchedShard:
        found = fetch(self, name)
        tensors = SafetensorsFile.open(found.path).tensors
        names = [one for one in tensors if wanted(one)]
        if names and not flipped:
            entry = tensors[names[-1]]
            flip(found.path, (entry.start + entry.end) // 2)
            flipped.append(names[-1])
        return found

    arguments = ("download", REPOSITORY, *(["--keep-source"] if kept else []))
    with monkeypatch.context() as patch:
        patch.setattr(download._HubShards, "fetch", changed)
        done = inside.call(*arguments)
    assert flipped
    assert done.status == 3
    assert f"tensor '{flipped[0]}' has changed since it was saved" in done.err
    assert not (models(inside) / STORE).exists()
    again = inside.call(*arguments)
    if kept:
        assert again.status == 0, again.err
        assert (models(inside) / STORE).exists()
    else:
        finished(inside, again, reference)
