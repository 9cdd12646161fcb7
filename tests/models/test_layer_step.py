"""Decoder layers whose step is one native call: the same bits as part by part, or left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, write_tiny_checkpoint
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

import moechat
from moechat import _native
from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.decode.layer_check import agrees
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.layers import attention_step
from moechat.models.decode.native_step import NativeStep
from moechat.models.decode.probe import close

TOKENS = [5, 17, 3, 80, 44, 9, 21, 70, 2, 33, 61, 13]
# With norms of heads, without, over all heads; with sinks and windows; with biases and gated shared experts;
# with layers that have no experts, and shared experts without a gate.
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "qwen2_moe", "dots1"]
# What of a head is rotated, where it is not all of it.
PARTIAL: dict[str, dict[str, Any]] = {"glm4_moe": {}, "minimax_m2": {"rotary_dim": 8}}
Engine = Any


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def checkpoint(directory: Path, family: str, variant: int = 0, **more: Any) -> Path:
    config = tiny_config(family, variant, **more)
    config.dtype = torch.bfloat16  # as published models have it; other weights stay torch's
    write_tiny_checkpoint(directory / "model", config)
    return directory / "model"


def angle_count(engine: Engine) -> int:
    return int(engine.loaded.model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[0]]))[0].shape[-1])


def split(engine: Engine) -> None:
    """Let the layers go part by part; the parts stay native."""
    vars(engine.loaded.model).pop("forward", None)
    for name in engine.loaded.native_modules.layers:
        del vars(engine.loaded.model.get_submodule(name))["forward"]


def steps_of(engine: Engine) -> list[NativeStep]:
    names = engine.loaded.native_modules.layers
    return [vars(engine.loaded.model.get_submodule(name))["forward"].kept for name in names]


def recognise_layer(layer: Any, engine: Engine) -> Any:
    step = attention_step(layer, angle_count(engine), {})
    return None if step is None else step.forward(layer)


def decode(engine: Engine) -> list[torch.Tensor]:
    cache = engine.decoder.new_cache()
    rows = []
    for part in [TOKENS[:9], *([token] for token in TOKENS[9:])]:
        out = engine.passes.run(torch.tensor([part]), cache)
        rows.append(out.logits[0, -1].clone())
    return [*rows, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]


@contextmanager
def modules_called(engine: Engine) -> Iterator[list[Any]]:
    """Calls of the attention modules' own forward."""
    calls: list[Any] = []
    attentions = [layer.self_attn for layer in engine.loaded.model.model.layers]
    before = [vars(module)["forward"] for module in attentions]

    def heard(own: Any) -> Any:
        return lambda *given, **named: calls.append(named) or own(*given, **named)

    for module, own in zip(attentions, before, strict=True):
        module.forward = heard(own)
    yield calls
    for module, own in zip(attentions, before, strict=True):
        module.forward = own


@pytest.mark.parametrize("dense_bits", [16, 4])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")]
    + [("qwen3_moe", "float16")],
)
def test_a_native_step_equals_its_parts_bitwise(
    family: str, dtype: str, dense_bits: int, tmp_path: Path, moechat_home: Path
) -> None:
    for variant in (0, 1):
        path = checkpoint(tmp_path / str(variant), family, variant)
        with moechat.load(path, bits=16, dtype=dtype, dense_bits=dense_bits) as engine:
            layers = engine.loaded.model.config.get_text_config().num_hidden_layers
            native_modules = engine.loaded.native_modules
            assert len(native_modules.layers) == layers
            assert len(native_modules.routers) == len(engine.loaded.parts)
            with modules_called(engine) as calls:
                joined = decode(engine)
            assert len(calls) == layers  # all in the first pass, which has many tokens
            exact = all(step.exact for step in steps_of(engine))
            assert exact == (family != "qwen2_moe" or dtype == "float32"), "only gates are not"
            split(engine)
            assert all(map(torch.equal if exact else close, joined, decode(engine)))


def test_a_step_does_not_depend_on_threads(tmp_path: Path, moechat_home: Path, threads: None) -> None:
    path = checkpoint(
        tmp_path, "qwen3_moe", hidden_size=512, num_attention_heads=32, num_key_value_heads=8, head_dim=64
    )
    with moechat.load(path, bits=4, dtype="float32", dense_bits=8) as engine:
        assert engine.loaded.native_modules.layers
        results = []
        for count in (1, 2, 3, 7):
            _native.set_num_threads(count)
            results.append(decode(engine))
    assert all(all(map(torch.equal, results[0], other)) for other in results)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "phimoe", "deepseek_v2", "minimax", "flex_olmo"])
def test_layers_of_another_kind_are_not_replaced(family: str, tmp_path: Path, moechat_home: Path) -> None:
    with moechat.load(checkpoint(tmp_path, family), bits=16, dtype="float32") as engine:
        assert not engine.loaded.native_modules.layers


