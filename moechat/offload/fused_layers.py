"""Decoder layers of recorded passes in about ten launches, where their modules would take about twenty.

Between the products over weights a layer has many small steps, and on a GPU each is a kernel that takes about
2 us however little it does. Here a layer that is made of known parts only
(:mod:`moechat.models.decode.plain_layer`) is computed by these launches::

    add, norm │ queries, keys, values │ norms and rotation of heads, cache │ attention (two)
    │ output projection │ add, norm │ router │ choice and request │ (experts)

Only while a pass is recorded; see :mod:`moechat.offload.fused_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moechat.models.cache_argument import CACHE
from moechat.models.cache_memory import Place
from moechat.models.decode.angles import angles_of_layers
from moechat.models.decode.delta_layer import DeltaLayer
from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.known_layers import recognise_known_layers
from moechat.models.decode.norms import Norm
from moechat.models.decode.plain_layer import PlainLayer, weight_of
from moechat.models.decode.probe import FEW_TOKENS
from moechat.models.decode.rotary import rotated_width
from moechat.models.decode.wiring import (
    Wiring,
    ends_of,
    only_calls_layers,
    only_known_arguments,
)
from moechat.models.skeleton import base_of
from moechat.offload.fused_delta import mixed, serves_mixer
from moechat.offload.kernels import layer_steps, steps
from moechat.offload.kernels.attention import AttentionShape, CacheAttention
from moechat.offload.known_router import KnownRouter
from moechat.offload.replay_cache import ReplayCache, ReplayLayer

# Rows of a norm: those of the heads of a few tokens.
_MOST_ROWS = FEW_TOKENS * 1024


@dataclass(frozen=True)
class FusedLayer:
    """A layer that the kernels compute.

    Attributes:
        known: Its parts.
        router: What ``plain.wiring.router`` computes, if it has one.
        follower: What reads its result next, by a kernel of ours that adds it up; ``None``: something else.
        angles: Number of rotary angles per token.
    """

    known: PlainLayer | DeltaLayer
    router: KnownRouter | None
    follower: nn.Module | None
    angles: int


class Sums:
    """Results of layers that are not added to their residuals yet: the kernel of the next norm does that.

    Invariant: memory that :meth:`later` returned holds nothing until :meth:`normed` or :meth:`settled` was
    called with it.
    """

    def __init__(self) -> None:
        self._due: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    def later(self, residual: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Memory for the sum of both."""
        total = torch.empty_like(residual)
        self._due[id(total)] = total, residual, added
        return total

    def settled(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, with the sum in it if that was to be computed later."""
        due = self._due.pop(id(x), None)
        if due is not None:
            torch.add(due[1], due[2], out=x)
        return x

    def normed(self, x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of ``x``, which holds its sum afterwards; REQUIRES: :func:`serves_norm`."""
        due = self._due.pop(id(x), None)
        if due is None:
            return steps.rms_norm(x, weight, norm)
        _, residual, added = due
        return steps.add_rms_norm(residual, added, weight, norm, x)


def serves_norm(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernels compute a norm with this weight of the rows ``x``."""
    return (
        weight is not None
        and steps.served(x, weight)
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape
        and x.shape[-1] <= steps.MOST_COLUMNS
        and x.numel() <= _MOST_ROWS * x.shape[-1]
        and steps.row_stride(x) is not None
    )


def recognise_layers(
    model: Any,
    norms: Mapping[nn.Module, Norm],
    routers: Mapping[nn.Module, KnownRouter],
    rotary: Mapping[nn.Module, Any],
    deltas: Mapping[nn.Module, GatedDelta],
) -> dict[nn.Module, FusedLayer]:
    """The layers of ``model`` that the kernels can compute.

    Args:
        model: On the CPU, but for its projections.
        norms: Modules that are known.
        routers: Likewise.
        rotary: As of :func:`moechat.models.decode.plain_layer.find_plain_layer`.
        deltas: Linear attention that is known.
    """
    rules = {module: router.rule for module, router in routers.items()}
    # The kernels have no gates with a projection of their own.
    found = {
        layer: known
        for layer, known in recognise_known_layers(model, norms, rules, rotary, deltas).items()
        if known.wiring.gate is None
    }
    if not found:
        return {}
    base, angles = base_of(model), angles_of_layers(model)
    follows = (
        dict(zip(base.layers, [*base.layers[1:], ends_of(base)[-1]], strict=True))
        if only_calls_layers(base)
        else {}
    )
    fused = {}
    for layer, known in found.items():
        router = None if known.wiring.router is None else routers[known.wiring.router]
        follower = follows.get(layer)
        adds = follower in found or follower in norms
        fused[layer] = FusedLayer(known, router, follower if adds else None, angles[layer])
    return fused


def layer_forward(layer: Any, fused: FusedLayer, sums: Sums) -> Callable[..., Any]:
    """A ``forward`` for a layer: by the kernels, where they serve the inputs."""
    own, wiring = layer.forward, fused.known.wiring
    hooks = wiring.hooks()

    def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        cache, mix = named.get(CACHE), None
        if (
            not rest
            and not any(hooks)
            and isinstance(cache, ReplayCache)
            and named.get("attention_mask") is None
            and only_known_arguments(named)
            and _serves_norms(wiring, hidden_states)
        ):
            mix = _mixer(fused.known, cache, hidden_states, named.get("position_embeddings"))
        if mix is None:
            return own(sums.settled(hidden_states), *rest, **named)
        # What a hook of somebody else would read has to be there.
        later = fused.follower is not None and not (layer._forward_hooks or fused.follower._forward_pre_hooks)
        total = _computed(fused, hidden_states, mix, sums, _fed)
        return total if later else sums.settled(total)

    return forward


# What mixes the tokens of a layer: from its normed input to what is added to the residual, ``[1, hidden]``.
_Mix = Callable[[torch.Tensor], torch.Tensor]


def _mixer(
    known: PlainLayer | DeltaLayer, cache: ReplayCache, hidden: torch.Tensor, angles: Any
) -> _Mix | None:
    """``None``: the kernels do not compute it for these hidden states and (cosines, sines)."""
    if isinstance(known, DeltaLayer):
        states = known.delta.states_of(cache)
        if states is None or not serves_mixer(known.delta, hidden, states):
            return None
        return partial(mixed, known.delta, states=states)
    place = cache.replayed.get(known.index)
    if place is None or not _serves(known, place, hidden, angles):
        return None
    return partial(_attended, known, place, angles)


def _serves_norms(wiring: Wiring, hidden: torch.Tensor) -> bool:
    """Whether the kernels compute both norms of a layer for these hidden states."""
    weights = [norm._parameters.get("weight") for norm in (wiring.before, wiring.after)]
    return (
        hidden.shape[:-1] == (1, 1)
        and hidden.is_contiguous()
        and all(serves_norm(hidden, weight) for weight in weights)
    )


def _serves(plain: PlainLayer, place: ReplayLayer, hidden: torch.Tensor, angles: Any) -> bool:
    """Whether the kernels compute attention for these hidden states and (cosines, sines)."""
    if type(angles) is not tuple or len(angles) != 2:
        return False
    cos, sin = angles
    dim, keys, values = plain.dim, place.keys, place.values
    head_weights = _head_weights(plain)
    assert keys is not None
    assert values is not None
    return bool(
        all(steps.served(hidden, weight) and weight.is_contiguous() for weight in head_weights)
        and cos.shape == sin.shape == (1, 1, cos.shape[-1])
        and steps.served(cos, hidden)
        and steps.served(sin, hidden)
        and cos.is_contiguous()
        and sin.is_contiguous()
        and rotated_width(plain.kinds, dim, cos.shape[-1])
        and keys.shape[1] == plain.kv_heads
        and keys.shape == values.shape
        and (place.packed or keys.dtype is hidden.dtype)
    )


def _head_weights(plain: PlainLayer) -> list[torch.Tensor]:
    if plain.head_norms is None:
        return []
    return [getattr(plain.wiring.attention, name).weight for name in plain.wiring.head_norms]


def _computed(
    fused: FusedLayer,
    hidden: torch.Tensor,
    mix: _Mix,
    sums: Sums,
    feed: Callable[[FusedLayer, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The layer's result, whose sum is computed later; ``feed`` computes its feed-forward part."""
    known = fused.known
    wiring = known.wiring
    before, after = weight_of(wiring.before), weight_of(wiring.after)
    normed = sums.normed(hidden, before, known.before)
    residual = mix(normed.view(1, -1)).view_as(hidden)
    normed = steps.add_rms_norm(hidden, residual, after, known.after, residual)
    return sums.later(residual, feed(fused, normed).view_as(residual))


def _attended(
    plain: PlainLayer,
    place: ReplayLayer,
    angles: tuple[torch.Tensor, torch.Tensor],
    normed: torch.Tensor,
) -> torch.Tensor:
    """Attention of a token, ``[1, hidden]``."""
    attention, dim, (cos, sin) = plain.wiring.attention, plain.dim, angles
    assert place.keys is not None
    assert place.values is not None
    states = layer_steps.projected(
        normed, [getattr(attention, name) for name in plain.wiring.projections[:3]]
    )
    norms = None
    if plain.head_norms is not None:
        (q_norm, k_norm), (q_weight, k_weight) = plain.head_norms, _head_weights(plain)
        norms = ((q_weight, q_norm), (k_weight, k_norm))
    query = layer_steps.place_heads(
        states,
        norms,
        cos,
        sin,
        rotated_width(plain.kinds, dim, cos.shape[-1]),
        dim,
        place.keys,
        place.values,
        place.numbers,
        place.ordinal,
        gated=plain.wiring.gated,
    )
    shape = AttentionShape(
        kv_heads=plain.kv_heads,
        group=plain.heads // plain.kv_heads,
        key_dim=dim,
        value_dim=dim,
        dtype=query.dtype,
        packed=place.packed,
        window=place.window,
    )
    attended = CacheAttention(shape).attend(
        query,
        place.keys,
        place.values,
        place.numbers,
        place.ordinal,
        scaling=plain.scaling,
        sinks=plain.sinks,
    )
    attended, output = attended.view(1, -1), attention._modules[plain.wiring.projections[-1]]
    if not plain.wiring.gated:
        (made,) = layer_steps.projected(attended, [output])
    elif layer_steps.serves_product(output, attended):
        (made,) = layer_steps.products(
            attended, [output.weight], [output.bias], attended.dtype, factors=states[0], head=dim
        )
    else:
        gates = states[0].view(plain.heads, 2 * dim)[:, dim:].reshape(1, -1)
        made = output(attended * gates.sigmoid()).contiguous()
    return made


def _fed(fused: FusedLayer, normed: torch.Tensor) -> torch.Tensor:
    wiring = fused.known.wiring
    if fused.router is None:
        made = wiring.mlp(normed)
        answer: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return answer
    assert wiring.router is not None
    assert wiring.experts is not None
    return fused.router.routed(wiring.router, wiring.experts, normed.view(1, -1))


def first_launches(layers: Iterable[FusedLayer], dtype: torch.dtype) -> list[Callable[[], None]]:
    """Launches of every kernel of some layers, of a kind of layer each, so that they are built.

    What they compute means nothing. Left out is what depends on how tokens are decoded: packed rows, and
    requests with scores or inputs.

    Args:
        layers: Of a model, on the GPU.
        dtype: Of the hidden states.
    """
    kinds: dict[Any, FusedLayer] = {}
    for layer in layers:
        known = layer.known
        sizes: Any
        if isinstance(known, DeltaLayer):
            sizes = known.delta.kind()
        else:
            sizes = (
                known.heads,
                known.kv_heads,
                known.dim,
                _window(known),
                known.head_norms,
                known.wiring.gated,
            )
        kinds[sizes, layer.angles, known.before, known.after, layer.router is None] = layer
    return [partial(_launch_first, layer, dtype) for layer in kinds.values()]


def _window(plain: PlainLayer) -> int:
    return getattr(plain.wiring.attention, "sliding_window", None) or 0


def _launch_first(fused: FusedLayer, dtype: torch.dtype) -> None:
    known = fused.known
    before = weight_of(known.wiring.before)

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=before.device)

    def choose(fused: FusedLayer, normed: torch.Tensor) -> torch.Tensor:
        router, x = fused.router, normed.view(1, -1)
        if router is not None and known.wiring.router is not None:
            router.launch_first(known.wiring.router, x)
        return torch.zeros_like(normed)

    hidden, sums = zeros(1, 1, len(before)), Sums()
    if not _serves_norms(known.wiring, hidden):
        return
    mix: _Mix
    if isinstance(known, DeltaLayer):
        states = known.delta.first_states(zeros(1))
        if not serves_mixer(known.delta, hidden, states):
            return
        mix = partial(mixed, known.delta, states=states)
    else:
        rows = (1, known.kv_heads, 16, known.dim)
        numbers = torch.zeros(2, dtype=torch.int64, device=before.device)
        memory = Place(zeros(*rows), zeros(*rows), 0)
        place = ReplayLayer(memory, numbers, 0, window=_window(known), packed=False)
        angles = zeros(1, 1, fused.angles), zeros(1, 1, fused.angles)
        if not _serves(known, place, hidden, angles):
            return
        mix = partial(_attended, known, place, angles)
    # The first layer of a token has nothing to add.
    for x in (hidden, sums.later(hidden, zeros(*hidden.shape))):
        _computed(fused, x, mix, sums, choose)
