"""Models whose pass of one token skips transformers' code between layers: the same bits, or left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import tiny_config, write_tiny_checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

import moechat
from moechat.models.cache_argument import CACHE, cache_of
from moechat.models.cache_layers import ReservedLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.cache_states import tensors_of
from moechat.models.decode.whole import recognise_model
from moechat.offload.settings import OffloadOptions

Engine = Any
TOKENS = [5, 17, 3, 80, 44, 9, 21, 70, 2, 33, 61, 13]
LINEAR = ["qwen3_next", "qwen3_5_moe_text"]
# Enough of them for all projections to be packed, as those of real models are.
HEADS = {"linear_num_value_heads": 32, "linear_num_key_heads": 16}
GRANITE = {
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12,
    "logits_scaling": 6.0,
    "shared_intermediate_size": 96,
}
# With latent attention: two families with layers without experts, whose queries are projected twice, or once.
LATENT: dict[str, dict[str, Any]] = {"deepseek_v3": {}, "glm4_moe_lite": {"q_lora_rank": None}}
# Norms around all parts and angles of each type of layer, as part of a model that also takes pictures, whose
# values may be its keys; short convolutions; routers that take a correction; functions inside of the model's
# code; pictures; gates with a projection of their own; layers of one part; results that are multiplied.
TYPED: dict[str, dict[str, Any]] = {
    "gemma4": {"attention_k_eq_v": True, "final_logit_softcapping": 5.0},
    "gemma4_text": {},
    **{name: {} for name in ("lfm2_moe", "minimax_m2", "dots1", "qwen3_vl_moe", "glm4v_moe", "laguna")},
    # Its mixers are not native with versions of transformers that have no empty layers of caches.
    **({"nemotron_h": {}} if EMPTY else {}),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared", "granitemoe"), GRANITE),
}
# All layers with experts; windows; shared experts; layers without experts; linear attention beside gated one.
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "qwen2_moe", "glm4_moe", *LINEAR, *LATENT, *TYPED]


def checkpoint(directory: Path, family: str, **more: Any) -> Path:
    if family in LINEAR or family in LATENT:
        own = HEADS if family in LINEAR else LATENT[family]
        config = type(tiny_family(family))(**{**tiny_family(family).to_dict(), **own, **more})
    elif family in TYPED:
        config = tiny_family(family)
        for name, value in TYPED[family].items():
            setattr(config.get_text_config(), name, value)
        for name, value in more.items():
            setattr(config, name, value)
    else:
        config = tiny_config(family, 0, **more)
    config.dtype = torch.bfloat16
    write_tiny_checkpoint(directory / "model", config)
    return directory / "model"


def decode(engine: Engine, tokens: list[int] = TOKENS, *, prompt: int = 9) -> list[torch.Tensor]:
    cache = engine.decoder.new_cache()
    rows = []
    for part in [tokens[:prompt], *([token] for token in tokens[prompt:])]:
        out = engine.passes.run(torch.tensor([part]), cache, logits_to_keep=1)
        assert cache_of(out) is cache
        rows.append(out.logits[0, -1].clone())
    return [*rows, *(tensor for layer in cache.layers for tensor in tensors_of(layer))]


@contextmanager
def base_calls(engine: Engine) -> Iterator[list[Any]]:
    """Calls of transformers' forward of the model below its head."""
    base = engine.loaded.model.model
    kind, own, calls = type(base), type(base).forward, []
    kind.forward = lambda self, *given, **named: calls.append(named) or own(self, *given, **named)
    try:
        yield calls
    finally:
        kind.forward = own


@pytest.fixture
def engine(tmp_path: Path, moechat_home: Path) -> Iterator[Engine]:
    with moechat.load(checkpoint(tmp_path, "qwen3_moe"), bits=16, dtype="float32") as loaded:
        assert loaded.loaded.native_modules.whole
        yield loaded


