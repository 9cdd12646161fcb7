"""Linear attention with a decay for each channel: natively, against transformers' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from moechat import _native
from moechat.models.cache_argument import STATES
from moechat.models.decode.channel_delta import ChannelDelta, native_channel_delta, recognise_channel_deltas
from moechat.models.decode.probe import close
from moechat.models.state_layer import StateLayer

TYPES = [torch.float32, torch.bfloat16, torch.float16]
HIDDEN = 40


def mixer_of(dtype: torch.dtype, heads: int = 3, dim: int = 16, taps: int = 4) -> Any:
    config = KimiLinearConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        linear_num_heads=heads,
        linear_head_dim=dim,
        linear_conv_kernel_dim=taps,
        layer_types=["linear_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
    )
    torch.manual_seed(5)
    mixer = KimiLinearDeltaAttention(config, 1)
    with torch.no_grad():
        mixer.conv1d.weight.normal_()
        mixer.forget_gate.A_log.normal_()
        mixer.forget_gate.dt_bias.normal_()
        mixer.o_norm.weight.normal_()
    return mixer.to(dtype).eval().requires_grad_(False)


def found_in(mixer: Any) -> ChannelDelta:
    found = recognise_channel_deltas(mixer)
    assert list(found) == [mixer]
    return found[mixer]


def cache_of() -> Any:
    cache: Any = DynamicCache()
    cache.layers = [StateLayer(), StateLayer()]
    return cache


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim", "taps"), [(3, 16, 4), (2, 144, 2), (1, 32, 8)])
def test_tokens_behind_a_prompt_are_those_of_the_family(
    dtype: torch.dtype, heads: int, dim: int, taps: int
) -> None:
    mixer = mixer_of(dtype, heads, dim, taps)
    native = native_channel_delta(found_in(mixer))
    assert native is not None
    caches = [cache_of(), cache_of()]
    rough = torch.float32 if dtype is torch.float32 else torch.bfloat16  # errors add up in the states
    for length in (1, 5, 1, 1, 1, 3, 1, 70):
        x = torch.randn(1, length, HIDDEN).to(dtype)
        theirs = mixer(x.clone(), **{STATES: caches[0]})
        ours = native(x.clone(), **{STATES: caches[1]})
        assert close(ours.to(rough), theirs.to(rough))
        states = [cache.layers[1].tensors() for cache in caches]
        assert all(close(a.to(rough), b.to(rough)) for a, b in zip(*states, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim", "taps"), [(3, 16, 4), (2, 144, 2)])
def test_a_prompt_has_the_states_and_results_of_its_tokens_one_by_one(
    dtype: torch.dtype, heads: int, dim: int, taps: int
) -> None:
    mixer, x = mixer_of(dtype, heads, dim, taps), torch.randn(1, 67, HIDDEN).to(dtype)
    delta = found_in(mixer)
    native, results, made = native_channel_delta(delta), [], list[torch.Tensor]()
    assert native is not None
    # torch's projections of several tokens round in another way.
    parts = [*(getattr(mixer, name) for name in ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj"))]
    parts += [mixer.g_b_proj, mixer.forget_gate.f_a_proj, mixer.forget_gate.f_b_proj]
    for part, given in [(part, heard_by(part, mixer, x)) for part in parts]:
        part.forward = lambda x, given=given: given[:, first : first + x.shape[1]]
    mixer.o_proj.forward = lambda x: made.append(x.clone()) or x
    for lengths in ([67], [1] * 67, [1, 2, 32, 31, 1], [33, 34]):
        cache, first = cache_of(), 0
        made.clear()
        for length in lengths:
            native(x[:, first : first + length], **{STATES: cache})
            first += length
        results.append([torch.cat(made, dim=1), *cache.layers[1].tensors()])
    assert all(all(map(torch.equal, results[0], other)) for other in results)


def heard_by(part: Any, mixer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a projection of a mixer gives for the tokens of a prompt."""
    heard: list[torch.Tensor] = []
    handle = part.register_forward_hook(lambda *given: heard.append(given[-1]))
    mixer(x.clone(), **{STATES: cache_of()})
    handle.remove()
    return heard[0]


@torch.inference_mode()
def test_a_token_does_not_depend_on_threads() -> None:
    native = native_channel_delta(found_in(mixer_of(torch.float32, 8, 64)))
    assert native is not None
    before, results = _native.num_threads(), []
    try:
        for threads in (1, 2, 3):
            _native.set_num_threads(threads)
            cache, generator = cache_of(), torch.Generator().manual_seed(2)
            rows = [torch.randn(1, size, HIDDEN, generator=generator) for size in (4, 1, 1)]
            results.append(torch.cat([native(row, **{STATES: cache}) for row in rows], dim=1))
    finally:
        _native.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_mixers_that_compute_anything_else_or_have_other_sizes_are_left_alone() -> None:
    class Colder(KimiLinearDeltaAttention):
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
            return super().forward(hidden_states, **named) * 1.02

    mixer = mixer_of(torch.float32)
    mixer.__class__ = Colder
    assert recognise_channel_deltas(mixer) == {}
    assert native_channel_delta(found_in(mixer_of(torch.float32, 2, 24))) is None, "not a multiple of 16"
    assert native_channel_delta(found_in(mixer_of(torch.float32, 2, 16, 9))) is None, "too many taps"
    odd = mixer_of(torch.float32)
    odd.conv1d.bias = torch.nn.Parameter(torch.zeros(3 * 3 * 16))
    assert recognise_channel_deltas(odd) == {}


@torch.inference_mode()
def test_hooks_masks_and_other_types_use_the_modules() -> None:
    mixer = mixer_of(torch.float32)
    native = native_channel_delta(found_in(mixer))
    assert native is not None
    cache = cache_of()
    native(torch.randn(1, 3, HIDDEN), **{STATES: cache})
    x = torch.randn(1, 1, HIDDEN)
    for part in (mixer.forget_gate, mixer.conv1d, mixer.o_norm):
        seen: list[Any] = []
        handle = part.register_forward_pre_hook(lambda *given, seen=seen: seen.append(given))
        native(x, **{STATES: cache})
        handle.remove()
        # transformers' code reads the weights of its convolution without calling it.
        assert len(seen) == (0 if part is mixer.conv1d else 1)
    hidden = native(x, **{STATES: cache}, attention_mask=torch.zeros(1, 1))
    assert hidden.shape == x.shape
    assert native(x, **{STATES: None}).shape == x.shape