def test_a_layer_that_clips_is_not_replaced(tmp_path: Path, moechat_home: Path) -> None:
    # No probe comes near this limit.
    with moechat.load(checkpoint(tmp_path, "olmoe", clip_qkv=1e6), bits=16, dtype="float32") as engine:
        assert not engine.loaded.native_modules.layers


@pytest.fixture
def engine(tmp_path: Path, moechat_home: Path) -> Iterator[Engine]:
    with moechat.load(checkpoint(tmp_path, "qwen3_moe"), bits=16, dtype="float32") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_moe", "bfloat16"), ("mixtral", "float32"), ("gpt_oss", "bfloat16"), ("olmoe", "float16")],
)
def test_a_native_step_over_packed_rows_equals_its_parts_bitwise(
    family: str, dtype: str, tmp_path: Path, moechat_home: Path, threads: None
) -> None:
    for variant, count in ((0, 1), (1, 3)):
        _native.set_num_threads(count)
        path = checkpoint(tmp_path / str(variant), family, variant)
        with moechat.load(path, bits=16, dtype=dtype, kv_bits=8) as engine:
            with modules_called(engine) as calls:
                joined = decode(engine)
            assert len(calls) == engine.loaded.model.config.num_hidden_layers  # of the first pass
            split(engine)
            assert all(map(torch.equal, joined, decode(engine)))


def test_an_attention_with_other_code_is_not_replaced(engine: Engine) -> None:
    class Louder(Qwen3MoeAttention):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            out, weights = super().forward(*arguments, **named)
            return out * 1.5, weights

    split(engine)
    layer = engine.loaded.model.model.layers[0]
    assert recognise_layer(layer, engine) is not None
    layer.self_attn.__class__ = Louder
    assert recognise_layer(layer, engine) is None


