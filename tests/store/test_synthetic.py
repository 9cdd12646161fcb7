"""Synthetic stores: complete, hashed, loadable, with weights of sensible size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moechat import _native
from moechat.errors import DoesNotFitError, UsageError
from moechat.geometry import ExpertGeometry, Gate
from moechat.store import synthetic
from moechat.store.progress import ConvertProgress
from moechat.store.store import Store
from moechat.store.synthetic import SyntheticModel, write_synthetic_store

GEOMETRY = ExpertGeometry(hidden_size=128, intermediate_size=192, num_experts=6, bits=4)


def model(geometry: ExpertGeometry = GEOMETRY, **changes: object) -> SyntheticModel:
    values = {
        "name": "synthetic test",
        "config": {"model_type": "none", "hidden_size": 128},
        "geometry": geometry,
        "layers": [(1, "model.layers.1.mlp.experts"), (2, "model.layers.2.mlp.experts")],
        "dense": {"embed.weight": (50, 128), "norm.weight": (128,), "attention.bias": (128,)},
        **changes,
    }
    return SyntheticModel(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 72, "intermediate_size": 100},
        {"has_bias": True, "gate": Gate(alpha=1.7, limit=7.0, offset=1.0)},
    ],
    ids=["even", "odd", "biases"],
)
def test_weights_have_variance_one_over_inputs(bits: int, shape: dict[str, object], tmp_path: Path) -> None:
    geometry = replace(GEOMETRY, bits=bits, **shape)  # type: ignore[arg-type]
    store = write_synthetic_store(model(geometry), tmp_path / "store")
    store.verify()
    assert store.geometry == geometry
    records = store.expert_layer(2)
    assert records.shape == (6, geometry.blocks_per_expert, geometry.record_bytes)
    gate, up, down, biases = _native.unpack_expert(geometry.layout, np.array(records[3]))
    inputs = (geometry.hidden_size, geometry.hidden_size, geometry.intermediate_size)
    for matrix, fan_in in zip((gate, up, down), inputs, strict=True):
        assert np.isfinite(matrix).all()
        assert float(matrix.std()) * math.sqrt(fan_in) == pytest.approx(1.0, abs=0.12)
        assert abs(float(matrix.mean())) * math.sqrt(fan_in) < 0.1
    assert (biases is not None) == geometry.has_bias


def test_experts_chosen_for_tokens_are_different_and_exist(tmp_path: Path) -> None:
    tables = {"gate.tid2eid": (4000, 3)}
    store = write_synthetic_store(
        model(dense=tables, chosen=frozenset(tables), geometry=replace(GEOMETRY, num_experts=5)),
        tmp_path / "store",
    )
    rows = (np.array(store.dense.array("gate.tid2eid")).astype(np.uint32) << 16).view(np.float32)
    assert set(np.unique(rows)) == set(range(5))
    assert all(len(set(row)) == 3 for row in rows.tolist())


def test_dense_weights_are_bf16_norms_are_one_and_biases_zero(tmp_path: Path) -> None:
    store = write_synthetic_store(model(), tmp_path / "store")
    assert set(store.dense.keys()) == {"embed.weight", "norm.weight", "attention.bias"}
    values = {}
    for name in store.dense.keys():  # noqa: SIM118 - it is no mapping
        assert store.dense.info(name)[0] == "BF16"
        values[name] = (np.array(store.dense.array(name)).astype(np.uint32) << 16).view(np.float32)
    assert float(values["embed.weight"].std()) * math.sqrt(128) == pytest.approx(1.0, abs=0.05)
    assert (values["norm.weight"] == 1).all()
    assert (values["attention.bias"] == 0).all()
    assert json.loads((store.path / "config.json").read_bytes()) == {"model_type": "none", "hidden_size": 128}


def test_a_store_of_the_same_model_is_kept_and_another_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = write_synthetic_store(model(), path)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert write_synthetic_store(model(), path).manifest == first.manifest
    assert (path / "manifest.json").stat().st_mtime_ns == before
    other = write_synthetic_store(model(seed=1), path)
    assert other.manifest.source.fingerprint != first.manifest.source.fingerprint
    assert {entry.name for entry in tmp_path.iterdir()} == {"store"}


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_synthetic_store(model(), tmp_path / "one")
    other = write_synthetic_store(model(), tmp_path / "other")
    assert one.manifest.files == other.manifest.files


def test_experts_differ(tmp_path: Path) -> None:
    store = write_synthetic_store(model(), tmp_path / "store")
    records = [store.expert_layer(layer)[expert].tobytes() for layer in (1, 2) for expert in range(6)]
    assert len(set(records)) > 10


def test_an_interrupted_write_leaves_no_store_and_starts_again(tmp_path: Path) -> None:
    def interrupt(event: ConvertProgress) -> None:
        if event.detail.startswith("layer 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic_store(model(), tmp_path / "store", progress=interrupt)
    assert not (tmp_path / "store").exists()
    write_synthetic_store(model(), tmp_path / "store").verify()
    assert {entry.name for entry in tmp_path.iterdir()} == {"store"}


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    events: list[ConvertProgress] = []
    write_synthetic_store(model(), tmp_path / "store", progress=events.append)
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert events[-1].total_bytes - 1000 <= done[-1] <= events[-1].total_bytes


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = synthetic.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(DoesNotFitError, match=r"needs .* are free"):
        write_synthetic_store(model(), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "letter.txt").write_text("keep me")
    with pytest.raises(UsageError, match="is not a store"):
        write_synthetic_store(model(), tmp_path / "store")
    assert (tmp_path / "store" / "letter.txt").read_text() == "keep me"
    assert isinstance(write_synthetic_store(model(), tmp_path / "free"), Store)
