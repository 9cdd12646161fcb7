"""Linear attention by the gated delta rule, recognised, and its reference against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_support import drawn_states, mixer_of
from families import tiny_family
from isa_runner import isa_fixture
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.cache_argument import STATES
from moechat.models.decode.gated_delta import Rows, agrees, recognise_gated_deltas, reference
from moechat.models.decode.native_delta import native_delta
from moechat.models.decode.probe import close
from moechat.models.state_layer import StateLayer

SIZES = (2, 4, 16, 24, 4)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["together", "apart"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [SIZES, (3, 3, 8, 8, 3), (1, 6, 12, 20, 4)])
@torch.inference_mode()
def test_the_reference_computes_what_transformers_does(sizes, layout, dtype) -> None:
    delta = mixer_of(layout, *sizes, dtype=dtype)
    cache = DynamicCache()
    cache.layers = [StateLayer(), StateLayer()]
    before, state = drawn_states(delta, dtype)
    assert delta.states_of(cache) is None
    cache.layers[1].update_conv_state(before.clone(), conv_kernel_size=delta.taps)
    cache.layers[1].update_recurrent_state(state.clone())
    for token in range(4):
        hidden = torch.randn((1, 1, 32), generator=torch.Generator().manual_seed(token)).to(dtype)
        wanted = delta.mixer(hidden, **{STATES: cache})
        rows = [module(hidden).view(1, -1) for module in delta.projections]
        assert close(delta.output(reference(delta, rows, before, state)).view_as(wanted), wanted)
        kept_before, kept_state = delta.states_of(cache)
        assert torch.equal(before, kept_before)
        assert close(state, kept_state)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_all_mixers_of_a_family_are_recognised(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_family(family)).eval()
    found = recognise_gated_deltas(model)
    assert list(found) == [layer.linear_attn for layer in model.model.layers[:3]]
    assert [delta.index for delta in found.values()] == [0, 1, 2]
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "nemotron_h", "lfm2_moe", "qwen3_moe"])
def test_other_mixers_are_not(family: str) -> None:
    assert recognise_gated_deltas(AutoModelForCausalLM.from_config(tiny_family(family)).eval()) == {}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_reference_does_otherwise_is_noticed(layout, dtype) -> None:
    delta = mixer_of(layout, *SIZES, dtype=dtype)
    assert agrees(delta)
    other = Rows(delta.v.source, delta.v.start, delta.v.stride - delta.v_dim)
    for wrong in (
        replace(delta, q=delta.k),
        replace(delta, v=other),
        replace(delta, beta=delta.decay),
        replace(delta, gate=replace(delta.gate, start=delta.gate.start + 1)),
        replace(delta, eps=0.5),
        replace(delta, index=delta.index + 1),
    ):
        assert not agrees(wrong)


def test_mixers_that_do_more_are_not_recognised() -> None:
    mixer = mixer_of("apart", *SIZES).mixer
    assert recognise_gated_deltas(mixer)
    kind = type(mixer)

    class Clips(kind):
        def forward(self, hidden_states, **named):
            return super().forward(hidden_states.clamp(-5, 5), **named)

    mixer.__class__ = Clips
    assert recognise_gated_deltas(mixer) == {}
    mixer.__class__ = kind
    mixer.more = nn.Identity()
    assert recognise_gated_deltas(mixer) == {}
    del mixer.more
    mixer.scale = nn.Parameter(torch.ones(1))
    assert recognise_gated_deltas(mixer) == {}
    del mixer.scale
    mixer.forward = mixer.forward
    assert recognise_gated_deltas(mixer) == {}
    del mixer.forward
    assert recognise_gated_deltas(mixer)


def test_states_of_another_form_are_not_used() -> None:
    delta = mixer_of("apart", *SIZES)
    before, state = drawn_states(delta, torch.float32)
    cache = DynamicCache()
    layer = StateLayer()
    cache.layers = [StateLayer(), layer]
    layer.update_conv_state(before, conv_kernel_size=delta.taps)
    layer.update_recurrent_state(state)
    assert delta.states_of(cache) is not None
    layer.recurrent_states[0] = state.bfloat16()
    assert delta.states_of(cache) is None
    layer.recurrent_states[0] = state[:, 1:]
    assert delta.states_of(cache) is None
    layer.recurrent_states[0] = state
    layer.activate_past_recording()
    assert delta.states_of(cache) is None
    cache.layers = [layer]
    assert delta.states_of(cache) is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(2, 4, 16, 32, 4), (3, 3, 8, 16, 3), (1, 5, 20, 144, 2), (16, 32, 128, 128, 4)]
)
@torch.inference_mode()
def test_a_native_token_has_the_results_of_the_reference(sizes, layout, dtype) -> None:
    delta = mixer_of(layout, *sizes, dtype=dtype)
    forward = native_delta(delta)
    cache = DynamicCache()
    cache.layers = [StateLayer(), StateLayer()]
    before, state = drawn_states(delta, dtype)
    cache.layers[1].update_conv_state(before.clone(), conv_kernel_size=delta.taps)
    cache.layers[1].update_recurrent_state(state.clone())
    for token in range(4):
        hidden = torch.randn((1, 1, 32), generator=torch.Generator().manual_seed(token)).to(dtype)
        rows = [module(hidden).view(1, -1) for module in delta.projections]
        wanted = delta.output(reference(delta, rows, before, state)).view_as(hidden)
        assert close(forward(hidden, **{STATES: cache}, attention_mask=None), wanted)
        kept_before, kept_state = delta.states_of(cache)
        assert torch.equal(before, kept_before)
        assert close(state, kept_state)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(2, 4, 16, 32, 4), (3, 3, 8, 16, 3), (1, 5, 20, 144, 2)])
@torch.inference_mode()
def test_a_prompt_has_the_states_and_results_of_its_tokens_one_by_one(sizes, layout, dtype) -> None:
    delta = mixer_of(layout, *sizes, dtype=dtype)
    forward, results = native_delta(delta), []
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn((1, 67, 32), generator=generator).to(dtype)
    # torch's projections of several tokens round in another way.
    rows = [module(hidden) for module in delta.projections]
    for module, given in zip(delta.projections, rows, strict=True):
        module.forward = lambda x, given=given: given[:, first : first + x.shape[1]]
    made = []
    delta.output.forward = lambda x: made.append(x.clone()) or x
    for parts in ([67], [1] * 67, [1, 2, 32, 31, 1], [33, 34]):
        cache, first = DynamicCache(), 0
        cache.layers = [StateLayer(), StateLayer()]
        made.clear()
        for part in parts:
            forward(hidden[:, first : first + part], **{STATES: cache})
            first += part
        results.append([torch.cat(made, dim=1), *delta.states_of(cache)])
    assert all(all(map(torch.equal, results[0], other)) for other in results)
    before, state = delta.first_states(hidden)
    wanted = [reference(delta, [row[:, at] for row in rows], before, state) for at in range(67)]
    assert close(results[0][0], torch.stack(wanted, dim=1))
    assert torch.equal(before, results[0][1])
    assert close(state, results[0][2])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_a_prompt_is_that_of_the_family_s_code_before_and_behind_others(layout, dtype) -> None:
    delta = mixer_of(layout, 2, 4, 16, 32, 4, dtype=dtype)
    forward, caches = native_delta(delta), [DynamicCache(), DynamicCache()]
    rough = torch.float32 if dtype is torch.float32 else torch.bfloat16  # errors add up in the states
    for cache in caches:
        cache.layers = [StateLayer(), StateLayer()]
    for tokens in (1, 2, 130, 1, 3):
        hidden = torch.randn((1, tokens, 32), generator=torch.Generator().manual_seed(tokens)).to(dtype)
        wanted = delta.mixer(hidden.clone(), **{STATES: caches[0]})
        assert close(forward(hidden, **{STATES: caches[1]}).to(rough), wanted.to(rough))
        for theirs, ours in zip(*(delta.states_of(cache) for cache in caches), strict=True):
            assert close(ours.to(rough), theirs.to(rough))


def test_native_results_do_not_depend_on_the_number_of_threads() -> None:
    delta = mixer_of("apart", 16, 32, 64, 64, 4)
    forward, results = native_delta(delta), []
    prompt = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    for threads in (1, 2, 3):
        before = _native.num_threads()
        _native.set_num_threads(threads)
        try:
            cache = DynamicCache()
            cache.layers = [StateLayer(), StateLayer()]
            states = drawn_states(delta, torch.float32)
            cache.layers[1].update_conv_state(states[0], conv_kernel_size=delta.taps)
            cache.layers[1].update_recurrent_state(states[1])
            with torch.inference_mode():
                made = [forward(x, **{STATES: cache}).flatten() for x in (torch.ones(1, 1, 32), prompt)]
            results.append(torch.cat([*made, *(each.flatten() for each in delta.states_of(cache))]))
        finally:
            _native.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


run_under = isa_fixture(__file__, "a_native_token or a_prompt or number_of_threads")


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_computes_the_same(isa, run_under) -> None:
    run_under(isa)


def test_sizes_that_native_code_does_not_serve_stay_with_torch() -> None:
    assert native_delta(mixer_of("apart", 2, 4, 16, 24, 4)) is None
    assert native_delta(mixer_of("apart", 2, 4, 16, 16, 9)) is None


@pytest.mark.parametrize("name", ["no cache", "hook", "mask", "gradients", "several"])
@torch.inference_mode()
def test_other_calls_are_left_to_torch(name: str) -> None:
    delta = mixer_of("apart", 2, 4, 16, 16, 4)
    mixer, forward = delta.mixer, native_delta(delta)
    cache = DynamicCache()
    cache.layers = [StateLayer(), StateLayer()]
    hidden = torch.randn(2 if name == "several" else 1, 5, 32)
    calls = []
    mixer.forward = lambda *_, **__: calls.append(name) or hidden
    forward = native_delta(delta)
    before, state = drawn_states(delta, torch.float32)
    cache.layers[1].update_conv_state(before, conv_kernel_size=delta.taps)
    cache.layers[1].update_recurrent_state(state)
    more = {"attention_mask": torch.ones(1, 1)} if name == "mask" else {}
    if name == "hook":
        mixer.norm.register_forward_hook(lambda *_: None)
    with torch.inference_mode(False):
        given = hidden.clone().requires_grad_(name == "gradients")
    forward(given, **{STATES: None if name == "no cache" else cache}, **more)
    assert calls == [name]
