"""Which dense weights are kept in another form than torch's, and what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CASES, tiny_config
from torch import nn

from moechat import _native
from moechat.geometry import DenseBits
from moechat.models.dense_form import (
    DenseForm,
    choose_form,
    packed_bytes,
    watched_weights,
)
from moechat.models.skeleton import Skeleton, build_skeleton
from moechat.offload.experts import IMPLEMENTATION, register


def form_of(family: str, shape: int, bits: DenseBits, **changes: Any) -> tuple[Skeleton, DenseForm]:
    register()
    skeleton = build_skeleton(tiny_config(family, shape, **changes), torch.float32, IMPLEMENTATION)
    stored = dict.fromkeys(skeleton.state, torch.bfloat16)
    return skeleton, choose_form(skeleton, stored, bits=bits, activation_bits=16)


@pytest.mark.parametrize(("family", "shape"), CASES)
@pytest.mark.parametrize("bits", [16, 8, 6, 4])
def test_projections_have_a_form_and_routers_have_none(family: str, shape: int, bits: int) -> None:
    skeleton, form = form_of(family, shape, bits)
    assert any("attn" in name or "attention" in name for name in form.linears)
    routers = {(entry.num_experts, entry.hidden_size) for entry in skeleton.experts}
    for name, size in form.linears.items():
        module = skeleton.model.get_submodule(name)
        assert type(module) is nn.Linear
        assert tuple(module.weight.shape) == size
        assert size not in routers
        assert min(size) >= 16


def test_sixteen_bits_halve_what_float32_takes() -> None:
    skeleton, form = form_of("mixtral", 0, 16)
    model: Any = skeleton.model
    whole = sum(tensor.nbytes for tensor in model.parameters())
    kept = sum(model.get_parameter(name).nbytes for name in form.kept)
    assert form.nbytes == whole - kept // 2 + sum(buffer.nbytes for buffer in model.buffers())
    assert kept > 0.9 * whole
    assert form.itemsize == pytest.approx(2, abs=0.1)
    assert form.head_bytes == 2 * model.lm_head.weight.numel()


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_a_tied_head_is_packed_and_its_embedding_kept(bits: int) -> None:
    skeleton, form = form_of("qwen3_moe", 1, bits)
    model: Any = skeleton.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head" in form.linears
    assert form.embeddings == {"model.embed_tokens"}
    assert form.head_bytes == packed_bytes(*model.lm_head.weight.shape, bits)
    _, apart = form_of("qwen3_moe", 1, bits, tie_word_embeddings=False)
    assert apart.nbytes == form.nbytes  # both are there in either case


def test_a_tied_head_of_sixteen_bits_is_stored_once() -> None:
    _, form = form_of("qwen3_moe", 1, 16)
    _, apart = form_of("qwen3_moe", 1, 16, tie_word_embeddings=False)
    assert apart.nbytes - form.nbytes == form.head_bytes


def test_float32_weights_stay_torch_tensors_unless_packed() -> None:
    register()
    skeleton = build_skeleton(tiny_config("mixtral", 0), torch.float32, IMPLEMENTATION)
    stored = dict.fromkeys(skeleton.state, torch.float32)
    plain = choose_form(skeleton, stored, bits=16, activation_bits=16)
    assert (plain.linears, plain.embeddings, plain.kept) == ({}, frozenset(), frozenset())
    packed = choose_form(skeleton, stored, bits=4, activation_bits=16)
    assert "lm_head" in packed.linears
    assert packed.embeddings == frozenset()
    assert packed.nbytes < plain.nbytes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [16, 8, 6, 4])
def test_where_rows_are_not_read_as_stored_all_but_packed_layers_stay_torchs(bits: int, tied: bool) -> None:
    register()
    config = tiny_config("qwen3_moe", 0, tie_word_embeddings=tied)
    skeleton = build_skeleton(config, torch.float32, IMPLEMENTATION)
    stored = dict.fromkeys(skeleton.state, torch.bfloat16)
    rows = choose_form(skeleton, stored, bits=bits, activation_bits=16)
    form = choose_form(skeleton, stored, bits=bits, activation_bits=16, stored_rows=False)
    assert form.embeddings == frozenset()
    assert form.linears == (rows.linears if bits < 16 else {})
    assert "model.embed_tokens.weight" not in form.kept
    if bits == 16:
        model: Any = skeleton.model
        tensors = [*model.parameters(), *model.buffers()]
        assert form.nbytes == sum(tensor.nbytes for tensor in tensors)
        assert (form.head_bytes, form.itemsize) == (model.lm_head.weight.nbytes, 4.0)


def test_a_weight_of_unknown_type_stays_a_torch_tensor() -> None:
    register()
    skeleton = build_skeleton(tiny_config("mixtral", 0), torch.float32, IMPLEMENTATION)
    assert choose_form(skeleton, {}, bits=4, activation_bits=16).linears == {}


LATENT = {"qk_nope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 24}


@pytest.mark.parametrize("bits", ["auto", 8, 6, 4])
def test_projections_of_latents_are_packed_on_the_cpu_if_heads_are_whole_tiles(bits: DenseBits) -> None:
    skeleton, form = form_of("deepseek_v3", 0, bits, **LATENT)
    names = {name for name, _ in skeleton.model.named_modules() if name.endswith("kv_b_proj")}
    assert names
    assert names <= form.linears.keys()
    assert {parts[0][2] for parts in map(form.parts_of, names)} == {6 if bits == "auto" else bits}
    stored = dict.fromkeys(skeleton.state, torch.bfloat16)
    others = [
        form_of("deepseek_v3", 0, bits, **(LATENT | {"v_head_dim": 24}))[1],
        form_of("deepseek_v3", 0, 16, **LATENT)[1],
        choose_form(skeleton, stored, bits=bits, activation_bits=16, stored_rows=False),
    ]
    for other in others:
        assert not names & other.linears.keys()
    assert form.nbytes < others[1].nbytes


@pytest.mark.parametrize("whole", [True, False])
def test_encoded_projections_of_latents_are_rounded_again_in_eight_bits(whole: bool) -> None:
    skeleton, _ = form_of("deepseek_v3", 0, "auto", **(LATENT | {"kv_lora_rank": 32}))
    stored = dict.fromkeys(skeleton.state, torch.float16)
    weights = {name for name in skeleton.state if name.endswith("kv_b_proj.weight")}
    layers = {name.removesuffix(".weight") for name in weights}
    for bits, expected in (("auto", 8), (6, 6)):
        form = choose_form(
            skeleton,
            stored,
            bits=bits,
            activation_bits=8,
            encodings=dict.fromkeys(weights, "q8_0") if whole else {},
            decoded=() if whole else weights,
        )
        assert layers <= set(form.quantised)
        assert {form.parts_of(name)[0][2] for name in layers} == {expected}
        assert layers <= form.encoded.keys() if whole else not form.encoded
    kept = choose_form(skeleton, stored, bits=16, activation_bits=8, encodings=dict.fromkeys(weights, "q8_0"))
    assert not layers & kept.linears.keys()


class _Reader(nn.Module):
    """Calls one layer, and reads another one's weight itself, as some families do."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(32, 32)
        self.read = nn.Linear(32, 32, bias=False)
        self.words = nn.Embedding(10, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.called(self.words(ids)) @ self.read.weight.T


def test_reads_of_weights_are_recorded_and_the_model_is_restored() -> None:
    module = _Reader()
    ids = torch.tensor([1, 2])
    before = module(ids)
    with watched_weights(module) as reads:
        assert torch.equal(module(ids), before)
    assert reads.modules == {module.read}
    assert (type(module.called), type(module.read), type(module.words)) == (
        nn.Linear,
        nn.Linear,
        nn.Embedding,
    )
    with pytest.raises(RuntimeError, match="stop"), watched_weights(module):
        raise RuntimeError("stop")
    assert type(module.called) is nn.Linear


def test_layers_whose_weight_is_read_elsewhere_stay_torch_layers() -> None:
    register()
    skeleton = build_skeleton(tiny_config("mixtral", 0), torch.float32, IMPLEMENTATION)
    model: Any = skeleton.model
    stored = dict.fromkeys(skeleton.state, torch.bfloat16)
    with watched_weights(model) as reads:
        _ = model.model.layers[0].self_attn.q_proj.weight
    form = choose_form(skeleton, stored, bits=4, activation_bits=16, reads=reads)
    assert "model.layers.0.self_attn.q_proj" not in form.linears
    assert "model.layers.1.self_attn.q_proj" in form.linears
    assert "model.layers.0.self_attn.q_proj.weight" not in form.kept


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_packed_bytes_are_those_of_the_native_layout(bits: int) -> None:
    for rows, cols in ((1, 1), (16, 64), (17, 65), (1000, 72), (128, 4096)):
        assert packed_bytes(rows, cols, bits) == _native.LinearLayout(rows, cols, bits).nbytes


def test_the_title_names_the_bits_of_each_kind() -> None:
    changes = {"vocab_size": 512, "hidden_size": 64}
    assert form_of("qwen3_moe", 0, "auto", **changes)[1].title == (
        "k_proj, o_proj, q_proj 4 bits; v_proj 6 bits; lm_head 6 and 4 bits; others not packed"
    )
    assert form_of("qwen3_moe", 0, 8)[1].title == (
        "k_proj, lm_head, o_proj, q_proj, v_proj 8 bits; others not packed"
    )
    assert form_of("qwen3_moe", 0, 16)[1].title == "not packed"


@pytest.mark.parametrize("stored_rows", [True, False])
@pytest.mark.parametrize("bits", [16, "auto", 8, 6, 4])
def test_encoded_weights_are_kept_in_linear_layers_and_where_rows_are_read_as_stored(
    bits: DenseBits, stored_rows: bool
) -> None:
    register()
    config = tiny_config("qwen3_moe", 0, vocab_size=512, hidden_size=64)
    skeleton = build_skeleton(config, torch.float32, IMPLEMENTATION)
    stored = dict.fromkeys(skeleton.state, torch.float16)
    weights = {name: "q8_0" for name, tensor in skeleton.state.items() if tensor.dim() == 2}
    form = choose_form(
        skeleton, stored, bits=bits, activation_bits=16, encodings=weights, stored_rows=stored_rows
    )
    kept = bits in (16, "auto")
    assert set(form.kept_linears) == (set(form.linears) if kept else set())
    assert set(form.quantised) == (set() if kept or bits == 16 else set(form.linears))
    assert ("model.embed_tokens" in form.encodings) == stored_rows
    # What only a packer reads is not loaded as a tensor.
    assert form.encoded.keys() == {*form.encodings, *form.quantised}
    head = skeleton.model.lm_head.weight
    rows = head.numel() * 34 // 32
    if kept:
        assert form.head_bytes == _native.LinearLayout(*head.shape, "q8_0").nbytes
    if stored_rows:
        embedding = rows + sum(buffer.nbytes for buffer in skeleton.model.buffers())
        assert form.nbytes - form.head_bytes - form.in_layers == embedding


def test_a_projection_with_the_shape_of_a_router_is_packed() -> None:
    """As those of Qwen3-Coder-Next: 512 experts, and 512 rows of keys, values and shared experts."""
    _, form = form_of("qwen3_next", 0, 8)
    rows, hidden = form.linears["model.layers.1.self_attn.k_proj"]
    skeleton, same = form_of("qwen3_next", 0, 8, num_experts=rows)
    assert {(entry.num_experts, entry.hidden_size) for entry in skeleton.experts} == {(rows, hidden)}
    assert same.linears == form.linears


def test_a_router_in_a_module_of_its_own_is_not_packed() -> None:
    skeleton, form = form_of("hunyuan_v1_moe", 0, 8, num_experts=32)
    gates = [name for name, _ in skeleton.model.named_modules() if name.endswith("gate.wg")]
    assert gates
    assert not form.linears.keys() & set(gates)
