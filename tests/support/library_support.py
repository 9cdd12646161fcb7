"""Helpers for tests of downloads: requests, hashes and disk use."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import PATIENCE_S, Cli, Result
from hub_server import REPOSITORY, Hub

from moechat import _native
from moechat.store.store import Store

STORE = "tiny--moe-chat-4bit"
EXPERTS = 8


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
    """Shards of which more than the header was requested."""
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


def planned(program: Cli, *options: str) -> dict[str, Any]:
    """The JSON output of a dry run."""
    done = program.call("download", REPOSITORY, "--dry-run", "--json", *options)
    assert done.status == 0, done.err
    plan: dict[str, Any] = json.loads(done.out)
    return plan


def pretend_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - free, free))


class Reference(dict[str, str]):
    """Hashes of the files of a store, and where it is."""

    def __init__(self, store: Path) -> None:
        super().__init__(hashes(store))
        self.store = store


def assert_same_weights(store: Store, other: Store, file: str) -> None:
    """Check that the experts in a file of two stores are quantised from the same weights."""
    layer = next(entry.layer for entry in store.layers if entry.file == file)
    pairs = zip(store.expert_layer(layer), other.expert_layer(layer), strict=True)
    for records in pairs:
        ours, theirs = (
            _native.unpack_expert(store.geometry.layout, np.ascontiguousarray(part))[:3] for part in records
        )
        for a, b in zip(ours, theirs, strict=True):
            # Other weights are at 2, two ways to quantise the same ones below 0.05.
            assert np.square(a - b).mean() < 0.1 * np.square(b).mean()


def finished(program: Cli, done: Result, reference: Reference) -> None:
    assert done.status == 0, done.err
    assert "without calibration" not in done.err, done.err
    made = hashes(models(program) / STORE)
    different = {name for name in {*made, *reference} if made.get(name) != reference.get(name)}
    # In another process the pass over the calibration text can round in another way, though it rarely does.
    assert all(name.startswith("experts-") for name in different), different
    for name in different:
        assert_same_weights(Store.open(models(program) / STORE), Store.open(reference.store), name)
    Store.open(models(program) / STORE).verify()
    assert sorted(path.name for path in models(program).iterdir()) == [STORE]
    assert list(sources(program).iterdir()) == []


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "the condition never became true"
        time.sleep(0.002)


def before_each_expert(monkeypatch: pytest.MonkeyPatch, call: Callable[[int, int], None]) -> None:
    """Call with layer and expert before an expert is quantised; in this process."""
    from moechat.calibration.layer_packer import LayerPacker

    pack = LayerPacker.__call__
    numbers = itertools.count()

    def packer(*arguments: Any) -> None:
        call(*divmod(next(numbers), EXPERTS))
        pack(*arguments)

    monkeypatch.setattr(LayerPacker, "__call__", packer)


def shards_until(hub: Hub, layer: int) -> int:
    """Number of shards that must have arrived before this layer and all before it can be converted."""
    index = json.loads(hub.repositories[REPOSITORY]["model.safetensors.index.json"])["weight_map"]
    names = sorted(set(index.values()))
    return max(names.index(name) + 1 for key, name in index.items() if f"layers.{layer}." in key)


def events(hub: Hub, kind: str) -> list[str]:
    """Names in the hub's events of this kind."""
    return [name for what, name in hub.events if what == kind]