def test_a_layer_that_computes_something_else_with_known_names_does_not_agree(engine: Engine) -> None:
    split(engine)
    first, second = engine.loaded.model.model.layers
    ours = recognise_layer(first, engine)
    assert ours is not None
    assert agrees(first, ours)
    for part, change in (
        (first.self_attn, {"scaling": 0.3}),
        (first, {"post_attention_layernorm": first.input_layernorm}),
    ):
        before = {name: getattr(part, name) for name in change}
        for name, value in change.items():
            setattr(part, name, value)
        if isinstance(next(iter(change.values())), nn.Module):
            first.input_layernorm.weight.data[::2] += 1.0
        assert not agrees(first, ours)
        for name, value in before.items():
            setattr(part, name, value)
    assert layer_kind(first) == layer_kind(second)
    second.self_attn.scaling = 0.3
    assert layer_kind(first) != layer_kind(second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention_that_computes_a_little_more_is_not_replaced(
    dtype: str, tmp_path: Path, moechat_home: Path
) -> None:
    path = checkpoint(tmp_path, "deepseek_v3")
    with moechat.load(path, bits=16, dtype=dtype) as engine:
        layer = engine.loaded.model.model.layers[0]
        ours = vars(layer)["forward"]
        assert isinstance(ours.kept.run, _native.LatentStep)
        split(engine)
        assert agrees(layer, ours)
        own = layer.self_attn.o_proj.forward
        layer.self_attn.o_proj.forward = lambda x: own(x) * 1.02
        assert not agrees(layer, ours)


def test_hooks_on_parts_of_a_layer_are_called(engine: Engine) -> None:
    layer = engine.loaded.model.model.layers[1]
    wanted = decode(engine)
    for module in (layer.self_attn, layer.self_attn.q_proj, layer.mlp.gate, layer.input_layernorm):
        heard: list[Any] = []
        handle = module.register_forward_hook(lambda *given, to=heard: to.append(given[-1]))
        assert all(map(torch.equal, wanted, decode(engine)))
        assert len(heard) == 4
        handle.remove()
        decode(engine)
        assert len(heard) == 4


def test_unsupported_passes_use_the_modules(engine: Engine) -> None:
    layer = engine.loaded.model.model.layers[0]
    heard: list[Any] = []
    own = layer.self_attn.forward
    layer.self_attn.forward = lambda *given, **named: heard.append(named) or own(*given, **named)
    cache = engine.decoder.new_cache()
    for count, calls in ((4, 1), (1, 1), (3, 2), (1, 2)):
        engine.passes.run(torch.tensor([TOKENS[:count]]), cache)
        assert len(heard) == calls
    engine.passes.run(torch.tensor([TOKENS[:1]]), use_cache=False)
    assert len(heard) == 3


def test_a_full_reserve_grows(engine: Engine) -> None:
    wanted = decode(engine)
    cache = engine.decoder.new_cache()
    cache.layers = [ReservedLayer(10) for _ in cache.layers]
    rows = []
    for part in [TOKENS[:9], *([token] for token in TOKENS[9:])]:
        out = engine.passes.run(torch.tensor([part]), cache)
        rows.append(out.logits[0, -1])
    assert all(map(torch.equal, wanted, rows))
    assert cache.layers[0].get_seq_length() == len(TOKENS)


def test_a_place_is_given_only_where_keys_and_values_fit() -> None:
    layer = ReservedLayer(4)
    assert not layer.takes_token(2, 8, torch.float32)
    layer.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    assert not layer.takes_token(2, 8, torch.bfloat16)
    assert not layer.takes_token(1, 8, torch.float32)
    assert not layer.takes_token(2, 16, torch.float32)
    assert layer.takes_token(2, 8, torch.float32)
    place = layer.append_place()
    assert place == (layer.keys.data_ptr(), 32, layer.values.data_ptr(), 32, 3, False)
    assert layer.get_seq_length() == 4
    assert not layer.takes_token(2, 8, torch.float32)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    weights = torch.ones(64, 32, dtype=torch.bfloat16)
    product = _native.rows16_product(weights.view(torch.int16).numpy().view("uint16"), False, None)
    norm = _native.RmsNorm("float32", weights.data_ptr(), 32, 1e-6, 0.0, True)
    attention = _native.Attention("float32", 2, 1, 16, 0, 16, 0.25, 0)
    with pytest.raises(
        ValueError, match="parts of a layer's step do not fit together: projections and heads"
    ):
        _native.LayerStep(
            *("float32", norm, product, product, product, product, False, None, attention, 16, 16),
            _native.FeedStep(norm, None, None, None),
        )


def test_window_layers_continue_when_the_window_is_full(tmp_path: Path, moechat_home: Path) -> None:
    with moechat.load(checkpoint(tmp_path, "gpt_oss"), bits=16, dtype="float32") as engine:
        config = engine.loaded.model.config
        assert config.layer_types[0] == "sliding_attention"
        window = config.sliding_window
        tokens = [(7 * i) % 90 + 3 for i in range(5 * window + 4)]
        results = []
        # Memory in which the window moves often, and transformers' own cache.
        for small in (True, False):
            cache = engine.decoder.new_cache()
            cache.layers = [
                layer if not layer.is_sliding else WindowLayer(window, 3) if small else plain
                for layer, plain in zip(cache.layers, DynamicCache(config=config).layers, strict=True)
            ]
            with modules_called(engine) as calls:
                rows = [
                    engine.passes.run(torch.tensor([part]), cache).logits[0, -1]
                    for part in [tokens[:3], *([token] for token in tokens[3:])]
                ]
            results.append(rows)
            sliding = sum(kind == "sliding_attention" for kind in config.layer_types)
            others = len(config.layer_types)
            assert len(calls) == (others if small else others + sliding * (len(rows) - 1))
            assert cache.layers[0].get_seq_length() == len(tokens)
        assert all(map(torch.equal, *results))


def test_a_part_of_a_head_is_rotated(tmp_path: Path, moechat_home: Path) -> None:
    for family in ("glm4_moe", "minimax_m2"):
        path = checkpoint(tmp_path / family, family, **PARTIAL[family])
        with moechat.load(path, bits=16, dtype="float32") as engine:
            layers = engine.loaded.model.config.num_hidden_layers
            assert len(engine.loaded.native_modules.layers) == layers
            with modules_called(engine) as calls:
                joined = decode(engine)
            assert len(calls) == layers
            split(engine)
            assert all(map(torch.equal, joined, decode(engine)))


def test_a_layer_can_be_called_with_its_arguments_in_order(engine: Engine) -> None:
    layer = engine.loaded.model.model.layers[0]
    hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    angles = engine.loaded.model.model.rotary_emb(hidden, torch.arange(3)[None])
    with torch.inference_mode():
        ours = layer(hidden, None, position_embeddings=angles)
        split(engine)
        assert torch.equal(ours, layer(hidden, None, position_embeddings=angles))


def test_clocks_of_a_step_change_no_bit(tmp_path: Path) -> None:
    with moechat.load(checkpoint(tmp_path, "qwen3_moe"), ctx=64) as engine:
        run = vars(engine.loaded.model.model.layers[0])["forward"].kept.run
        plain = decode(engine)
        assert run.seconds() == {}
        run.measure(True)
        timed = decode(engine)
        seconds = run.seconds()
        run.measure(False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(timed, plain, strict=True))
    assert set(seconds) == {"norms", "projections", "cache", "attention", "router", "shared"}
    assert all((value > 0) == (part != "shared") for part, value in seconds.items())
    assert run.seconds() == {}
