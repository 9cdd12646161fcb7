"""Decoder layers that multiply the results of both parts before they are added (Granite).

``a = x + scale mixer(before(x))``, then ``a + scale (experts(after(a)) + shared(after(a)))``. The mixer is
attention or Mamba-2, and there may be no shared expert.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from moechat import _native
from moechat.models.decode.layers import step_with_attention
from moechat.models.decode.native_step import Feed, NativeStep, is_native_router, native_part
from moechat.models.decode.rotary import rotation_width
from moechat.models.decode.state_steps import StateMixer, step_of
from moechat.models.decode.wiring import (
    ATTENTION,
    ATTENTION_NAMES,
    MAMBA,
    Wiring,
    router_and_experts,
    uses_only,
)

_SCALE, _SHARED = "residual_multiplier", "shared_mlp"
# Parts of a layer beside its mixer, and the names that its code uses.
_PARTS = ("input_layernorm", "post_attention_layernorm", "block_sparse_moe")
_NAMES = frozenset({*_PARTS, _SHARED, _SCALE, "has_experts", ATTENTION, MAMBA})


def scaled_step(layer: Any, angles: int, mixers: Mapping[nn.Module, StateMixer]) -> NativeStep | None:
    """The native step of such a layer; ``None`` if it is not one, or its parts are not native.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
        angles: Rotary angles of a token in the model; 0: it has none.
        mixers: Those with states of the model.
    """
    wiring, scale = _recognise(layer, mixers), getattr(layer, _SCALE, None)
    if wiring is None or type(scale) is not float:
        return None
    feed = _feed(wiring, layer._modules.get(_SHARED), scale)
    if feed is None:
        return None
    if (mixer := mixers.get(wiring.attention)) is not None:
        return step_of(wiring, mixer, feed, scale=scale)
    width = 0
    if angles:
        attention = wiring.attention
        width = rotation_width(vars(attention).get("forward"), getattr(attention, "head_dim", 0), angles)
        if not width:
            return None
    return step_with_attention(wiring, feed, angles, width, scale=scale)


def _recognise(layer: Any, mixers: Container[nn.Module]) -> Wiring | None:
    """The parts of a layer; ``None`` if it is another one, or its code does anything else with them.

    Args:
        layer: Any module.
        mixers: Known ones with states, whose own code is not looked at.
    """
    parts = dict(layer.named_children())
    mixer = next((parts.pop(name) for name in (ATTENTION, MAMBA) if name in parts), None)
    if mixer is None or parts.keys() - {_SHARED} != set(_PARTS) or "forward" in vars(layer):
        return None
    if layer.training or not uses_only(layer, _NAMES):
        return None
    before, after, block = (parts[name] for name in _PARTS)
    router, experts = router_and_experts(block, is_native_router)
    if router is None:
        return None
    wiring = Wiring(before, mixer, after, block, router, experts, gated=False)
    if mixer in mixers or (uses_only(mixer, ATTENTION_NAMES) and wiring.plain_attention()):
        return wiring
    return None


def _feed(wiring: Wiring, shared: nn.Module | None, scale: float) -> Feed | None:
    after, own = native_part(wiring.after), native_part(shared)
    if not isinstance(after, _native.RmsNorm) or (shared is not None and not isinstance(own, _native.Mlp)):
        return None
    assert wiring.router is not None
    try:
        run = _native.FeedStep(after, native_part(wiring.router), own, None, scale=scale)
    except ValueError:  # the shapes of the parts do not match
        return None
    bypassed = (*wiring.mlp.modules(), *([] if shared is None else shared.modules()))
    chosen: int = vars(wiring.router)["forward"].chosen
    return Feed(
        run, wiring.mlp, wiring.experts, chosen, shared=shared is not None, exact=True, bypassed=bypassed
    )
