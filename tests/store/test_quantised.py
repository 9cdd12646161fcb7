"""Quantised checkpoints: parts spread over shards, what is refused, and codes without loss."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_support import (
    awq,
    change_config,
    change_tensors,
    fp8,
    gptq,
    integers,
    is_linear,
    nvfp4,
    tensors_of,
    words,
    write_pair,
    write_source,
)
from test_shard_supply import Shelf, checkpoint_of

from moechat.errors import CheckpointError, MoechatError, UnsupportedModelError
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.quantised.schemes import source_format_of
from moechat.store.quantised.weights import PackedTensors
from moechat.store.shard_supply import ShardSupply

GATE = "model.layers.2.mlp.experts.2.gate_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 40]}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
MODULE = EXPERT.removesuffix(".weight")


def compressed(more: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **(more or {})}


INT4 = compressed(num_bits=4, type="int", group_size=32, symmetric=False)
NVFP4 = compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
SCHEMES = {
    "fp8": (fp8((48, 40)), FP8),
    "int4": (integers(4, 32, symmetric=False), INT4),
    "nvfp4": (nvfp4(divides=True), NVFP4),
    "modelopt": (nvfp4(divides=False), MODELOPT),
    "awq": (awq(32), AWQ),
    "gptq": (gptq(4, 32, order=True), GPTQ),
}


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
    """Converting is refused with this message; nothing is written before what only data can show."""
    work.mkdir()

    def attempt() -> None:
        checkpoint = Checkpoint.open(directory)
        convert(checkpoint, plan_checkpoint(checkpoint), work / "store", bits=4, source_name="x")

    with pytest.raises(error, match=match):
        attempt()
    by_data = re.search("values that are|cannot be decoded|does not have one", match)
    assert by_data or not any(work.iterdir())
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


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in every scheme."""
    place = tmp_path_factory.mktemp("even")
    source = write_source(place / "source")
    for name, (pack, settings) in SCHEMES.items():
        write_pair(source, place / name, place / f"{name}-decoded", pack, settings)
    return {name: place / name for name in SCHEMES}


@pytest.fixture
def copied(tmp_path: Path, even: dict[str, Path]) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(even[name], tmp_path / name))


HALF = replace(EXPERT + "_scale", lambda scale: scale.float()[:, ::2].to(scale.dtype).contiguous())


@pytest.mark.parametrize(
    ("scheme", "change", "match"),
    [
        ("nvfp4", drop(EXPERT + "_global_scale"), f"NVFP4 tensor '{EXPERT}' has no global scale"),
        ("nvfp4", drop(EXPERT + "_scale"), f"tensor '{EXPERT}' is packed FP4 and has no scale"),
        (
            "nvfp4",
            HALF,
            rf"scale '{EXPERT}_scale' is F8_E4M3 \[128, 2\]; .* blocks of 16 it would be .*, 4\]",
        ),
        ("nvfp4", replace(EXPERT + "_scale", lambda scale: scale.float()), "is F32"),
        (
            "nvfp4",
            replace(EXPERT + "_global_scale", torch.zeros_like),
            f"'{EXPERT}' .NVFP4. has values that are",
        ),
        ("modelopt", drop(EXPERT + "_scale_2"), f"NVFP4 tensor '{EXPERT}' has no global scale"),
        ("modelopt", HALF, rf"'{EXPERT}_scale' .* blocks of 16"),
        ("modelopt", drop(EXPERT + "_scale"), f"tensor '{EXPERT}' is packed FP4 and has no scale"),
        ("int4", drop(EXPERT + "_scale"), f"tensor '{EXPERT}' is quantised and has no scale"),
        ("int4", drop(EXPERT + "_zero_point"), f"tensor '{EXPERT}' has no zero points"),
        ("int4", HALF, f"tensor '{EXPERT}_packed' .* do not fit together as 4-bit integers in groups of 32"),
        (
            "int4",
            replace(EXPERT + "_shape", lambda shape: shape * 2),
            rf"'{EXPERT}' .* cannot be decoded: '{EXPERT}_shape' says \[256, 128\]",
        ),
        (
            "int4",
            lambda tensors: tensors.update({EXPERT + "_g_idx": torch.full((64,), 2, dtype=torch.int32)}),
            f"'{EXPERT}_g_idx' does not have one of 2 groups for each of 64 columns",
        ),
        *(
            (scheme, drop(f"{MODULE}.{part}"), f"tensor '{MODULE}.qweight' has no '{MODULE}.{part}'")
            for scheme in ("awq", "gptq")
            for part in ("qzeros", "scales")
        ),
        (
            "gptq",
            drop(f"{MODULE}.g_idx"),
            f"tensor '{MODULE}.qweight' has no g_idx, and .* says desc_act: true",
        ),
        (
            "gptq",
            replace(f"{MODULE}.g_idx", lambda index: index + 1),
            f"'{EXPERT}' .* cannot be decoded: '{MODULE}.g_idx' names groups beyond the 2",
        ),
        (
            "gptq",
            replace(f"{MODULE}.qweight", lambda words: words.float()),
            rf"tensor '{MODULE}.qweight' is F32 \[8, 128\]; I32 is expected",
        ),
        (
            "awq",
            replace(f"{MODULE}.scales", lambda scales: scales[:1].contiguous()),
            rf"the parts of '{EXPERT}' do not fit together as AWQ, 4 bits, groups of 32: .*scales \[1, 128\]",
        ),
        (
            "int4",
            replace(EXPERT + "_scale", lambda scale: scale.half()),
            rf"experts have 2 different types: .*model\.safetensors: tensor '{EXPERT}' .* is F16",
        ),
    ],
)
def test_a_weight_whose_parts_do_not_fit_is_refused(
    tmp_path: Path, copied: Callable[[str], Path], scheme: str, change: Any, match: str
) -> None:
    directory = copied(scheme)
    change_tensors(directory, change)
    refused(directory, MoechatError, match, tmp_path / "work")  # type: ignore[type-abstract]


