"""Models from quantised safetensors: the stores and logits of the plain checkpoint that they decode to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from dense_bytes import bytes_of_dense
from families import tiny_family
from quantised_support import (
    TOKENS,
    Pack,
    Packed,
    awq,
    change_config,
    change_tensors,
    fp8,
    gptq,
    integers,
    is_expert,
    is_linear,
    mxfp4,
    nvfp4,
    stacked,
    tensors_of,
    write_pair,
    write_source,
)
from transformers import AutoModelForCausalLM

import moechat
from moechat import _native
from moechat.calibration.calibration import calibration_of
from moechat.errors import CheckpointError
from moechat.hub.names import resolve
from moechat.loading.stores import open_store
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.dense import read_tensor
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.progress import ConvertProgress
from moechat.store.quantised.schemes import source_format
from moechat.store.quantised.weights import PackedTensors
from moechat.store.store import Store


@dataclass(frozen=True)
class Case:
    """One way of storing a model."""

    pack: Pack
    settings: dict[str, Any]
    title: str
    family: str = "qwen3_moe"
    shape: int = 0
    choose: Callable[[str, torch.Tensor], bool] = is_linear
    stacked: bool = False
    dtype: torch.dtype = torch.bfloat16
    changes: dict[str, Any] = field(default_factory=dict)


def block_fp8(*block: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic", **more}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": group},
    }


def experts_in_fp4(name: str, weight: torch.Tensor) -> Packed:
    return (mxfp4(deepseek=True) if ".experts." in name else fp8((128, 128)))(name, weight)


def both_widths(name: str, weight: torch.Tensor) -> Packed:
    return integers(4 if ".experts." in name else 8, 32)(name, weight)


CASES = {
    "fp8 blocks": Case(fp8((128, 128)), block_fp8(128, 128), "FP8 in blocks of 128 x 128"),
    "fp8 edges": Case(fp8((48, 40)), block_fp8(48, 40), "FP8 in blocks of 48 x 40", "deepseek_v3", 1),
    "fp8 stacked": Case(
        fp8((64, 64), dtype=torch.bfloat16),
        block_fp8(64, 64),
        "FP8 in blocks of 64 x 64",
        choose=lambda name, tensor: tensor.dim() == 3 or is_linear(name, tensor),
        stacked=True,
    ),
    "fp8 exponents": Case(
        fp8((128, 128), dtype=torch.float8_e8m0fnu),
        block_fp8(128, 128, scale_fmt="ue8m0"),
        "FP8 in blocks of 128 x 128",
        "mixtral",
        1,
    ),
    "fp8 tensors": Case(
        fp8("tensor"), {"quant_method": "fp8", "weight_block_size": None}, "FP8", "mixtral", choose=is_expert
    ),
    "fp8 rows": Case(
        fp8("row", scale="_scale"), {"quant_method": "fbgemm_fp8"}, "FP8 with a scale for each row"
    ),
    "deepseek fp4": Case(
        experts_in_fp4,
        block_fp8(128, 128, expert_dtype="fp4"),
        "FP8 in blocks of 128 x 128, experts in MXFP4",
        "deepseek_v3",
    ),
    "int4 groups": Case(
        integers(4, 32),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        "4-bit integers in groups of 32",
    ),
    "int4 zeros": Case(
        integers(4, 4, symmetric=False),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=4, symmetric=False),
        "4-bit integers in groups of 4",
        shape=1,
    ),
    "int4 plain zeros, rows": Case(
        integers(4, 0, symmetric=False, plain_zeros=True, dtype=torch.float32),
        compressed("pack-quantized", num_bits=4, strategy="channel", symmetric=False),
        "4-bit integers with a scale for each row",
        family="mixtral",
    ),
    "int4 out of order": Case(
        integers(4, 16, order=True),
        compressed("pack-quantized", num_bits=4, type="int", group_size=16, actorder="group"),
        "4-bit integers in groups of 16",
    ),
    "int8 in words": Case(
        integers(8, 0),
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        "8-bit integers with a scale for each row",
    ),
    "int4 and int8": Case(
        both_widths,
        {
            **compressed("pack-quantized", num_bits=8, type="int", group_size=32),
            "config_groups": {
                "attention": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 32}},
                "experts": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "group_size": 32}},
            },
        },
        "8-bit integers in groups of 32 and 4-bit integers in groups of 32",
    ),
    "int8": Case(
        integers(8, 0, packed=False, symmetric=False),
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        "8-bit integers with a scale for each row",
        family="mixtral",
        shape=1,
    ),
    "int8 matrix": Case(
        integers(8, -1, packed=False),
        compressed("int-quantized", num_bits=8, type="int", strategy="tensor"),
        "8-bit integers with one scale",
    ),
    "int4 stacked": Case(
        integers(4, 64),
        compressed("pack-quantized", num_bits=4, type="int", group_size=64),
        "4-bit integers in groups of 64",
        choose=lambda name, tensor: tensor.dim() == 3,
        stacked=True,
    ),
    "float-quantized": Case(
        fp8("row", scale="_scale", dtype=torch.bfloat16),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "FP8 with a scale for each row",
        shape=1,
    ),
    "float-quantized blocks": Case(
        fp8((64, 32), scale="_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 32]),
        "FP8 in blocks of 64 x 32",
    ),
    "nvfp4 of compressed-tensors": Case(
        nvfp4(divides=True),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "NVFP4",
    ),
    "mxfp4 of compressed-tensors": Case(
        mxfp4(),
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "MXFP4",
    ),
    "nvfp4 of modelopt": Case(
        nvfp4(divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "NVFP4",
        choose=is_expert,
    ),
    "nvfp4 stacked": Case(
        nvfp4(divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4",
        choose=lambda name, tensor: tensor.dim() == 3,
        stacked=True,
    ),
    "awq": Case(
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        "AWQ, 4 bits, groups of 32",
    ),
    "awq experts": Case(
        awq(64, torch.float16),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["self_attn"]},
        "AWQ, 4 bits, groups of 64",
        "deepseek_v3",
        choose=is_expert,
        dtype=torch.float16,
    ),
    "gptq": Case(
        gptq(4, 32, dtype=torch.float16),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        "GPTQ, 4 bits, groups of 32",
        dtype=torch.float16,
    ),
    "gptq version 2, out of order": Case(
        gptq(4, 16, version=2, order=True),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 16,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
        "GPTQ, 4 bits, groups of 16",
        "mixtral",
    ),
    "gptq rows": Case(
        gptq(8, 0, index=False),
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        "GPTQ, 8 bits, a scale for each row",
    ),
    "gptq 8 bits out of order": Case(
        gptq(8, 32, order=True),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True},
        "GPTQ, 8 bits, groups of 32",
    ),
    "gptq by module": Case(
        lambda name, weight: gptq(4 if ".experts." in name else 8, 32)(name, weight),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "dynamic": {"+:.*self_attn.*": {"bits": 8}, "-:.*shared.*": {}},
        },
        "GPTQ, 4 bits, groups of 32",
        "deepseek_v3",
        choose=lambda name, tensor: is_linear(name, tensor) and "shared" not in name,
        changes={"kv_lora_rank": 32, "q_lora_rank": 32},
    ),
    "auto-round": Case(
        lambda name, weight: gptq(8 if "self_attn" in name else 4, 32, index=False, dtype=torch.float16)(
            name, weight
        ),
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 8}},
        },
        "GPTQ, 4 bits, groups of 32, of AutoRound",
        dtype=torch.float16,
    ),
    "auto-round version 2": Case(
        gptq(4, 32, version=2, index=False),
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32},
        "GPTQ, 4 bits, groups of 32, of AutoRound",
        "mixtral",
    ),
    "auto-round as awq": Case(
        awq(64),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 64},
        "AWQ, 4 bits, groups of 64, of AutoRound",
    ),
    "fp8 of modelopt": Case(
        fp8("tensor", scale="_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8", "deepseek_v3"
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def pair(tmp_path: Path, case: Case) -> tuple[Path, Path]:
    """A quantised checkpoint and the plain one that it decodes to."""
    source = write_source(tmp_path / "source", case.family, case.shape, dtype=case.dtype, **case.changes)
    tensors = stacked(tensors_of(source)) if case.stacked else None
    packed, decoded = tmp_path / "packed", tmp_path / "decoded"
    write_pair(source, packed, decoded, case.pack, case.settings, choose=case.choose, tensors=tensors)
    return packed, decoded


def test_the_store_is_that_of_the_checkpoint_it_decodes_to(
    tmp_path: Path, case: Case, pair: tuple[Path, Path]
) -> None:
    packed, decoded = (Checkpoint.open(path) for path in pair)
    assert packed.keys() == decoded.keys()
    expected = convert(decoded, plan_checkpoint(decoded), tmp_path / "a", bits=4, source_name="a")
    events: list[ConvertProgress] = []
    made = convert(
        packed, plan_checkpoint(packed), tmp_path / "b", bits=4, source_name="b", progress=events.append
    )
    assert made.geometry == expected.geometry
    assert_like(made, expected)
    for directory in (pair[0], made.path):
        assert source_format(packed.config, directory) == case.title
    (notice,) = (event.detail for event in events if event.stage == "notice")
    stated, loss = re.fullmatch(
        r"experts are (.+) in the checkpoint; they are quantised again, to 4 bits, which changes a weight by "
        r"([0-9.]+) % \(root mean square of the first expert\)",
        notice,
    ).groups()  # type: ignore[union-attr]
    assert stated in case.title or ("FP8" in stated and "FP8" in case.title)
    assert 0.3 < float(loss) < 12


def assert_like(made: Store, expected: Store) -> None:
    """Stores have the same files but for the configuration, and dense tensors of the same values."""
    dense = {name for name in expected.manifest.files if name.startswith("dense-")}
    kept = {name for name in made.dense if made.dense.encoding(name) is not None}
    other = {"config.json"} | (dense if kept else set())
    assert made.manifest.files.keys() == expected.manifest.files.keys()
    for name in expected.manifest.files.keys() - other:
        assert made.manifest.files[name] == expected.manifest.files[name], name
    assert made.dense.keys() == expected.dense.keys()
    for name in made.dense:
        assert made.dense.info(name)[1] == expected.dense.info(name)[1]
        ours, theirs = read_tensor(made.dense, name), read_tensor(expected.dense, name)
        if made.dense.encoding(name) != "nvfp4":
            assert ours.equal(theirs), name
        else:  # a value may lie between two of bf16, which a last bit of float32 decides
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)
            assert float((ours == theirs).double().mean()) > 0.999


def write_kept_values(packed: Path, decoded: Path, *, experts: bool = False) -> None:
    """Replace the values of weights that are kept, dense ones or all, by those before they are rounded to 16
    bits.
    """
    checkpoint = Checkpoint.open(packed)
    tensors = checkpoint.tensors
    assert isinstance(tensors, PackedTensors)
    # Attention reads kv_b_proj itself, so the layer stays a decoded tensor.
    dense = [
        name
        for name in plan_checkpoint(checkpoint).dense_keys
        if tensors.dense_encoding(name) and "kv_b_proj" not in name
    ]
    if experts:
        dense += [name for name in plan_checkpoint(checkpoint).expert_tensors() if tensors.encoding(name)]
    exact = {name: torch.from_numpy(tensors.codes(name).values()) for name in dense}
    change_tensors(decoded, lambda plain: plain.update(exact))


def test_logits_are_those_of_transformers(moechat_home: Path, pair: tuple[Path, Path]) -> None:
    packed, decoded = pair
    write_kept_values(packed, decoded)
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    with moechat.load(packed, bits=16, dense_bits=16, dtype="float32", activation_bits=32) as engine:
        ours = torch.as_tensor(np.asarray(engine.logits(TOKENS)))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("awq", "INT4_32"),
        ("auto-round as awq", "INT4"),
        ("int8 in words", "INT8"),
        ("nvfp4 of compressed-tensors", "NVFP4"),
        ("nvfp4 of modelopt", "NVFP4"),
    ],
)
def test_logits_of_kept_experts_are_those_of_the_values_in_the_file(
    tmp_path: Path, moechat_home: Path, name: str, title: str
) -> None:
    case = CASES[name]
    source = write_source(tmp_path / "source", case.family, dtype=case.dtype)
    packed, decoded = tmp_path / "packed", tmp_path / "decoded"
    write_pair(source, packed, decoded, case.pack, case.settings, choose=case.choose)
    write_kept_values(packed, decoded, experts=True)
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    with moechat.load(packed, dense_bits=16, dtype="float32", activation_bits=32) as engine:
        ours = torch.as_tensor(np.asarray(engine.logits(TOKENS)))
        assert engine.describe().experts_form == title
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("awq", "q_proj INT4_32"),
        ("auto-round as awq", "q_proj INT4"),
        ("gptq", "q_proj INT4_32"),
        ("gptq rows", "q_proj INT8"),
        ("int4 and int8", "q_proj INT8_32"),
        ("nvfp4 of compressed-tensors", "q_proj NVFP4"),
        ("mxfp4 of compressed-tensors", "q_proj MXFP4"),
        ("gptq version 2, out of order", "q_proj 4 bits"),
        ("fp8 blocks", "q_proj 4 bits"),
        ("fp8 blocks, 16", "q_proj FP8"),
    ],
)
def test_dense_layers_are_kept_and_counted_as_planned(
    tmp_path: Path, moechat_home: Path, name: str, title: str
) -> None:
    name, separator, _ = name.partition(", 16")
    case = CASES[name]
    source, packed = write_source(tmp_path / "source", case.family, dtype=case.dtype), tmp_path / "packed"
    write_pair(source, packed, tmp_path / "decoded", case.pack, case.settings)
    options: dict[str, Any] = {"dense_bits": 16} if separator else {}
    before = moechat.plan(packed, **options)
    with moechat.load(packed, **options) as engine:
        loaded, described = engine.passes.loaded, engine.describe()
    after = moechat.plan(packed, **options)
    layer, form = title.split(" ", 1)
    (attention,) = [part for part in loaded.form.title.split("; ") if layer in part]
    assert attention.endswith(form)
    assert loaded.form.title == before.dense_weights == after.dense_weights == described.dense_weights
    for planned in (before, after):
        (tier,) = planned.tiers
        assert [part.nbytes for part in tier.parts if "dense" in part.name] == [described.memory_dense_bytes]
    assert abs(bytes_of_dense(loaded.model) - loaded.form.nbytes) <= 64


def test_a_calibration_runs_the_decoded_model(tmp_path: Path) -> None:
    source, packed, decoded = tmp_path / "source", tmp_path / "packed", tmp_path / "decoded"
    write_source(source, vocab_size=tiny.BYTE_VOCABULARY)
    tiny.write_byte_tokenizer(source, longest=300)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    write_pair(source, packed, decoded, awq(32), settings)
    stores = []
    for directory in (packed, decoded):
        checkpoint = Checkpoint.open(directory)
        plan = plan_checkpoint(checkpoint)
        calibration = calibration_of(checkpoint, plan, 4, pytest.fail)
        assert calibration is not None
        destination = directory / "store"
        stores.append(
            convert(checkpoint, plan, destination, bits=4, source_name="x", calibration=calibration)
        )
    made, expected = stores
    assert made.manifest.quantisation.solver == "calibrated"
    assert_like(made, expected)


def test_settings_may_be_those_of_the_text_part(tmp_path: Path) -> None:
    source, packed, decoded = tmp_path / "source", tmp_path / "packed", tmp_path / "decoded"
    tiny.write_tiny_checkpoint(source, tiny_family("qwen3_vl_moe"))
    pack, settings = fp8((128, 128)), block_fp8(128, 128)
    choose = lambda name, tensor: is_linear(name, tensor) and "visual" not in name  # noqa: E731
    write_pair(source, packed, decoded, pack, None, choose=choose)
    config = json.loads((packed / "config.json").read_text())
    change_config(packed, text_config={**config["text_config"], "quantization_config": settings})
    stores = []
    for directory in (packed, decoded):
        checkpoint = Checkpoint.open(directory)
        plan = plan_checkpoint(checkpoint)
        stores.append(convert(checkpoint, plan, directory / "store", bits=4, source_name="x"))
    assert_like(*stores)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("int4 groups", "Q4_0"),
        ("int8 in words", "INT8"),
        ("awq", "INT4_32"),
        ("awq experts", "INT4"),
        ("nvfp4 of modelopt", "NVFP4"),
        ("mxfp4 of compressed-tensors", "MXFP4"),
        ("deepseek fp4", "MXFP4"),
    ],
)
def test_values_that_a_kernel_reads_are_kept(
    tmp_path: Path, moechat_home: Path, name: str, form: str
) -> None:
    case = CASES[name]
    source = write_source(tmp_path / "source", case.family, case.shape, dtype=case.dtype)
    packed = tmp_path / "packed"
    write_pair(source, packed, tmp_path / "decoded", case.pack, case.settings, choose=case.choose)
    notices: list[str] = []
    store = open_store(resolve(str(packed)), None, lambda event: notices.append(event.stage))
    assert "notice" not in notices
    assert store.geometry.title == form
    checkpoint = Checkpoint.open(packed)
    assert isinstance(checkpoint.tensors, PackedTensors)
    for ordinal, layer in enumerate(plan_checkpoint(checkpoint).layers):
        layout = store.geometry.layout_of(ordinal)
        for records, expert in zip(store.expert_layer(layer.layer), layer.experts, strict=True):
            kept = _native.unpack_expert(layout, np.ascontiguousarray(records))[:3]
            for ours, (_, ref) in zip(kept, expert.matrices, strict=True):
                # Of NVFP4 the kernels round the scale of a group to float32.
                loss = 2**-19 if form == "NVFP4" else 0
                np.testing.assert_allclose(
                    ours, checkpoint.tensors.codes(ref.key).values(), rtol=loss, atol=0
                )


def test_a_scale_that_cannot_be_kept_is_named_with_the_next_step(tmp_path: Path, moechat_home: Path) -> None:
    case = CASES["int4 groups"]
    source, packed = write_source(tmp_path / "source"), tmp_path / "packed"
    write_pair(source, packed, tmp_path / "decoded", case.pack, case.settings)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    change_tensors(packed, lambda tensors: tensors[f"{name}_scale"].mul_(2.0**-30))
    with pytest.raises(CheckpointError, match=f"'{name}' .* cannot be kept as it is: a scale") as caught:
        open_store(resolve(str(packed)), None, lambda event: None)
    assert caught.value.hint == "quantise the experts anew: --bits 4"
    assert open_store(resolve(str(packed)), 4, lambda event: None).geometry.title == "4 bits"