@pytest.mark.parametrize("pages", [None, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_equals_transformers_pass_bitwise(
    family: str, dtype: str, pages: int | None, tmp_path: Path, moechat_home: Path
) -> None:
    path, offload = checkpoint(tmp_path, family), OffloadOptions(pages=pages)
    with moechat.load(path, bits=4, dtype=dtype, dense_bits="auto", offload=offload) as engine:
        assert engine.loaded.native_modules.whole
        assert (engine.loaded.near is None) == (pages is None)
        tokens = [(7 * i) % 90 + 3 for i in range(40)]  # longer than the windows
        with base_calls(engine) as calls:
            ours = decode(engine, tokens)
        assert len(calls) == 1
        del vars(engine.loaded.model)["forward"]
        assert all(map(torch.equal, ours, decode(engine, tokens)))


@pytest.mark.parametrize("pages", [None, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_several_caches_equal_passes_of_their_own_bitwise(
    family: str, dtype: str, pages: int | None, tmp_path: Path, moechat_home: Path
) -> None:
    path, offload = checkpoint(tmp_path, family), OffloadOptions(pages=pages)
    with moechat.load(path, bits=4, dtype=dtype, dense_bits="auto", offload=offload) as engine:
        for count in (2, 3, 7, engine.passes.most_together):
            ours, theirs = ([prefilled(engine, 3 + 5 * number) for number in range(count)] for _ in range(2))
            for step in range(3):
                tokens = [(7 * number + step) % 90 + 3 for number in range(count)]
                rows = engine.passes.run_together(tokens, ours)
                wanted = [
                    engine.decoder.step(torch.tensor([[token]]), cache)[0]
                    for token, cache in zip(tokens, theirs, strict=True)
                ]
                assert rows is not None
                assert all(map(torch.equal, rows, wanted))
            for pair in zip(ours, theirs, strict=True):
                for mine, other in zip(*(cache.layers for cache in pair), strict=True):
                    assert all(map(torch.equal, tensors_of(mine), tensors_of(other)))


def test_ids_that_stand_for_pictures_are_left_to_the_family(tmp_path: Path, moechat_home: Path) -> None:
    """Gemma 4 gives them another embedding."""
    picture = 44
    path = checkpoint(tmp_path, "gemma4", image_token_id=picture)
    with moechat.load(path, bits=4, dtype="float32") as engine:
        assert engine.loaded.native_modules.whole
        with base_calls(engine) as calls:
            ours = decode(engine, [5, 17, 3, 80, picture, 9], prompt=2)
            assert len(calls) == 2
            caches = [prefilled(engine, 4), prefilled(engine, 7)]
            assert engine.passes.run_together([9, picture], caches) is None
            assert engine.passes.run_together([9, 11], caches) is not None
        del vars(engine.loaded.model)["forward"]
        assert all(map(torch.equal, ours, decode(engine, [5, 17, 3, 80, picture, 9], prompt=2)))


def prefilled(engine: Engine, tokens: int) -> Any:
    cache = engine.decoder.new_cache()
    engine.decoder.step(torch.tensor([[(5 * i) % 90 + 3 for i in range(tokens)]]), cache)
    return cache


def test_a_cache_that_does_not_take_a_token_natively_is_computed_by_its_layer(engine: Engine) -> None:
    full, empty = engine.loaded.new_cache(8), engine.decoder.new_cache()
    engine.decoder.step(torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]]), full)  # its memory is full
    others = deepcopy([full, empty])
    rows = engine.passes.run_together([3, 4], [full, empty])
    assert rows is not None
    for row, token, cache in zip(rows, (3, 4), others, strict=True):
        assert torch.equal(row, engine.decoder.step(torch.tensor([[token]]), cache)[0])


def test_more_tokens_than_a_native_step_takes_are_refused(engine: Engine) -> None:
    caches = [prefilled(engine, 2) for _ in range(engine.passes.most_together + 1)]
    assert engine.passes.run_together([3] * len(caches), caches) is None
    assert caches[0].get_seq_length() == 2


@pytest.mark.parametrize("family", ["ernie4_5_moe", "phimoe", "deepseek_v2", "minimax"])
def test_models_with_other_layers_are_left_alone(family: str, tmp_path: Path, moechat_home: Path) -> None:
    with moechat.load(checkpoint(tmp_path, family), bits=16, dtype="float32") as engine:
        assert not engine.loaded.native_modules.whole
        assert "forward" not in vars(engine.loaded.model)


def test_a_model_with_other_code_is_left_alone(engine: Engine) -> None:
    class Louder(Qwen3MoeForCausalLM):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            out = super().forward(*arguments, **named)
            out.logits *= 1.5
            return out

    model = engine.loaded.model
    del vars(model)["forward"]
    assert recognise_model(model) is not None
    model.config.output_router_logits = True
    assert recognise_model(model) is None
    model.config.output_router_logits = False
    model.__class__ = Louder
    assert recognise_model(model) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_that_computes_something_else_with_known_names_is_left_alone(
    family: str, tmp_path: Path, moechat_home: Path
) -> None:
    with moechat.load(checkpoint(tmp_path, family), bits=16, dtype="float32") as engine:
        model = engine.loaded.model
        del vars(model)["forward"]
        assert recognise_model(model) is not None
        own, kinds = model.model.norm.forward, getattr(model.config, "layer_types", None)
        if kinds is not None:
            model.config.layer_types = kinds[:1]
            assert recognise_model(model) is None
            model.config.layer_types = kinds
        seen: list[int] = []

        def growing(hidden: torch.Tensor) -> Any:
            seen.append(len(seen))
            return own(hidden) * (1.0 + len(seen) / 64)

        model.model.norm.forward = growing
        assert recognise_model(model) is None
        assert seen


def test_hooks_between_layers_are_called(engine: Engine) -> None:
    model = engine.loaded.model
    wanted = decode(engine)
    parts = (
        model,
        model.model,
        model.model.embed_tokens,
        model.model.layers[1],
        model.model.norm,
        model.lm_head,
    )
    for module in parts:
        heard: list[Any] = []
        handle = module.register_forward_hook(lambda *given, to=heard: to.append(given[-1]))
        assert all(map(torch.equal, wanted, decode(engine)))
        assert len(heard) == 4
        handle.remove()


def test_other_calls_go_to_transformers(engine: Engine) -> None:
    model = engine.loaded.model
    one = torch.tensor([[5]])
    with base_calls(engine) as calls, torch.inference_mode():
        cache = engine.decoder.new_cache()
        for arguments in (
            {},
            {"use_cache": False},
            {CACHE: cache},
            {CACHE: cache, "use_cache": True, "attention_mask": torch.ones(1, 2)},
        ):
            model(one, **arguments)
        assert len(calls) == 4
        out = model(torch.tensor([[5, 6]]), use_cache=True, **{CACHE: cache})
        assert out.logits.shape[:2] == (1, 2)
        assert len(calls) == 5
        model(input_ids=one, use_cache=True, **{CACHE: cache})
        assert len(calls) == 5


def test_a_cache_that_was_never_used_or_is_full_works(engine: Engine) -> None:
    wanted = decode(engine, prompt=1)
    cache = engine.decoder.new_cache()
    cache.layers = [ReservedLayer(6) for _ in cache.layers]
    rows = [engine.passes.run(torch.tensor([[token]]), cache).logits[0, -1] for token in TOKENS]
    assert all(map(torch.equal, wanted, rows))
    assert cache.get_seq_length() == len(TOKENS)
