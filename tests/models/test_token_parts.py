"""Parts of a decoder layer with their dense products in one native call, for one token on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from delta_support import mixer_of
from families import tiny_family
from homes import shared_home
from tiny import write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.models.decode.gated_delta import recognise_gated_deltas
from moechat.models.decode.native_delta import native_delta
from moechat.models.decode.native_mlp import native_mlp
from moechat.models.decode.probe import close
from moechat.models.decode.products import native_products
from moechat.models.decode.shared_expert import fed, recognise_mlps
from moechat.models.linear import StoredLinear

TOKENS = [3, 10, 17, 24]


@pytest.fixture(scope="module")
def moechat_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home that all tests share, and with it the stores of checkpoints that several of them load."""
    with shared_home(tmp_path_factory) as home:
        yield home


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family, written once."""
    directory = tmp_path_factory.mktemp("families")

    @cache
    def written(family: str) -> Path:
        write_tiny_checkpoint(directory / family, config_of(family))
        return directory / family

    return written


def config_of(family: str):
    """Enough heads for all projections to be packed, as those of real models are."""
    config = tiny_family(family)
    if family.startswith("qwen3_"):
        more = {"linear_num_value_heads": 32, "linear_num_key_heads": 16}
        config = type(config)(**{**config.to_dict(), **more})
    return config


def logits(engine: moechat.Engine) -> torch.Tensor:
    """Of decoded tokens."""
    cache, found = engine.loaded.new_cache(64), []
    for tokens in ([5, 17, 9], *([token] for token in TOKENS)):
        output = engine.passes.run(torch.tensor([tokens]), cache)
        found.append(output.logits[0, -1].float())
    return torch.stack(found)


@pytest.mark.parametrize("dense_bits", [16, 8, 6, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "deltas", "mlps"),
    [
        *(("qwen3_next", 3, 4), ("qwen3_5_moe_text", 3, 4), ("glm4_moe", 0, 4)),
        *(("glm4_moe_lite", 0, 4), ("deepseek_v3", 0, 4), ("qwen2_moe", 0, 4)),
        *(("gemma4", 0, 4), ("lfm2_moe", 0, 0), ("minimax_m2", 0, 0), ("laguna", 0, 4)),
    ],
)
def test_a_decoded_token_is_that_of_the_family_s_code(
    family: str,
    deltas: int,
    mlps: int,
    dtype: str,
    dense_bits: int,
    checkpoint: Callable[[str], Path],
    moechat_home: Path,
) -> None:
    options = {"ctx": 64, "dtype": dtype, "dense_bits": dense_bits, "activation_bits": 32}
    with moechat.load(checkpoint(family), **options) as engine:
        native = engine.loaded.native_modules
        assert len(native.deltas) == deltas
        assert len(native.mlps) == mlps
        assert native.whole
        found = logits(engine)
        # The other native modules stay.
        vars(engine.loaded.model).pop("forward", None)
        assert len(native.convolutions) == (2 if family == "lfm2_moe" else 0)
        replaced = [*native.layers, *native.deltas, *native.mlps, *native.convolutions]
        if family in ("gemma4", "lfm2_moe", "minimax_m2", "laguna"):
            replaced += [*native.norms, *native.routers]
        for name in replaced:
            del vars(engine.loaded.model.get_submodule(name))["forward"]
        wanted = logits(engine)
    off = (found - wanted).abs().max() / wanted.abs().max()
    assert off < (3e-5 if dtype == "float32" else 3e-2)
    if family == "glm4_moe" and dtype == "bfloat16":
        assert torch.equal(found.argmax(1), wanted.argmax(1))


def stored(weight: torch.Tensor) -> StoredLinear:
    return StoredLinear(weight.detach().bfloat16().contiguous(), None, torch.bfloat16)


@torch.inference_mode()
def test_a_feed_forward_part_rounds_as_its_modules_do(tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "glm", tiny_family("glm4_moe"))
    with moechat.load(tmp_path / "glm", ctx=64, dtype="bfloat16", dense_bits=8) as engine:
        engine.loaded.native_modules.undo()
        parts = recognise_mlps(engine.loaded.model)
        assert parts
        for mlp in parts.values():
            forward = native_mlp(mlp)
            for seed in range(4):
                x = torch.randn((1, 1, 64), generator=torch.Generator().manual_seed(seed)).bfloat16()
                assert close(forward(x), fed(mlp, x))
            few = torch.randn(5, 64).bfloat16()
            assert torch.equal(forward(few), torch.cat([forward(row[None]) for row in few]))
            many = torch.randn(_native.MOST_STEP_TOKENS + 1, 64).bfloat16()
            assert torch.equal(forward(many), mlp.module(many)), "many tokens are left to the modules"


def test_projections_with_other_weights_are_called_between_native_steps() -> None:
    """As those whose rows have several encodings."""
    delta = mixer_of("apart", 2, 4, 16, 16, 4)
    assert native_products(delta.projections) is None
    assert native_delta(delta) is not None


def test_parts_that_do_not_fit_together_are_refused() -> None:
    mixer = mixer_of("apart", 2, 4, 16, 16, 4, hidden=64).mixer
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        mixer._modules[name] = stored(mixer._modules[name].weight)
    (delta,) = recognise_gated_deltas(mixer.bfloat16()).values()
    assert native_delta(delta) is not None
    products = native_products([*delta.projections, delta.output])
    weights = [weight.data_ptr() for weight in delta.parameters()]
    places = [
        (place.start, place.stride)
        for place in (delta.q, delta.k, delta.v, delta.gate, delta.beta, delta.decay)
    ]
    run = _native.GatedDelta("bfloat16", 2, 2, 16, 16, 4, places, 1e-6, *weights)
    _native.DeltaMixer(run, products[:-1], [0, 1, 2, 3], products[-1])
    for sources in ([0, 1, 2, 4], [0, 1, 2, -1], [2, 1, 2, 3], [0, 2, 2, 3]):
        with pytest.raises(ValueError, match="do not fit together"):
            _native.DeltaMixer(run, products[:-1], sources, products[-1])
    wide = native_products(
        [stored(torch.randn(32, 64)), stored(torch.randn(48, 64)), stored(torch.randn(64, 32))]
    )
    with pytest.raises(ValueError, match="gate and up"):
        _native.Mlp("bfloat16", *wide)
    with pytest.raises(ValueError, match="up and down"):
        _native.Mlp("bfloat16", wide[1], wide[1], wide[2])
    for name, value, why in (
        ("k_heads", 0, "at least 1"),
        ("v_dim", 24, "multiple of 16"),
        ("taps", 9, "more than 8"),
        ("places", places[:5], "5 places"),
    ):
        given = {"k_heads": 2, "group": 2, "k_dim": 16, "v_dim": 16, "taps": 4, "places": places, name: value}
        with pytest.raises(ValueError, match=why):
            _native.GatedDelta("bfloat16", *given.values(), 1e-6, *weights)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_steps_of_layers_are_their_parts(
    family: str, dtype: str, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / family, config_of(family))
    with moechat.load(tmp_path / family, ctx=64, dtype=dtype) as engine:
        native = engine.loaded.native_modules
        assert native.whole
        assert len(native.layers) == engine.loaded.model.config.num_hidden_layers
        found = logits(engine)
        vars(engine.loaded.model).pop("forward")
        assert torch.equal(found, logits(engine))
        for name in native.layers:
            del vars(engine.loaded.model.get_submodule(name))["forward"]
        parts = logits(engine)
        assert close(found, parts)


def test_hooks_inside_of_a_layer_are_called(tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "next", config_of("qwen3_next"))
    with moechat.load(tmp_path / "next", ctx=64, dtype="float32") as engine:
        layers, seen = engine.loaded.model.model.layers, []
        for module in (layers[0].linear_attn, layers[1].linear_attn.norm, layers[2].input_layernorm):
            module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        logits(engine)
        assert len(seen) == 3 * (1 + len(TOKENS))


def test_norms_of_another_size_or_type_are_refused() -> None:
    mixer = mixer_of("apart", 2, 4, 16, 16, 4, hidden=64).mixer
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        mixer._modules[name] = stored(mixer._modules[name].weight)
    (delta,) = recognise_gated_deltas(mixer.bfloat16()).values()
    native = native_delta(delta).__dict__["mixer"]
    weight = torch.ones(64)
    norm = _native.RmsNorm("bfloat16", weight.data_ptr(), 64, 1e-6, 0.0, True)
    feed = _native.FeedStep(norm, None, None, None)
    _native.DeltaStep(norm, native, feed)
    with pytest.raises(ValueError, match="norms and hidden size"):
        _native.DeltaStep(_native.RmsNorm("bfloat16", weight.data_ptr(), 32, 1e-6, 0.0, True), native, feed)
    with pytest.raises(ValueError, match="types of the norms"):
        _native.DeltaStep(_native.RmsNorm("float32", weight.data_ptr(), 64, 1e-6, 0.0, True), native, feed)
