"""Shards fetched one at a time: order, saved dense tensors, peak use of the disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_support import mixtral_plan, mixtral_tensors, tree, write_safetensors

from moechat.errors import CheckpointError
from moechat.store.calibrated import ConvertLayer
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert, finished_files
from moechat.store.encoded_file import EncodedSafetensors
from moechat.store.expert_refs import CheckpointPlan
from moechat.store.outline import DenseFile, ExpertsFile, outline_store
from moechat.store.peak_disk import peak_disk_bytes
from moechat.store.quantizer import make_packer
from moechat.store.shard_supply import FetchedShard, ShardSupply
from moechat.store.store import Store
from moechat.store.streamed_checkpoint import Shard, StreamedCheckpoint

LAYERS = 12


class Shelf:
    """Copies shards from a directory; counts them, and measures disk use at its peaks."""

    def __init__(self, source: Path, here: Path, *, ahead: bool = False) -> None:
        self.source, self.here = source, here
        self.ahead = ahead
        self.fetched: list[str] = []
        self.most = 0
        self.fail_at = ""

    def look(self, *_event: object) -> None:
        places = [
            *self.here.rglob("*.safetensors"),
            *self.here.rglob("*.dense"),
            *self.here.parent.glob(".store.partial/store/*"),
        ]
        self.most = max(self.most, sum(path.stat().st_size for path in places))

    def fetch(self, name: str) -> FetchedShard:
        if name == self.fail_at:
            raise KeyboardInterrupt
        if not (self.here / name).exists():
            self.fetched.append(name)
            (self.here / name).write_bytes((self.source / name).read_bytes())
        self.look()
        return FetchedShard(self.here / name)

    def expect(self, name: str | None) -> None:
        if self.ahead and name is not None:
            self.fetch(name)

    def discard(self, name: str) -> None:
        self.look()  # its dense tensors lie beside it
        (self.here / name).unlink()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twelve layers in the order of their names as text (0, 1, 10, ...), cut in the middle of layers."""
    import json

    directory = tmp_path / "source"
    directory.mkdir()
    tensors = mixtral_tensors(layers=LAYERS, experts=2, hidden=64, intermediate=64)
    names = sorted(tensors)
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    weight_map = {}
    count = 7
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[len(names) * number // count : len(names) * (number + 1) // count]
        write_safetensors(directory / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


def checkpoint_of(source: Path, here: Path) -> StreamedCheckpoint:
    here.mkdir(exist_ok=True)
    shards, index = {}, {}
    (here / "config.json").write_bytes((source / "config.json").read_bytes())
    for file in sorted(source.glob("*.safetensors")):
        data = file.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        shards[file.name] = Shard.of_header(here / file.name, header, len(data))
        index |= dict.fromkeys(shards[file.name].tensors, file.name)
    return StreamedCheckpoint(here, shards, index, ["a model", 1], title="a model")


@pytest.mark.parametrize("ahead", [False, True])
def test_layers_are_converted_when_their_shards_are_complete_and_peak_disk_use_is_as_predicted(
    source: Path, tmp_path: Path, ahead: bool
) -> None:
    whole = Checkpoint.open(source)
    expected = convert(whole, mixtral_plan(whole), tmp_path / "expected", bits=4, source_name="x")
    here = tmp_path / "here"
    checkpoint = checkpoint_of(source, here)
    plan = mixtral_plan(checkpoint)
    shelf = Shelf(source, here, ahead=ahead)
    supply = ShardSupply(checkpoint, plan.dense_keys, shelf, here / "aside")
    outline = outline_store(checkpoint, plan, 4)
    order = supply.order(outline.files)
    layers = [file.source.layer for file in order if isinstance(file, ExpertsFile)]
    assert layers == sorted(range(LAYERS), key=lambda layer: str(layer) + ".")
    assert isinstance(order[-1], DenseFile)
    sizes = {name: shard.file_bytes for name, shard in checkpoint.shards.items()}
    bound = peak_disk_bytes(order, supply, ahead=ahead)
    made = convert(
        checkpoint, plan, tmp_path / "store", bits=4, source_name="x", progress=shelf.look, supply=supply
    )
    assert made.manifest.files == expected.manifest.files
    assert shelf.fetched == sorted(sizes)
    assert sorted(path.name for path in here.rglob("*") if path.is_file()) == ["config.json"]
    assert shelf.most == bound
    without = peak_disk_bytes(order, supply, ahead=False)
    assert without <= bound <= without + max(sizes.values())


def test_a_resumed_conversion_does_not_fetch_finished_shards_again(source: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpoint = checkpoint_of(source, here)
    plan = mixtral_plan(checkpoint)
    shelf = Shelf(source, here)
    shelf.fail_at = "model-00005-of-00007.safetensors"

    def attempt() -> object:
        fresh = checkpoint_of(source, here)
        supply = ShardSupply(fresh, plan.dense_keys, shelf, here / "aside")
        return convert(fresh, plan, tmp_path / "store", bits=4, source_name="x", supply=supply)

    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert shelf.fetched == [f"model-0000{number}-of-00007.safetensors" for number in (1, 2, 3, 4)]
    done = finished_files(checkpoint, plan, tmp_path / "store", bits=4, calibrated=False)
    assert {"experts-00000.safetensors", "experts-00010.safetensors"} <= done
    shelf.fail_at = ""
    shelf.fetched.clear()
    attempt()
    assert shelf.fetched == [f"model-0000{number}-of-00007.safetensors" for number in (5, 6, 7)]
    whole = Checkpoint.open(source)
    convert(whole, mixtral_plan(whole), tmp_path / "expected", bits=4, source_name="x")
    made, expected = tree(tmp_path / "store"), tree(tmp_path / "expected")
    assert {name: made[name] for name in made if name != "manifest.json"} == {
        name: expected[name] for name in expected if name != "manifest.json"
    }


@pytest.mark.parametrize("ahead", [False, True])
def test_leftovers_of_an_interrupted_run_count_once_in_the_peak(
    source: Path, tmp_path: Path, ahead: bool
) -> None:
    here = tmp_path / "here"
    shelf = Shelf(source, here, ahead=True)

    def attempt() -> tuple[ShardSupply, StreamedCheckpoint]:
        checkpoint = checkpoint_of(source, here)
        supply = ShardSupply(checkpoint, mixtral_plan(checkpoint).dense_keys, shelf, here / "aside")
        return supply, checkpoint

    def run(supply: ShardSupply, checkpoint: StreamedCheckpoint) -> None:
        convert(
            checkpoint,
            mixtral_plan(checkpoint),
            tmp_path / "store",
            bits=4,
            source_name="x",
            progress=shelf.look,
            supply=supply,
        )

    shelf.fail_at = "model-00005-of-00007.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(*attempt())
    supply, checkpoint = attempt()
    plan = mixtral_plan(checkpoint)
    files = outline_store(checkpoint, plan, 4).files
    done = finished_files(checkpoint, plan, tmp_path / "store", bits=4, calibrated=False)
    # The shard on disk is not the one that the next layer needs.
    lost = "model-00006-of-00007.safetensors"
    (here / lost).write_bytes((source / lost).read_bytes())
    bound = peak_disk_bytes(
        supply.order([file for file in files if file.name not in done]),
        supply,
        ahead=ahead,
        written=sum(file.nbytes for file in files if file.name in done),
        present={path.name: path.stat().st_size for path in here.glob("*.safetensors")},
    )
    shelf.fail_at, shelf.most, shelf.ahead = "", 0, ahead
    run(supply, checkpoint)
    assert shelf.most == bound


class ReadsDense:
    """A calibration that reads the dense tensors of each layer, and quantises as without."""

    def __init__(self, checkpoint: Checkpoint, plan: CheckpointPlan) -> None:
        self.checkpoint, self.plan = checkpoint, plan
        self.layers: list[int] = []

    def run(self, convert_layer: ConvertLayer, last: int) -> bool:
        pack = make_packer(self.plan.geometry(4), "least-squares")
        for ordinal, layer in enumerate(self.plan.layers[: last + 1]):
            for key in self.plan.read_before[ordinal]:
                assert self.checkpoint.array(key).size
            records = convert_layer(ordinal, lambda: lambda _number, *expert: pack(*expert))
            assert records.shape == self.plan.geometry(4).layer_shape
            assert records.any()
            self.layers.append(layer.layer)
        return True


def with_reads(plan: CheckpointPlan) -> CheckpointPlan:
    """The plan of a model that reads its layers' dense tensors in order, and the others at first."""
    by_layer: dict[int, list[str]] = {layer.layer: [] for layer in plan.layers}
    for key in plan.dense_keys:
        number = re.search(r"layers\.(\d+)\.", key)
        by_layer[int(number[1]) if number else 0].append(key)
    assert all(by_layer.values())
    return replace(plan, read_before=tuple(tuple(keys) for keys in by_layer.values()))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_calibration_can_read_its_dense_tensors_and_peak_disk_use_is_as_predicted(
    source: Path, tmp_path: Path, ahead: bool
) -> None:
    """Layers come in the order of the model, which is not that of these shards."""
    here = tmp_path / "here"
    checkpoint = checkpoint_of(source, here)
    plan = with_reads(mixtral_plan(checkpoint))
    shelf = Shelf(source, here, ahead=ahead)
    supply = ShardSupply(checkpoint, plan.dense_keys, shelf, here / "aside", reads=plan.reads_by_layer())
    order = supply.order(outline_store(checkpoint, plan, 4).files)
    layers = [file.source.layer for file in order if isinstance(file, ExpertsFile)]
    assert layers == list(range(LAYERS))
    bound = peak_disk_bytes(order, supply, ahead=ahead)
    calibration = ReadsDense(checkpoint, plan)
    made = convert(
        checkpoint,
        plan,
        tmp_path / "store",
        bits=4,
        source_name="x",
        progress=shelf.look,
        supply=supply,
        calibration=calibration,
    )
    assert calibration.layers == layers
    assert sorted(shelf.fetched) == sorted(checkpoint.shards)
    assert sorted(path.name for path in here.rglob("*") if path.is_file()) == ["config.json"]
    assert shelf.most == bound
    whole = Checkpoint.open(source)
    expected = convert(whole, mixtral_plan(whole), tmp_path / "expected", bits=4, source_name="x")
    assert made.manifest.files == expected.manifest.files


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_resumed_calibration_reads_saved_dense_tensors_of_finished_layers(
    source: Path, tmp_path: Path, stop: int
) -> None:
    here = tmp_path / "here"
    shelf = Shelf(source, here)
    names = sorted(path.name for path in source.glob("*.safetensors"))

    def attempt() -> ReadsDense:
        checkpoint = checkpoint_of(source, here)
        plan = with_reads(mixtral_plan(checkpoint))
        reads = plan.reads_by_layer()
        supply = ShardSupply(checkpoint, plan.dense_keys, shelf, here / "aside", reads=reads)
        calibration = ReadsDense(checkpoint, plan)
        convert(
            checkpoint,
            plan,
            tmp_path / "store",
            bits=4,
            source_name="x",
            supply=supply,
            calibration=calibration,
        )
        return calibration

    shelf.fail_at = names[stop]
    with pytest.raises(KeyboardInterrupt):
        attempt()
    before = set(shelf.fetched)
    shelf.fail_at = ""
    shelf.fetched.clear()
    assert attempt().layers == list(range(LAYERS))  # finished layers are run again, not quantised again
    assert before.isdisjoint(shelf.fetched)
    assert before.union(shelf.fetched) == set(names)


def test_damaged_saved_dense_tensors_are_fetched_again(source: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpoint = checkpoint_of(source, here)
    plan = mixtral_plan(checkpoint)
    (here / "aside").mkdir(parents=True)
    (here / "aside" / "model-00001-of-00007.safetensors.dense").write_bytes(b"\0" * 100)
    shelf = Shelf(source, here)
    supply = ShardSupply(checkpoint, plan.dense_keys, shelf, here / "aside")
    store = convert(checkpoint, plan, tmp_path / "store", bits=4, source_name="x", supply=supply)
    key = plan.dense_keys[0]
    assert np.array_equal(store.dense.array(key), Checkpoint.open(source).array(key))


def _flip_the_last_bit(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[-1] ^= 1
    saved.write_bytes(data)


def _lose_the_checksums(saved: Path) -> None:
    saved.with_name(saved.name + ".sums").unlink()


def _damage_the_checksums(saved: Path) -> None:
    saved.with_name(saved.name + ".sums").write_text('{"model.norm.weight": "x"}')


@pytest.mark.parametrize("damage", [_flip_the_last_bit, _lose_the_checksums, _damage_the_checksums])
def test_saved_dense_tensors_that_changed_between_two_runs_are_fetched_again(
    source: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    here = tmp_path / "here"
    shelf = Shelf(source, here)
    shelf.fail_at = "model-00005-of-00007.safetensors"

    def attempt() -> Store:
        fresh = checkpoint_of(source, here)
        plan = mixtral_plan(fresh)
        supply = ShardSupply(fresh, plan.dense_keys, shelf, here / "aside")
        return convert(fresh, plan, tmp_path / "store", bits=4, source_name="x", supply=supply)

    with pytest.raises(KeyboardInterrupt):
        attempt()
    saved = sorted((here / "aside").glob("*.dense"))[0]
    damage(saved)
    shelf.fail_at = ""
    shelf.fetched.clear()
    store = attempt()
    assert saved.name.removesuffix(".dense") in shelf.fetched
    whole = Checkpoint.open(source)
    for key in mixtral_plan(whole).dense_keys:
        assert np.array_equal(store.dense.array(key), whole.array(key))
    assert [path.name for path in here.rglob("*") if path.is_file()] == ["config.json"]


def test_a_saved_dense_tensor_that_is_read_wrongly_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    checkpoint = checkpoint_of(source, here)
    plan = mixtral_plan(checkpoint)
    supply = ShardSupply(checkpoint, plan.dense_keys, Shelf(source, here), here / "aside")
    chunks = EncodedSafetensors.chunks
    reads: dict[str, int] = {}

    def wrong_at_the_last_time(file: EncodedSafetensors, name: str) -> Iterator[bytes]:
        reads[name] = reads.get(name, 0) + 1
        for data in chunks(file, name):
            yield data if reads[name] == 1 else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(EncodedSafetensors, "chunks", wrong_at_the_last_time)
    with pytest.raises(CheckpointError, match="has changed since it was saved"):
        convert(checkpoint, plan, tmp_path / "store", bits=4, source_name="x", supply=supply)
    assert not (tmp_path / "store").exists()


def test_a_shard_that_differs_from_its_announced_header_is_refused(source: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpoint = checkpoint_of(source, here)
    first, second, *_ = sorted(checkpoint.shards)
    (source / first).write_bytes((source / second).read_bytes())
    plan = mixtral_plan(checkpoint)
    supply = ShardSupply(checkpoint, plan.dense_keys, Shelf(source, here), here / "aside")
    with pytest.raises(CheckpointError, match="does not hold the tensors that its header lists"):
        convert(checkpoint, plan, tmp_path / "store", bits=4, source_name="x", supply=supply)
