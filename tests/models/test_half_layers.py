"""Layers that are a mixer or a feed-forward part alone (Nemotron-H), natively for one token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from layer_steps_support import PROMPT, TOKENS, assert_steps_equal_their_parts, decode, layers_of
from tiny import write_tiny_checkpoint
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

import moechat
from moechat import _native
from moechat.models.decode.half_layers import half_step
from moechat.models.decode.layer_check import agrees
from moechat.models.decode.native_step import NativeStep, native_part

Engine = Any
# The layers of the tiny model: Mamba-2, routed and shared experts, attention without rotation, feed-forward.
STEPS = [_native.MambaStep, _native.FeedLayer, _native.LayerStep, _native.FeedLayer]


def checkpoint(directory: Path) -> Path:
    config = tiny_family("nemotron_h")
    config.dtype = torch.bfloat16
    write_tiny_checkpoint(directory / "model", config)
    return directory / "model"


@pytest.fixture
def engine(tmp_path: Path, moechat_home: Path) -> Iterator[Engine]:
    with moechat.load(checkpoint(tmp_path), bits=16, dtype="float32") as loaded:
        yield loaded


def steps_of(engine: Engine) -> list[NativeStep]:
    return [vars(layer)["forward"].kept for layer in layers_of(engine)]


@pytest.mark.parametrize("dense_bits", [16, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_native_steps_equal_their_parts_bitwise(
    dtype: str, dense_bits: int, tmp_path: Path, moechat_home: Path
) -> None:
    with moechat.load(checkpoint(tmp_path), bits=16, dtype=dtype, dense_bits=dense_bits) as engine:
        assert_steps_equal_their_parts(engine, STEPS)


def test_a_hook_on_a_part_is_called(engine: Engine) -> None:
    calls: list[Any] = []
    for layer in layers_of(engine):
        layer.norm.register_forward_hook(lambda *given: calls.append(given))
    decode(engine)
    assert len(calls) == len(STEPS) * (1 + len(TOKENS[PROMPT:]))


def test_layers_that_compute_anything_else_are_left_alone(engine: Engine) -> None:
    class Louder(NemotronHBlock):
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
            return super().forward(hidden_states, **named) * 1.01

    class Twice(NemotronHBlock):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            normed = self.norm(hidden_states)
            return hidden_states + self.mixer(normed) + self.mixer(normed)

    found = dict(zip(layers_of(engine), steps_of(engine), strict=True))
    # What the mixers with states are, as the installed steps have it.
    for layer, step in found.items():
        del vars(layer)["forward"]
        mixers = {layer.mixer: object()} if isinstance(step.run, _native.MambaStep) else {}
        layer.__class__ = Louder
        assert half_step(layer, mixers, {}) is None, "its code has other names"
        layer.__class__ = NemotronHBlock
        layer.more = torch.nn.Identity()
        assert half_step(layer, mixers, {}) is None, "it has more parts"
        del layer.more
        assert agrees(layer, step.forward(layer))
    layer = layers_of(engine)[-1]
    layer.__class__ = Twice
    again = half_step(layer, {}, {})
    assert again is not None, "its code has only known names"
    assert not agrees(layer, again.forward(layer))


def test_calls_that_do_not_fit_a_step_are_refused(engine: Engine) -> None:
    mamba, experts, attention, feed = (step.run for step in steps_of(engine))
    norm = native_part(layers_of(engine)[0].norm)
    ends = _native.FeedStep(norm, None, None, None, ends=True)
    with pytest.raises(ValueError, match="a layer without parts"):
        _native.FeedLayer(ends)
    with pytest.raises(ValueError, match="parts behind the end of a layer"):
        _native.FeedStep(norm, native_part(layers_of(engine)[1].mixer.gate), None, None, ends=True)
    with pytest.raises(ValueError, match="this step has no router"):
        mamba.route(0, [], 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="this step ends with its mixer"):
        attention.normalise(0, 0, 0, [], 0, 0)
    with pytest.raises(ValueError, match="this step has a router"):
        experts.normalise(0, [()], 0, 0)
    with pytest.raises(ValueError, match="this step has no router"):
        feed.route(0, [()], 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="tokens"):
        feed.normalise(0, [], 0, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_feed_forward_part_without_a_gate_has_the_bits_of_its_modules(
    dtype: str, tmp_path: Path, moechat_home: Path
) -> None:
    with moechat.load(checkpoint(tmp_path), bits=16, dtype=dtype, dense_bits=16) as engine:
        part = layers_of(engine)[-1].mixer
        own = type(part).forward
        x = torch.randn(3, part.up_proj.in_features, generator=torch.Generator().manual_seed(1))
        x[0, 0], x[1, 1] = float("nan"), 40.0
        x = x.to(getattr(torch, dtype))
        found, wanted = part(x), own(part, x)
        assert isinstance(native_part(part), _native.Mlp)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
