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

from moechat.models.cache_memory import Place
from moechat.models.decode.angles import angle_counts
from moechat.models.decode.layer_check import layer_kind
from moechat.models.decode.norms import Norm
from moechat.models.decode.plain_layer import PlainLayer, agrees, find_plain_layer
from moechat.models.decode.probe import FEW_TOKENS
from moechat.models.decode.rotary import rotated_width
from moechat.models.decode.routers import Rule
from moechat.models.decode.wiring import HEAD_NORMS, PROJECTIONS, only_calls_layers, only_known_arguments
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.offload.gpu_layer import GpuExpertLayer
from moechat.offload.kernels import layer_steps, routing, steps
from moechat.offload.kernels.attention import AttentionShape, CacheAttention
from moechat.offload.replay_cache import ReplayCache, ReplayLayer

# Rows of a norm: those of the heads of a few tokens.
_MOST_ROWS = FEW_TOKENS * 1024


@dataclass(frozen=True)
class KnownRouter:
    """What a router computes.

    Attributes:
        rule: Without its correction.
        correction: Name of its parameter or buffer; ``None``: it has none.
        widened: Hidden states and weights are converted to float32 before the product.
    """

    rule: Rule
    correction: str | None
    widened: bool

    def correction_of(self, module: nn.Module) -> torch.Tensor | None:
        """The correction that ``module`` adds now."""
        return None if self.correction is None else getattr(module, self.correction)

    def serves(self, module: nn.Module, hidden: torch.Tensor) -> bool:
        """Whether the kernels compute what ``module`` does, for these hidden states."""
        weight, correction = module._parameters.get("weight"), self.correction_of(module)
        return (
            weight is not None
            and steps.served(hidden, weight)
            and hidden.is_contiguous()
            and hidden.shape[-1] == weight.shape[-1]
            and hidden.numel() <= FEW_TOKENS * weight.shape[-1]
            and (correction is None or (correction.device == hidden.device and correction.is_contiguous()))
        )


@dataclass(frozen=True)
class FusedLayer:
    """A layer that the kernels compute.

    Attributes:
        plain: Its parts.
        router: What ``plain.wiring.router`` computes, if it has one.
        follower: What reads its result next, by a kernel of ours that adds it up; ``None``: something else.
        angles: Number of rotary angles per token.
    """

    plain: PlainLayer
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
) -> dict[nn.Module, FusedLayer]:
    """The layers of ``model`` that the kernels can compute.

    Args:
        model: On the CPU, but for its projections.
        norms: Modules that are known.
        routers: Likewise.
        rotary: As of :func:`moechat.models.decode.plain_layer.find_plain_layer`.
    """
    base: Any = getattr(model, "model", None)
    counts = angle_counts(model)
    if len(counts) != 1 or not isinstance(getattr(base, "layers", None), nn.ModuleList):
        return {}
    (angles,) = counts
    found: dict[nn.Module, tuple[PlainLayer, KnownRouter | None]] = {}
    tried: dict[Any, bool] = {}
    for layer in base.layers:
        plain = find_plain_layer(layer, norms, routers, rotary)
        if plain is None:
            continue
        router = None if plain.wiring.router is None else routers[plain.wiring.router]
        kind = layer_kind(layer)
        if kind not in tried:
            tried[kind] = agrees(layer, plain, None if router is None else router.rule, angles)
        if tried[kind]:
            found[layer] = plain, router
    follows = (
        dict(zip(base.layers, [*base.layers[1:], base.norm], strict=True)) if only_calls_layers(base) else {}
    )
    fused = {}
    for layer, (plain, router) in found.items():
        follower = follows.get(layer)
        adds = follower in found or follower in norms
        fused[layer] = FusedLayer(plain, router, follower if adds else None, angles)
    return fused


def layer_forward(layer: Any, fused: FusedLayer, sums: Sums) -> Callable[..., Any]:
    """A ``forward`` for a layer: by the kernels, where they serve the inputs."""
    own, plain = layer.forward, fused.plain
    hooks = plain.wiring.hooks()

    def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        cache: Any = named.get("past_key_values")
        angles: Any = named.get("position_embeddings")
        place = cache.replayed.get(plain.index) if isinstance(cache, ReplayCache) else None
        if (
            rest
            or any(hooks)
            or place is None
            or named.get("attention_mask") is not None
            or not only_known_arguments(named)
            or not _serves(plain, place, hidden_states, angles)
        ):
            return own(sums.settled(hidden_states), *rest, **named)
        # What a hook of somebody else would read has to be there.
        later = fused.follower is not None and not (layer._forward_hooks or fused.follower._forward_pre_hooks)
        total = _computed(fused, place, hidden_states, angles, sums, _fed)
        return total if later else sums.settled(total)

    return forward


