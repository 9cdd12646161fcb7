"""Mamba-2 mixers: recognised, their reference against transformers, and natively."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from families import tiny_family
from isa_runner import isa_fixture
from tiny import write_tiny_checkpoint
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

import moechat
from moechat import _native
from moechat.models.cache_argument import STATES
from moechat.models.decode.mamba2 import Mamba2, agrees, recognise_mamba2, reference
from moechat.models.decode.native_mamba2 import native_mamba2
from moechat.models.decode.probe import close
from moechat.models.linear import StoredLinear
from moechat.models.state_layer import StateLayer

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Heads, elements of a head, groups, elements of a key, taps: several parts of vectors, and more than one.
SIZES = [(4, 16, 2, 16, 4), (6, 12, 3, 20, 3), (32, 64, 2, 128, 4)]
HIDDEN = 32


def mixer_of(
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    taps: int,
    *,
    dtype: torch.dtype = torch.float32,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Mamba2:
    """A mixer with random weights in 16-bit rows, as it is recognised."""
    config = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["mamba", "mamba"],
        mamba_num_heads=heads,
        mamba_head_dim=head_dim,
        n_groups=groups,
        ssm_state_size=state_size,
        conv_kernel=taps,
    )
    torch.manual_seed(7)
    mixer: Any = NemotronHMamba2Mixer(config, 1)
    mixer.time_step_limit = limits
    with torch.no_grad():
        for name in ("A_log", "dt_bias", "D"):
            mixer._parameters[name].normal_()
        mixer.norm.weight.normal_()
        mixer.conv1d.weight.normal_(std=0.3)
        mixer.conv1d.bias.normal_()
    mixer = mixer.to(dtype).eval()
    for name in ("in_proj", "out_proj"):
        rows = mixer._modules[name].weight.detach().bfloat16().contiguous()
        mixer._modules[name] = StoredLinear(rows, None, dtype)
    found = recognise_mamba2(mixer)
    assert list(found) == [mixer]
    return found[mixer]


def cache_of(mamba: Mamba2) -> Any:
    """A cache with states behind some tokens."""
    generator = torch.Generator().manual_seed(3)
    dtype, layer = mamba.mixer.conv1d.weight.dtype, StateLayer()
    before = torch.randn((1, mamba.channels, mamba.taps), generator=generator).to(dtype)
    state = torch.randn((1, mamba.heads, mamba.head_dim, mamba.state_size), generator=generator)
    layer.update_conv_state(before, conv_kernel_size=mamba.taps)
    layer.update_recurrent_state(state)
    cache: Any = DynamicCache()
    cache.layers = [StateLayer(), layer]
    return cache


def empty_cache() -> Any:
    cache: Any = DynamicCache()
    cache.layers = [StateLayer(), StateLayer()]
    return cache


def prompt_of(mamba: Mamba2, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn((1, tokens, HIDDEN), generator=generator).to(mamba.mixer.conv1d.weight.dtype)


def hidden_states(mamba: Mamba2) -> list[torch.Tensor]:
    generator, dtype = torch.Generator().manual_seed(5), mamba.mixer.conv1d.weight.dtype
    return [torch.randn((1, 1, HIDDEN), generator=generator).to(dtype) * size for size in (1.0, 1.0, 3.0)]


def states_of(mamba: Mamba2, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = mamba.states_of(cache)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_the_reference_computes_what_transformers_does(sizes: Any, dtype: torch.dtype) -> None:
    mamba = mixer_of(*sizes, dtype=dtype)
    rough = (
        torch.float32 if dtype is torch.float32 else torch.bfloat16
    )  # it rounds states where it reads them
    cache = cache_of(mamba)
    before, state = (each.clone() for each in states_of(mamba, cache))
    for x in hidden_states(mamba):
        wanted = mamba.mixer(x, **{STATES: cache})
        first, last = mamba.projections
        made = last(reference(mamba, first(x).view(1, -1), before, state)).view_as(wanted)
        assert close(made.to(rough), wanted.to(rough))
        kept_before, kept_state = states_of(mamba, cache)
        assert torch.equal(before, kept_before)
        assert close(state.to(rough), kept_state.to(rough))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_the_native_mixer_computes_the_reference(sizes: Any, dtype: torch.dtype) -> None:
    mamba = mixer_of(*sizes, dtype=dtype)
    forward, cache, ours = native_mamba2(mamba), cache_of(mamba), cache_of(mamba)
    assert forward is not None
    before, state = states_of(mamba, cache)
    for x in hidden_states(mamba):
        first, last = mamba.projections
        wanted = last(reference(mamba, first(x).view(1, -1), before, state)).view_as(x)
        assert close(forward(x, **{STATES: ours}), wanted)
        own_before, own_state = states_of(mamba, ours)
        assert torch.equal(before, own_before)
        assert close(own_state, state)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_a_prompt_has_the_states_and_results_of_its_tokens_one_by_one(sizes: Any, dtype: torch.dtype) -> None:
    mamba = mixer_of(*sizes, dtype=dtype)
    run = native_mamba2(mamba).__dict__["mixer"]  # the projections of several tokens round in another way
    for tokens in (2, 16, 65):
        rows = mamba.projections[0](prompt_of(mamba, tokens))
        outs, states = [], []
        for parts in ([tokens], [1] * tokens, [1, tokens - 1]):
            before, state = (each.clone() for each in states_of(mamba, cache_of(mamba)))
            made, first = torch.empty((tokens, mamba.inner), dtype=dtype), 0
            for part in parts:
                at = rows[0, first:].data_ptr(), before.data_ptr(), state.data_ptr(), made[first:].data_ptr()
                run.many(part, *at, mamba.limits)
                first += part
            outs.append(made)
            states.append((before, state))
        assert all(torch.equal(outs[0], other) for other in outs)
        assert all(all(map(torch.equal, states[0], other)) for other in states)
        before, state = (each.clone() for each in states_of(mamba, cache_of(mamba)))
        wanted = [reference(mamba, rows[:, token], before, state) for token in range(tokens)]
        assert close(outs[0], torch.cat(wanted))
        assert close(states[0][1], state)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.25, 0.5)])
@pytest.mark.parametrize("dtype", TYPES)
@torch.inference_mode()
def test_a_prompt_is_that_of_the_family_s_code_before_and_behind_others(
    dtype: torch.dtype, limits: tuple[float, float]
) -> None:
    mamba = mixer_of(*SIZES[1], dtype=dtype, limits=limits)
    forward, ours, theirs = native_mamba2(mamba), empty_cache(), empty_cache()
    assert forward is not None
    rough = torch.float32 if dtype is torch.float32 else torch.bfloat16
    for tokens in (1, 2, 70, 1, 3):
        x = prompt_of(mamba, tokens)
        wanted = mamba.mixer(x.clone(), **{STATES: theirs})
        assert close(forward(x, **{STATES: ours}).to(rough), wanted.to(rough))
        for own, their in zip(states_of(mamba, ours), states_of(mamba, theirs), strict=True):
            assert close(own.to(rough), their.to(rough))


@torch.inference_mode()
def test_the_result_does_not_depend_on_threads() -> None:
    mamba, threads, results = mixer_of(*SIZES[-1], dtype=torch.bfloat16), _native.num_threads(), []
    forward = native_mamba2(mamba)
    assert forward is not None
    for count in (1, 2, 3, 7):
        _native.set_num_threads(count)
        cache = cache_of(mamba)
        made = [forward(x, **{STATES: cache}) for x in (*hidden_states(mamba), prompt_of(mamba, 70))]
        results.append([*made, *states_of(mamba, cache)])
    _native.set_num_threads(threads)
    assert all(all(map(torch.equal, results[0], other)) for other in results)


run_under = isa_fixture(__file__, "the_native_mixer or on_threads or a_prompt")


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_computes_the_same(isa: str, run_under: Callable[[str], None]) -> None:
    run_under(isa)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_the_reference_does_otherwise_is_noticed(dtype: torch.dtype) -> None:
    mamba = mixer_of(*SIZES[0], dtype=dtype)
    assert agrees(mamba)
    for wrong in (
        replace(mamba, eps=0.5),
        replace(mamba, norm_group=mamba.inner),
        replace(mamba, groups=1, state_size=2 * mamba.state_size),
        replace(mamba, index=mamba.index + 1),
        replace(mamba, limits=(0.01, math.inf)),
        replace(mamba, limits=(0.0, 10.0)),
    ):
        assert not agrees(wrong)


@pytest.mark.parametrize("limits", [(0.001, math.inf), (0.0, 10.0)])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_limit_of_steps_is_noticed(
    dtype: torch.dtype, limits: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    mamba = mixer_of(*SIZES[0], dtype=dtype)
    assert agrees(mamba)

    def limited(x: torch.Tensor) -> torch.Tensor:
        return functional.softplus(x).clamp(*limits)

    functions = SimpleNamespace(**{**vars(functional), "softplus": limited})
    monkeypatch.setattr(modeling_nemotron_h, "F", functions)
    assert not agrees(mamba)


def test_mixers_that_do_more_are_not_recognised() -> None:
    class Louder(NemotronHMamba2Mixer):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            return super().forward(*arguments, **named) * 1.2

    mixer = mixer_of(*SIZES[0]).mixer
    mixer.__class__ = Louder
    assert recognise_mamba2(mixer) == {}


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "lfm2_moe", "qwen3_moe"])
def test_other_mixers_are_not_recognised(family: str) -> None:
    assert recognise_mamba2(AutoModelForCausalLM.from_config(tiny_family(family)).eval()) == {}


def test_sizes_that_are_not_possible_are_refused() -> None:
    mamba = mixer_of(*SIZES[0])
    products = [module.product() for module in mamba.projections]
    names = ("heads", "head_dim", "groups", "state_size", "taps", "norm_group")
    sizes = dict(zip(names, (*SIZES[0], mamba.norm_group), strict=True))
    for name, value, why in (
        *((name, 0, f"{name} is 0; it must be at least 1") for name in names),
        ("taps", 9, "taps is 9, more than 8"),
        ("groups", 3, "heads are not a multiple of groups"),
        ("norm_group", 24, "not a multiple of norm_group"),
        ("state_size", 8, "the first projection"),
    ):
        with pytest.raises(ValueError, match=why):
            _native.MambaMixer("float32", *{**sizes, name: value}.values(), 1e-5, *[0] * 6, *products)
    with pytest.raises(ValueError, match="the last projection"):
        _native.MambaMixer("float32", *sizes.values(), 1e-5, *[0] * 6, products[0], products[0])


TOKENS = [3, 10, 17, 24]


def logits(engine: moechat.Engine) -> torch.Tensor:
    """Of decoded tokens."""
    cache, found = engine.loaded.new_cache(64), []
    for tokens in ([5, 17, 9], *([token] for token in TOKENS)):
        output = engine.passes.run(torch.tensor([tokens]), cache)
        found.append(output.logits[0, -1].float())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "mixers"), [("nemotron_h", 1), ("granitemoehybrid", 2)])
def test_a_decoded_token_is_that_of_the_family_s_code(
    family: str, mixers: int, dtype: str, tmp_path: Path, moechat_home: Path
) -> None:
    config = tiny_family(family)
    if family == "granitemoehybrid":
        # All experts, since what bfloat16 rounds would choose others where two are nearly alike.
        config.num_experts_per_tok = config.num_local_experts
    write_tiny_checkpoint(tmp_path / "model", config)
    with moechat.load(tmp_path / "model", ctx=64, dtype=dtype, activation_bits=32) as engine:
        native = engine.loaded.native_modules
        assert len(native.mambas) == mixers
        found = logits(engine)
        heard: list[Any] = []
        mixer = engine.loaded.model.get_submodule(native.mambas[0])
        hook = mixer.norm.register_forward_hook(lambda *_: heard.append(1))
        logits(engine)
        assert len(heard) == 1 + len(TOKENS), "hooks inside of a mixer are called"
        hook.remove()
        native.undo()
        wanted = logits(engine)
    assert (found - wanted).abs().max() < (3e-5 if dtype == "float32" else 3e-2) * wanted.abs().max()
