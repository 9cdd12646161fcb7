"""What a packer put into a checkpoint comes out again: codes, zeros, scales and values, for every scheme."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantised_support import Pack, awq, fp8, gptq, integers, mxfp4, nvfp4

from moechat import _native
from moechat.errors import CheckpointError
from moechat.store.quantised.schemes import plain_view
from moechat.store.quantised.weights import PackedTensors
from moechat.store.safetensors_file import TensorEntry
from moechat.store.tensors import TensorSet

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
NAME = "model.layers.0.mlp.experts.0.gate_proj.weight"
_TYPES = {
    torch.float8_e4m3fn: ("F8_E4M3", torch.uint8),
    torch.float8_e8m0fnu: ("F8_E8M0", torch.uint8),
    torch.bfloat16: ("BF16", torch.uint16),
    torch.float16: ("F16", torch.float16),
    torch.float32: ("F32", torch.float32),
    torch.int32: ("I32", torch.int32),
    torch.int64: ("I64", torch.int64),
    torch.int8: ("I8", torch.int8),
    torch.uint8: ("U8", torch.uint8),
}


class MemoryFile:
    """Tensors in memory in place of a file; see :class:`moechat.store.tensors.TensorFile`."""

    path = Path("memory.safetensors")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for name, tensor in tensors.items():
            dtype, shown = _TYPES[tensor.dtype]
            self.arrays[name] = tensor.contiguous().view(shown).numpy()
            self.tensors[name] = TensorEntry(dtype, tuple(tensor.shape), 0, self.arrays[name].nbytes)

    def array(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def release(self, start: int, end: int) -> None:
        """Nothing is mapped."""


def read(
    pack: Pack, weight: torch.Tensor, quantisation: dict[str, Any]
) -> tuple[PackedTensors, torch.Tensor]:
    """The view of one packed weight, and the values that it stands for."""
    stored, decoded = pack(NAME, weight)
    file = MemoryFile(stored)
    tensors = TensorSet(dict.fromkeys(stored, file), where="memory")  # type: ignore[arg-type]
    view = plain_view(tensors, {"quantization_config": quantisation}, Path("nowhere"))
    assert isinstance(view, PackedTensors)
    return view, decoded


def check(view: PackedTensors, decoded: torch.Tensor) -> None:
    """Codes give the values that were packed, and the visible tensor those values rounded once."""
    values = view.codes(NAME).values()
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[view.info(NAME)[0]]
    shown = torch.from_numpy(view.array(NAME)).view(dtype)
    assert tuple(decoded.shape) == view.info(NAME)[1]
    assert torch.equal(torch.from_numpy(values).to(dtype), decoded.to(dtype))
    assert torch.equal(shown, decoded.to(dtype))
    assert b"".join(view.chunks(NAME)) == view.array(NAME).tobytes()


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group": {"targets": ["Linear"], "weights": weights}},
    }


sizes = st.integers(1, 6)
seeds = st.integers(0, 2**16)


def matrix(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(seed=seeds, rows=sizes, groups=sizes, bits=st.sampled_from([2, 4, 8]), flags=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_integers(seed: int, rows: int, groups: int, bits: int, flags: int) -> None:
    symmetric, packed, order = bool(flags & 1), bool(flags & 2), bool(flags & 4)
    pack = integers(bits, 16, symmetric=symmetric, packed=packed, order=order, dtype=torch.float16)
    stated = compressed(num_bits=bits, group_size=16, symmetric=symmetric)
    check(*read(pack, matrix(seed, 7 * rows, 16 * groups), stated))


@given(seed=seeds, rows=sizes, groups=sizes, group=st.sampled_from([8, 32]))
@settings(max_examples=20, deadline=None)
def test_awq(seed: int, rows: int, groups: int, group: int) -> None:
    stated = {"quant_method": "awq", "bits": 4, "group_size": group}
    check(*read(awq(group), matrix(seed, 8 * rows, group * groups), stated))


@given(
    seed=seeds,
    rows=sizes,
    groups=sizes,
    bits=st.sampled_from([2, 4, 8]),
    version=st.sampled_from([1, 2]),
    order=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_gptq(seed: int, rows: int, groups: int, bits: int, version: int, order: bool) -> None:
    stated = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": order}
    stated["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    pack = gptq(bits, 16, version=version, order=order, dtype=torch.float16)
    check(*read(pack, matrix(seed, 16 * rows, 16 * groups), stated))


@given(seed=seeds, rows=st.integers(1, 50), columns=st.integers(1, 50), high=sizes, wide=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_fp8_blocks(seed: int, rows: int, columns: int, high: int, wide: int) -> None:
    stated = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    check(*read(fp8((high, wide)), matrix(seed, rows, columns), stated))


@given(seed=seeds, rows=st.integers(1, 20), groups=sizes)
@settings(max_examples=20, deadline=None)
def test_fp4(seed: int, rows: int, groups: int) -> None:
    weight = matrix(seed, rows, 32 * groups)
    check(*read(nvfp4(divides=True), weight, compressed(num_bits=4, type="float", group_size=16)))
    check(*read(nvfp4(divides=False), weight, {"quant_method": "modelopt", "quant_algo": "NVFP4"}))
    check(*read(mxfp4(), weight, compressed(num_bits=4, type="float", group_size=32)))


@pytest.mark.parametrize("place", ["modelopt", "mistral", "micro"])
def test_scales_in_other_places(place: str) -> None:
    """Scales with extra dimensions (ModelOpt), of another name (Mistral), as exponents (MX)."""
    weight = matrix(0, 200, 192)
    block = (1, 32) if place == "micro" else (128, 128)
    dtype = torch.float8_e8m0fnu if place == "micro" else torch.float32

    def pack(name: str, given: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stored, decoded = fp8(block, scale="_scale", dtype=dtype)(name, given)
        scale = stored.pop(f"{name}_scale")
        if place == "modelopt":
            return {**stored, f"{name}_scale": scale[:, None, :, None]}, decoded
        if place == "mistral":
            return {**stored, name.replace("weight", "qscale_weight"): scale}, decoded
        return {**stored, f"{name}_scale": scale.view(torch.uint8)}, decoded

    stated = {
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        "mistral": {"quant_method": "fp8"},
        "micro": compressed(num_bits=8, type="float", group_size=32),
    }
    check(*read(pack, weight, stated[place]))


def test_the_expert_of_a_stack_is_decoded_alone() -> None:
    weight = torch.stack([matrix(seed, 24, 64) for seed in range(3)])
    parts = [integers(4, 32)(NAME, one) for one in weight]
    stored = {name: torch.stack([one[0][name] for one in parts]) for name in parts[0][0]}
    file = MemoryFile(stored)
    tensors = TensorSet(dict.fromkeys(stored, file), where="memory")  # type: ignore[arg-type]
    view = plain_view(
        tensors, {"quantization_config": compressed(num_bits=4, group_size=32)}, Path("nowhere")
    )
    assert view.info(NAME) == ("BF16", (3, 24, 64))
    for expert in range(3):
        rows = torch.from_numpy(view.matrix(NAME, expert, slice(1, 20, 2))).view(torch.bfloat16)
        assert torch.equal(rows, parts[expert][1][1:20:2])
    assert np.array_equal(view.array(NAME), np.stack([view.matrix(NAME, i, slice(None)) for i in range(3)]))


@pytest.mark.parametrize(
    ("pack", "stated", "encoding", "of_dense"),
    [
        (integers(4, 64), compressed(num_bits=4, group_size=64), "int4", "int4"),
        (integers(4, 32), compressed(num_bits=4, group_size=32), "q4_0", "int4_32"),
        (integers(8, 0, packed=False), compressed(num_bits=8, strategy="channel"), "int8", "int8"),
        (
            integers(4, 64, symmetric=False),
            compressed(num_bits=4, group_size=64, symmetric=False),
            "int4",
            "int4",
        ),
        (integers(4, 64, order=True), compressed(num_bits=4, group_size=64), None, None),
        (integers(4, 64, dtype=torch.float32), compressed(num_bits=4, group_size=64), None, None),
        (mxfp4(), compressed(num_bits=4, type="float", group_size=32), "mxfp4", "mxfp4"),
        (
            mxfp4(deepseek=True),
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "mxfp4",
            "mxfp4",
        ),
        (nvfp4(divides=True), compressed(num_bits=4, type="float", group_size=16), "nvfp4", "nvfp4"),
        (
            gptq(4, 32, symmetric=True),
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
            "q4_0",
            "int4_32",
        ),
        (
            gptq(8, 32, symmetric=True),
            {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True},
            "q8_0",
            "int8_32",
        ),
        (gptq(4, 32), GPTQ, "int4_32", "int4_32"),
        (gptq(4, 32, symmetric=True, order=True), {**GPTQ, "sym": True, "desc_act": True}, None, None),
        (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32}, "int4_32", "int4_32"),
        (awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", "int4"),
        (fp8((128, 128)), {"quant_method": "fp8", "weight_block_size": [128, 128]}, None, "fp8"),
        (fp8((64, 32)), {"quant_method": "fp8", "weight_block_size": [64, 32]}, None, None),
        (fp8("tensor"), {"quant_method": "fp8"}, None, "fp8"),
    ],
)
def test_what_an_encoding_can_hold_is_kept(
    pack: Pack, stated: dict[str, Any], encoding: str | None, of_dense: str | None
) -> None:
    view, _ = read(pack, matrix(1, 40, 128), stated)
    assert (view.encoding(NAME), view.dense_encoding(NAME)) == (encoding, of_dense)
    rows_of = {encoding: lambda: view.encoded_rows(NAME, None), of_dense: lambda: view.dense_rows(NAME)}
    for kept in {encoding, of_dense} - {None}:
        rows = rows_of[kept]()
        out = np.empty((40, 128), np.float32)
        _native.decode_file_rows(kept, rows, out)
        np.testing.assert_allclose(
            out, view.codes(NAME).values(), rtol=2**-19 if kept == "nvfp4" else 0, atol=0
        )


def test_zeros_that_contradict_the_configuration_are_refused() -> None:
    view, _ = read(gptq(4, 32), matrix(0, 40, 64), {**GPTQ, "sym": True})
    with pytest.raises(CheckpointError, match="cannot be kept as it is: a zero is not 8"):
        view.encoded_rows(NAME, None)
    out = np.empty((40, 64), np.float32)
    _native.decode_file_rows("int4_32", view.dense_rows(NAME), out)  # holds any zero
    assert np.array_equal(out, view.codes(NAME).values())


def test_groups_out_of_order_that_the_configuration_denies_are_refused() -> None:
    view, _ = read(gptq(4, 32, order=True), matrix(0, 40, 64), GPTQ)
    assert view.dense_encoding(NAME) == "int4_32"
    with pytest.raises(CheckpointError, match="not in the order of their groups") as caught:
        view.dense_rows(NAME)
    assert caught.value.hint is not None
    assert "contradict" in caught.value.hint
