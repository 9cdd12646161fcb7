"""Quantised checkpoints: parts spread over shards, what is refused, and codes without loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_support import (
    change_config,
    change_tensors,
    fp8,
    is_linear,
    tensors_of,
    write_pair,
    write_source,
)
from test_shard_supply import Shelf, checkpoint_of

from moechat.errors import CheckpointError, MoechatError, UnsupportedModelError
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.quantised.weights import PackedTensors
from moechat.store.shard_supply import ShardSupply

GATE = "model.layers.2.mlp.experts.2.gate_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 40]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("plain") / "source", shape=1)


@pytest.fixture
def packed(tmp_path: Path, source: Path) -> Path:
    write_pair(source, tmp_path / "packed", tmp_path / "decoded", fp8((48, 40)), FP8)
    return tmp_path / "packed"


def test_a_weight_and_its_scale_may_be_in_different_shards_that_come_and_go(
    tmp_path: Path, source: Path
) -> None:
    packed = tmp_path / "packed"
    split = lambda name: 1 + (sum(map(ord, name)) % 5)  # noqa: E731 - scales are not beside their weights
    write_pair(source, packed, tmp_path / "decoded", fp8((48, 40)), FP8, shard_of=split)
    whole = Checkpoint.open(packed)
    plan = plan_checkpoint(whole)
    expected = convert(whole, plan, tmp_path / "expected", bits=4, source_name="x")
    here = tmp_path / "here"
    checkpoint = checkpoint_of(packed, here)
    shelf = Shelf(packed, here)
    supply = ShardSupply(checkpoint, plan.dense_keys, shelf, here / "aside")
    made = convert(checkpoint, plan, tmp_path / "made", bits=4, source_name="x", supply=supply)
    others = {name: record for name, record in expected.manifest.files.items() if name[0] != "g"}
    assert made.manifest.files == others  # generation_config.json is not here
    assert sorted(path.name for path in here.rglob("*") if path.is_file()) == ["config.json"]


def test_modules_that_are_left_plain_stay_as_they_are(packed: Path, source: Path) -> None:
    read, plain = Checkpoint.open(packed).tensors, Checkpoint.open(source).tensors
    assert isinstance(read, PackedTensors)
    for name, tensor in tensors_of(source).items():
        if not is_linear(name, tensor):
            assert read.weight(name) is None
            assert read.info(name) == plain.info(name)
            assert np.array_equal(read.array(name), plain.array(name))


def test_codes_hold_the_stored_values_without_loss(packed: Path) -> None:
    read, stored = Checkpoint.open(packed).tensors, tensors_of(packed)
    assert isinstance(read, PackedTensors)
    codes = read.codes(GATE)
    assert (codes.kind, codes.bits, codes.group) == ("e4m3", 8, (44, 40))
    assert np.array_equal(codes.codes, stored[GATE].view(torch.uint8).numpy())
    assert np.array_equal(codes.scale, stored[GATE + "_scale_inv"].numpy())
    with pytest.raises(CheckpointError, match=r"lm_head|'model.norm.weight' is not quantised"):
        read.codes("model.norm.weight")


def refused(directory: Path, error: type[MoechatError], match: str, work: Path) -> None:
    """Converting is refused with file and tensor, and nothing is written."""
    work.mkdir()

    def attempt() -> None:
        checkpoint = Checkpoint.open(directory)
        convert(checkpoint, plan_checkpoint(checkpoint), work / "store", bits=4, source_name="x")

    with pytest.raises(error, match=match):
        attempt()
    assert not (work / "store").exists()


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def replace(name: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: tensor(tensors[name])})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            drop(GATE + "_scale_inv"),
            CheckpointError,
            rf"model\.safetensors: tensor '{GATE}' is FP8 and has no scale",
        ),
        (drop(QUERY + "_scale_inv"), CheckpointError, rf"tensor '{QUERY}' is FP8 and has no scale"),
        (
            replace(GATE + "_scale_inv", lambda scale: scale[:, :1].clone()),
            CheckpointError,
            rf"scale '{GATE}_scale_inv' has shape \[1, 1\]; .* in blocks of 48 x 40 it would be \[1, 2\]",
        ),
        (
            replace(GATE + "_scale_inv", lambda scale: scale.double()),
            CheckpointError,
            rf"scale '{GATE}_scale_inv' is F64",
        ),
        (
            replace(GATE, lambda codes: codes.float().to(torch.float8_e5m2)),
            UnsupportedModelError,
            rf"tensor '{GATE}' is F8_E5M2",
        ),
        (
            replace(GATE + "_scale_inv", lambda scale: scale * torch.inf),
            CheckpointError,
            rf"model\.safetensors: tensor '{GATE}' .* has values that are not finite in BF16",
        ),
        (
            replace(QUERY, lambda codes: torch.full_like(codes.float(), torch.nan).to(codes.dtype)),
            CheckpointError,
            rf"tensor '{QUERY}' .* has values that are not finite",
        ),
    ],
    ids=["no scale", "no dense scale", "shape", "type", "e5m2", "infinite", "nan"],
)
def test_a_damaged_weight_is_refused_by_name(
    tmp_path: Path, packed: Path, change: Any, error: type[MoechatError], match: str
) -> None:
    change_tensors(packed, change)
    refused(packed, error, match, tmp_path / "work")


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"quant_method": "bitsandbytes"}, UnsupportedModelError, "'bitsandbytes'; moechat reads .*fp8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 40]}, CheckpointError, "it would be"),
        ({"quant_method": "fp8", "weight_block_size": [48]}, CheckpointError, r"weight_block_size is \[48\]"),
        ({"quant_method": "fp8", "weight_block_size": [48, 0]}, CheckpointError, "weight_block_size"),
        ({"weight_block_size": [48, 40]}, CheckpointError, "names no quant_method"),
        (None, UnsupportedModelError, r"is F8_E4M3, and .*config\.json has no quantization_config"),
    ],
    ids=["bitsandbytes", "other blocks", "one size", "zero", "no method", "nothing"],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tmp_path: Path, packed: Path, settings: object, error: type[MoechatError], match: str
) -> None:
    change_config(packed, quantization_config=settings)
    refused(packed, error, match, tmp_path / "work")


def test_settings_without_a_quantised_tensor_are_refused(tmp_path: Path, source: Path) -> None:
    write_pair(source, tmp_path / "packed", tmp_path / "d", fp8((48, 40)), FP8, choose=lambda *_: False)
    refused(tmp_path / "packed", CheckpointError, "says quant_method 'fp8', but none", tmp_path / "work")


def test_a_broken_tensor_that_no_layer_uses_does_no_harm(tmp_path: Path, packed: Path) -> None:
    name = "model.mtp.proj.weight"
    change_tensors(packed, lambda tensors: tensors.update({name: tensors[QUERY].clone()}))
    checkpoint = Checkpoint.open(packed)
    made = convert(checkpoint, plan_checkpoint(checkpoint), tmp_path / "store", bits=4, source_name="x")
    assert name not in made.dense
    with pytest.raises(CheckpointError, match=f"'{name}' is FP8 and has no scale"):
        checkpoint.info(name)