def _serves(plain: PlainLayer, place: ReplayLayer, hidden: torch.Tensor, angles: Any) -> bool:
    """Whether the kernels compute the layer for these hidden states and (cosines, sines)."""
    if type(angles) is not tuple or len(angles) != 2:
        return False
    cos, sin = angles
    wiring, dim, keys, values = plain.wiring, plain.dim, place.keys, place.values
    weights = [wiring.before._parameters.get("weight"), wiring.after._parameters.get("weight")]
    head_weights = _head_weights(plain)
    assert keys is not None
    assert values is not None
    return bool(
        hidden.shape[:-1] == (1, 1)
        and hidden.is_contiguous()
        and all(serves_norm(hidden, weight) for weight in weights)
        and all(steps.served(hidden, weight) and weight.is_contiguous() for weight in head_weights)
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
    return [getattr(plain.wiring.attention, name).weight for name in HEAD_NORMS]


def _computed(
    fused: FusedLayer,
    place: ReplayLayer,
    hidden: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    sums: Sums,
    feed: Callable[[FusedLayer, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The layer's result, whose sum is computed later; ``feed`` computes its feed-forward part."""
    plain = fused.plain
    wiring = plain.wiring
    before, after = (norm.weight for norm in (wiring.before, wiring.after))
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    normed = sums.normed(hidden, before, plain.before)
    attended = _attended(plain, place, normed, angles)
    (output,) = layer_steps.projected(attended, [wiring.attention.o_proj])
    residual = output.view_as(hidden)
    normed = steps.add_rms_norm(hidden, residual, after, plain.after, residual)
    return sums.later(residual, feed(fused, normed).view_as(residual))


def _attended(
    plain: PlainLayer,
    place: ReplayLayer,
    normed: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Attention of a token, before the output projection: ``[1, heads * dim]``."""
    attention, dim, (cos, sin) = plain.wiring.attention, plain.dim, angles
    assert place.keys is not None
    assert place.values is not None
    states = layer_steps.projected(normed.view(1, -1), [getattr(attention, name) for name in PROJECTIONS[:3]])
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
    return attended.view(1, -1)


def _fed(fused: FusedLayer, normed: torch.Tensor) -> torch.Tensor:
    wiring = fused.plain.wiring
    if fused.router is None:
        made = wiring.mlp(normed)
        answer: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return answer
    return _routed(fused.router, wiring.router, wiring.experts, normed.view(1, -1))


def _routed(known: KnownRouter, router: Any, experts: Any, x: torch.Tensor) -> torch.Tensor:
    """Sum of the experts that a router chooses for ``x`` ``[1, hidden]``."""
    runner: GpuExpertLayer = vars(experts)[EXPERTS_RUNNER]
    if not known.serves(router, x) or not layer_steps.serves_rows(
        router.weight, router._parameters.get("bias"), x
    ):
        made = router(x)
        _, weights, index = (made[known.rule.order[place]] for place in range(3))
        return runner.forward(x, index, weights)
    return runner.forward_routed(x, _logits(known, router, x), known.rule, known.correction_of(router))


def _logits(known: KnownRouter, router: Any, x: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if known.widened else x.dtype
    (logits,) = layer_steps.products(x, [router.weight], [router._parameters.get("bias")], dtype)
    return logits


def first_launches(layers: Iterable[FusedLayer], dtype: torch.dtype) -> list[Callable[[], None]]:
    """Launches of every kernel of some layers, of a kind of layer each, so that they are built.

    What they compute means nothing. Left out is what depends on how tokens are decoded: packed rows, and
    requests with scores or inputs.

    Args:
        layers: Of a model, on the GPU.
        dtype: Of the hidden states.
    """
    kinds = {}
    for layer in layers:
        plain = layer.plain
        sizes = plain.heads, plain.kv_heads, plain.dim, _window(plain)
        kinds[sizes, plain.before, plain.after, plain.head_norms, layer.router is None] = layer
    return [partial(_launch_first, layer, dtype) for layer in kinds.values()]


def _window(plain: PlainLayer) -> int:
    return getattr(plain.wiring.attention, "sliding_window", None) or 0


def _launch_first(fused: FusedLayer, dtype: torch.dtype) -> None:
    plain = fused.plain
    before = plain.wiring.before.weight
    assert isinstance(before, torch.Tensor)

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=before.device)

    def choose(fused: FusedLayer, normed: torch.Tensor) -> torch.Tensor:
        known, router, x = fused.router, plain.wiring.router, normed.view(1, -1)
        if known is not None and router is not None and known.serves(router, x):
            logits, correction = _logits(known, router, x), known.correction_of(router)
            routing.routed_request(x, logits, known.rule, correction, [], inputs=False)
        return torch.zeros_like(normed)

    rows = (1, plain.kv_heads, 16, plain.dim)
    numbers = torch.zeros(2, dtype=torch.int64, device=before.device)
    memory = Place(zeros(*rows), zeros(*rows), 0)
    place = ReplayLayer(memory, numbers, 0, window=_window(plain), packed=False)
    angles = zeros(1, 1, fused.angles), zeros(1, 1, fused.angles)
    hidden, sums = zeros(1, 1, len(before)), Sums()
    if not _serves(plain, place, hidden, angles):
        return
    # The first layer of a token has nothing to add.
    for x in (hidden, sums.later(hidden, zeros(*hidden.shape))):
        _computed(fused, place, x, angles, sums, choose)
