"""Gemma 4's decoder layers as native steps, their routers, and norms without a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import write_tiny_checkpoint
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextDecoderLayer,
    Gemma4TextMLP,
    Gemma4TextRouter,
)
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

import moechat
from moechat.geometry import Activation
from moechat.models.decode.gemma4_layers import gemma4_step
from moechat.models.decode.layer_check import agrees
from moechat.models.decode.norms import native_bare_norm, recognise_bare_norm
from moechat.models.decode.probe import FEW_TOKENS, close
from moechat.models.decode.routers import recognise_router
from moechat.models.decode.scaled_router import native_scaled_router, recognise_scaled_router
from moechat.models.decode.shared_expert import recognise_mlps

TYPES = [torch.float32, torch.bfloat16, torch.float16]


class BareNorm(nn.Module):
    def __init__(self, *, squares: bool = True, factor: float = 1.0) -> None:
        super().__init__()
        self.eps, self.squares, self.factor = 1e-6, squares, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.squares else x.float() - x.float().mean(-1, keepdim=True)
        return (self.factor * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_norms_without_a_weight_are_recognised_and_others_are_not() -> None:
    module = BareNorm()
    norm = recognise_bare_norm(module)
    assert norm is not None
    assert norm.eps == 1e-6
    native = native_bare_norm(module, norm)
    for dtype in TYPES:
        for shape in ((1, 1, 48), (3, 7), (2, 5, 130)):
            x = torch.randn(shape).to(dtype)
            assert close(native(x), module(x))
    turned = torch.randn(6, 8).T
    assert torch.equal(native(turned), module(turned)), "rows that are not contiguous are left to the module"
    for other in (BareNorm(squares=False), BareNorm(factor=1.05), nn.SiLU(), nn.Identity()):
        assert recognise_bare_norm(other) is None


def router_of(dtype: torch.dtype, kind: type[nn.Module] = Gemma4TextRouter) -> Any:
    config = tiny_family("gemma4_text")
    router = kind(config).to(dtype).eval()
    for parameter in router.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    return router.requires_grad_(False)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_router_with_scales_is_recognised_and_chooses_as_its_own_code(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    router = router_of(dtype)
    norm = recognise_bare_norm(router.norm)
    assert norm is not None
    found = recognise_scaled_router(router, {router.norm: norm})
    assert found is not None
    native = native_scaled_router(found)
    for tokens in (1, 3, FEW_TOKENS):
        x = torch.randn(tokens, 64).to(dtype)
        ours, theirs = native(x), router(x)
        assert close(ours[0], theirs[0])
        assert close(ours[1], theirs[1])
        assert close(theirs[0].gather(1, ours[2]), theirs[0].gather(1, theirs[2]))
        assert all(torch.equal(row, native(x[i : i + 1])[1][0]) for i, row in enumerate(ours[1]))
    many = torch.randn(FEW_TOKENS + 1, 64).to(dtype)
    assert torch.equal(native(many)[1], router(many)[1])
    assert recognise_scaled_router(router, {}) is None, "its norm is not known"


def test_a_router_that_computes_a_little_more_is_not_recognised() -> None:
    class Colder(Gemma4TextRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states * 1.0)[0] * 1.05, *super().forward(hidden_states)[1:]

    class Another(Gemma4TextRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            scores, weights, index = super().forward(hidden_states)
            return scores, weights, (index + 1) % 8

    for kind in (Colder, Another):
        router = router_of(torch.float32, kind)
        norm = recognise_bare_norm(router.norm)
        assert norm is not None
        assert recognise_scaled_router(router, {router.norm: norm}) is None


@pytest.mark.parametrize("dtype", TYPES)
def test_only_the_approximation_by_tanh_is_taken_for_it(dtype: torch.dtype) -> None:
    """In 16 bits other forms of GELU are as near as rounding."""
    wanted = (Activation.SILU, Activation.GELU_TANH)
    for name, known in (("gelu_pytorch_tanh", Activation.GELU_TANH), ("gelu", None), ("quick_gelu", None)):
        config = tiny_family("gemma4_text")
        config.hidden_activation = name
        part = Gemma4TextMLP(config, 0).to(dtype).requires_grad_(False)
        found = recognise_mlps(nn.ModuleList([part]), wanted)
        assert [mlp.activation for mlp in found.values()] == ([] if known is None else [known])


def test_scores_that_a_family_rounds_are_rounded_whatever_its_weights() -> None:
    """They tie, and then the lower index is chosen, which a few probes do not show."""
    config = tiny_family("lfm2_moe")
    config.num_experts, config.num_experts_per_tok, config.use_expert_bias = 32, 4, True
    for seed in range(8):
        torch.manual_seed(seed)
        router = Lfm2MoeTopKRouter(config).bfloat16().requires_grad_(False)
        router.weight.data.normal_()
        rule = recognise_router(router, torch.randn(32) / 10)
        assert rule is not None
        assert rule.rounds


@pytest.fixture(params=[False, True], ids=["values", "values-are-keys"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, moechat_home: Path) -> Iterator[Any]:
    config = tiny_family("gemma4_text")
    config.attention_k_eq_v, config.dtype = request.param, torch.bfloat16
    write_tiny_checkpoint(tmp_path / "model", config)
    with moechat.load(tmp_path / "model", dtype="bfloat16", dense_bits=8) as loaded:
        yield loaded


@contextmanager
def changed(kind: type[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    own: Any = kind.forward
    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = own


@pytest.mark.parametrize("number", [0, 3])
def test_a_layer_that_computes_anything_else_is_left_alone(engine: Any, number: int) -> None:
    layer = engine.loaded.model.model.layers[number]
    assert len(engine.loaded.native_modules.layers) == 4
    del vars(layer)["forward"]
    step = gemma4_step(layer)
    assert step is not None
    ours = step.forward(layer)
    assert agrees(layer, ours)
    own = Gemma4TextDecoderLayer.forward

    def more(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return own(self, hidden_states, *rest, **named) * 1.01

    def other(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.input_layernorm(hidden_states).clamp(-1, 1)

    with changed(Gemma4TextDecoderLayer, more):
        assert not agrees(layer, step.forward(layer))
    with changed(Gemma4TextDecoderLayer, other):
        assert gemma4_step(layer) is None, "its code uses another name"
    layer.layer_scalar.mul_(0)
    assert agrees(layer, step.forward(layer)), "weights are read where they are"
    for norm in (layer.post_feedforward_layernorm_1, layer.pre_feedforward_layernorm_2):
        vars(norm).pop("forward")
        assert gemma4_step(layer) is None, "a norm is not native"


def test_a_layer_with_inputs_of_its_own_or_shared_keys_is_left_alone(engine: Any) -> None:
    layer = engine.loaded.model.model.layers[0]
    del vars(layer)["forward"]
    for holder, name in (
        (layer, "hidden_size_per_layer_input"),
        (layer.self_attn, "is_kv_shared_layer"),
        (layer.self_attn, "store_full_length_kv"),
    ):
        before = getattr(holder, name)
        setattr(holder, name, 1)
        assert gemma4_step(layer) is None, name
        setattr(holder, name, before)
    assert gemma4_step(layer) is not None


def test_hooks_on_its_parts_are_called(engine: Any) -> None:
    model = engine.loaded.model
    cache = engine.decoder.new_cache()
    engine.passes.run(torch.tensor([[5, 17, 9]]), cache)
    layer = model.model.layers[1]
    parts = [
        layer.router,
        layer.router.proj,
        layer.router.norm,
        layer.mlp,
        layer.post_feedforward_layernorm_2,
        layer.self_attn.v_norm,
    ]
    for part in parts:
        seen: list[Any] = []
        handle = part.register_forward_hook(lambda *given, seen=seen: seen.append(given))
        engine.passes.run(torch.tensor([[3]]), cache)
        handle.remove()
        assert len(seen) == 1
