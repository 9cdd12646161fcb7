"""Calibration while a model is downloaded whose shards are not in the order of its layers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cli_support import Cli
from hub_server import REPOSITORY, Hub
from library_support import models, pretend_free
from safetensors.torch import load, save

from moechat.store.store import Store

SHUFFLED = "tiny/shuffled"
# Layers of each shard; all other tensors are in the first.
SHARDS = ((0, 4), (1, 3), (2,))


@pytest.fixture
def shuffled(hub: Hub) -> Iterator[Hub]:
    """The hub, with the same model cut in another way."""
    files = dict(hub.repositories[REPOSITORY])
    tensors = {}
    for name in [name for name in files if name.endswith(".safetensors")]:
        tensors.update(load(files.pop(name)))
    parts: list[dict[str, object]] = [{} for _ in SHARDS]
    for key, tensor in tensors.items():
        layer = next((int(part) for part in key.split(".") if part.isdigit()), 0)
        parts[next(n for n, layers in enumerate(SHARDS) if layer in layers)][key] = tensor
    weight_map = {}
    for number, part in enumerate(parts):
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        files[name] = save(part)  # type: ignore[arg-type]
        weight_map.update(dict.fromkeys(part, name))
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    hub.repositories[SHUFFLED] = files
    yield hub
    del hub.repositories[SHUFFLED]


def solver(program: Cli) -> str:
    (store,) = models(program).iterdir()
    return Store.open(store).manifest.quantisation.solver


def test_layers_are_calibrated_in_order_where_the_disk_has_room_for_more_shards(
    inside: Cli, shuffled: Hub
) -> None:
    done = inside.call("download", SHUFFLED)
    assert done.status == 0, done.err
    assert "without calibration" not in done.err
    assert solver(inside) == "calibrated"
    shown = inside.call("show", SHUFFLED)
    assert b"4, calibrated" in shown.out


def test_a_small_disk_gets_the_model_without_calibration(
    inside: Cli, shuffled: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = json.loads(inside.call("download", SHUFFLED, "--dry-run", "--json").out)
    assert plan["calibrated"]
    # In order, layers 0 to 2 need all three shards; in the order of the shards each needs one.
    shard = max(
        len(data) for name, data in shuffled.repositories[SHUFFLED].items() if name.endswith("tensors")
    )
    pretend_free(monkeypatch, plan["disk_bytes"] - shard)
    smaller = json.loads(inside.call("download", SHUFFLED, "--dry-run", "--json").out)
    assert not smaller["calibrated"]
    assert smaller["disk_bytes"] <= plan["disk_bytes"] - shard
    done = inside.call("download", SHUFFLED)
    assert done.status == 0, done.err
    assert "experts are quantised without calibration: calibration would need " in done.err
    assert solver(inside) == "least-squares"


def test_a_disk_too_small_for_both_is_refused(
    inside: Cli, shuffled: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_free(monkeypatch, 1_000_000)
    done = inside.call("download", SHUFFLED)
    assert done.status == 4, done.err
    assert "free" in done.err