def test_inputs_that_are_scaled_first_are_refused(tmp_path: Path, copied: Callable[[str], Path]) -> None:
    directory, name = copied("modelopt"), EXPERT.replace("weight", "pre_quant_scale")
    change_tensors(directory, lambda tensors: tensors.update({name: torch.ones(64)}))
    refused(directory, UnsupportedModelError, f"the inputs of '{EXPERT}' are scaled", tmp_path / "work")


def groups(**changes: Any) -> dict[str, Any]:
    return compressed(**{"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False, **changes})


@pytest.mark.parametrize(
    ("scheme", "settings", "error", "match"),
    [
        ("int4", groups(num_bits=8), CheckpointError, "do not fit together as 8-bit integers"),
        ("int4", groups(group_size=64), CheckpointError, "do not fit together as .* in groups of 64"),
        ("int4", groups(group_size=0), CheckpointError, "do not fit together|group_size"),
        ("int4", groups(type="float", num_bits=8), CheckpointError, "is I32, and .* says FP8"),
        ("int4", groups(num_bits=3), UnsupportedModelError, "integers of 3 bits; moechat reads 2, 4, 8"),
        ("int4", groups(num_bits=16), UnsupportedModelError, "weights of 16 bits"),
        ("int4", groups(strategy="token"), UnsupportedModelError, "strategy 'token'"),
        ("int4", groups(strategy="block"), CheckpointError, "block_structure of group_0 is None"),
        ("int4", {"quant_method": "compressed-tensors"}, CheckpointError, "has no config_groups"),
        (
            "int4",
            compressed({"sparsity_config": {"format": "sparse-24-bitmask"}}, num_bits=4),
            UnsupportedModelError,
            "stored sparse .'sparse-24-bitmask'",
        ),
        (
            "int4",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 4, "group_size": 32}},
                    "b": {"targets": ["model.layers.0.mlp"], "weights": {"num_bits": 4, "group_size": 32}},
                },
            },
            CheckpointError,
            r"no group of config_groups names the module 'model\.layers\.0\.mlp\.experts",
        ),
        (
            "nvfp4",
            compressed(num_bits=4, type="float", group_size=8),
            CheckpointError,
            "NVFP4 has blocks of 16",
        ),
        ("modelopt", {**MODELOPT, "group_size": 32}, CheckpointError, "NVFP4 has blocks of 16"),
        ("modelopt", {**MODELOPT, "quant_algo": "W4A8_AWQ"}, UnsupportedModelError, "reads NVFP4, .*FP8"),
        ("modelopt", {"quant_method": "modelopt"}, CheckpointError, "names no quant_algo"),
        (
            "awq",
            {**AWQ, "bits": 8},
            UnsupportedModelError,
            "AWQ of 8 bits in the order 'gemm'; moechat reads 4",
        ),
        ("awq", {**AWQ, "version": "gemv"}, UnsupportedModelError, "in the order 'gemv'"),
        (
            "awq",
            {**AWQ, "group_size": 64},
            CheckpointError,
            "do not fit together as AWQ, 4 bits, groups of 64",
        ),
        ("awq", {**AWQ, "group_size": "x"}, CheckpointError, "group_size is x; a number is expected"),
        ("awq", GPTQ, CheckpointError, "do not fit together as GPTQ|has no g_idx"),
        ("gptq", {**GPTQ, "bits": 8}, CheckpointError, "do not fit together as GPTQ, 8 bits"),
        ("gptq", {**GPTQ, "bits": 3}, UnsupportedModelError, "GPTQ of 3 bits .* moechat reads 2, 4, 8 bits"),
        ("gptq", {**GPTQ, "checkpoint_format": "marlin"}, UnsupportedModelError, "in the format 'marlin'"),
        ("gptq", {**GPTQ, "group_size": -1}, CheckpointError, "as GPTQ, 4 bits, a scale for each row"),
        (
            "gptq",
            {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:mlx"},
            UnsupportedModelError,
            "packing_format is 'auto_round:mlx'; of AutoRound moechat reads",
        ),
        ("gptq", AWQ, CheckpointError, "do not fit together as AWQ"),
        ("modelopt", FP8, CheckpointError, "says quant_method 'fp8', but none"),
        ("fp8", MODELOPT, CheckpointError, r"scale '.*_scale_inv'|has no scale"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path,
    copied: Callable[[str], Path],
    scheme: str,
    settings: dict[str, Any],
    error: type[MoechatError],
    match: str,
) -> None:
    directory = copied(scheme)
    change_config(directory, quantization_config=settings)
    refused(directory, error, match, tmp_path / "work")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_that_is_cut_anywhere_is_refused(
    tmp_path: Path, copied: Callable[[str], Path], scheme: str
) -> None:
    directory = copied(scheme)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for number, length in enumerate((0, 7, header // 2, header, (header + len(data)) // 2, len(data) - 1)):
        file.write_bytes(data[:length])
        refused(directory, CheckpointError, r"model\.safetensors is damaged", tmp_path / f"work{number}")


def test_the_settings_of_modelopt_may_be_in_a_file_of_their_own(
    tmp_path: Path, copied: Callable[[str], Path]
) -> None:
    directory = copied("modelopt")
    reference = Checkpoint.open(directory)
    change_config(directory, quantization_config=None)
    own = directory / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    opened = Checkpoint.open(directory)
    made = convert(opened, plan_checkpoint(opened), tmp_path / "store", bits=4, source_name="x")
    assert np.array_equal(opened.array(EXPERT), reference.array(EXPERT))
    assert (made.path / own.name).read_bytes() == own.read_bytes()
    assert source_format_of(made.path) == "NVFP4"
    for content, match in (("{", "is not valid JSON"), ("[]", "no object named quantization")):
        own.write_text(content)
        with pytest.raises(CheckpointError, match=match):
            Checkpoint.open(directory)


def test_codes_of_packed_integers_keep_codes_zeros_and_scales(copied: Callable[[str], Path]) -> None:
    directory = copied("int4")
    read, stored = Checkpoint.open(directory).tensors, tensors_of(directory)
    assert isinstance(read, PackedTensors)
    codes = read.codes(EXPERT)
    assert codes.zero is not None
    assert (codes.kind, codes.bits, codes.group) == ("affine", 4, (1, 32))
    assert torch.equal(words(torch.from_numpy(codes.codes), 4), stored[EXPERT + "_packed"])
    assert torch.equal(words(torch.from_numpy(codes.zero.T), 4).T, stored[EXPERT + "_zero_point"])
    assert np.array_equal(codes.scale, stored[EXPERT + "_scale"].float().numpy())
