"""Decoder layers made of known parts only, recognised while the model is on the CPU.

A layer is recognised in three steps: its norms, rotary embedding and router each by their results, its code
by the names that it uses (:mod:`moechat.models.decode.wiring`), and the whole by its result for random
tokens. There stand-ins take the place of projections and experts, so that it does not matter how and where
these keep their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moechat.models.cache_argument import CACHE
from moechat.models.cache_layers import ReservedLayer
from moechat.models.decode.norms import Norm
from moechat.models.decode.probe import close, normal_numbers, probing
from moechat.models.decode.rotary import Rotate, rotated_width
from moechat.models.decode.routers import Rule
from moechat.models.decode.stand_ins import StandIn, chooses, random_projections
from moechat.models.decode.wiring import OWN_GATE, Wiring, recognise_wiring
from moechat.models.element_types import ELEMENTS

_PROBES = 3
_PROBE_KEYS = 5


@dataclass(frozen=True)
class PlainLayer:
    """A decoder layer: grouped-query attention and a feed-forward part, each behind a norm.

    If ``wiring.gated``, the projection to queries gives each head its query and then its gates, whose
    sigmoids multiply the results of attention. If there is a ``wiring.gate``, its softplus, or its sigmoid,
    multiplies them.

    Attributes:
        wiring: Its modules.
        before: What ``wiring.before`` computes.
        after: What ``wiring.after`` computes.
        head_norms: Norms of each query and each key before their rotation, or ``None``.
        rotate: The family's function.
        kinds: Of its angles; see :func:`moechat.models.decode.rotary.rotated_width`.
        heads: Of queries.
        kv_heads: Of keys and of values.
        dim: Elements of a head.
        scaling: Factor of the scores.
        index: Of the layer in the attention cache.
    """

    wiring: Wiring
    before: Norm
    after: Norm
    head_norms: tuple[Norm, Norm] | None
    rotate: Rotate
    kinds: Collection[str]
    heads: int
    kv_heads: int
    dim: int
    scaling: float
    index: int

    @property
    def sinks(self) -> torch.Tensor | None:
        """A further score of each head, ``[heads]``."""
        sinks: torch.Tensor | None = self.wiring.attention._parameters.get("sinks")
        return sinks


def find_plain_layer(
    layer: Any,
    norms: Mapping[nn.Module, Norm],
    routers: Collection[nn.Module],
    rotary: Mapping[nn.Module, Any],
) -> PlainLayer | None:
    """The parts of a layer; ``None`` if they are not known. It still has to be tried: :func:`agrees`.

    Args:
        layer: Any module.
        norms: Those of the model that are known.
        routers: Likewise.
        rotary: Attention modules with a known rotary embedding, and replacements of it as
            :func:`moechat.models.decode.rotary.native_rotary` returns them.
    """
    wiring = recognise_wiring(layer, lambda module: module in routers)
    if wiring is None or not wiring.plain_attention():
        return None
    attention = wiring.attention
    if "forward" in vars(attention) or "forward" in vars(wiring.mlp):
        return None
    before, after, rotate = norms.get(wiring.before), norms.get(wiring.after), rotary.get(attention)
    if before is None or after is None or rotate is None:
        return None
    dim, scaling, index = (getattr(attention, name, None) for name in ("head_dim", "scaling", "layer_idx"))
    if type(dim) is not int or type(scaling) is not float or type(index) is not int:
        return None
    projections: list[Any] = [getattr(attention, name, None) for name in wiring.projections]
    if not all(hasattr(one, "in_features") and hasattr(one, "out_features") for one in projections):
        return None
    query, key, value, output = projections
    heads, kv_heads = output.in_features // dim, key.out_features // dim
    queries = heads * dim * (2 if wiring.gated else 1)
    sizes = (query.out_features, key.out_features, value.out_features, output.in_features)
    if not kv_heads or heads % kv_heads or sizes != (queries, kv_heads * dim, kv_heads * dim, heads * dim):
        return None
    gate: Any = wiring.gate
    if gate is not None and getattr(gate, "out_features", 0) not in (heads, heads * dim):
        return None
    head_norms = None
    modules = [module for name in wiring.head_norms if (module := getattr(attention, name, None)) is not None]
    if modules:
        known = [norms[module] for module in modules if module in norms and module.weight.shape == (dim,)]
        if len(known) != len(wiring.head_norms):
            return None
        head_norms = known[0], known[1]
    return PlainLayer(
        wiring,
        before,
        after,
        head_norms,
        rotate.__dict__["own"],
        rotate.__dict__["kinds"],
        heads,
        kv_heads,
        dim,
        scaling,
        index,
    )


def agrees(layer: Any, plain: PlainLayer, rule: Rule | None, angles: int) -> bool:
    """Whether a layer has the results of its parts, but for rounding, for random tokens.

    Args:
        layer: The layer.
        plain: Its parts.
        rule: Of its router, if it has only a router and experts.
        angles: Number of rotary angles per token in the model.
    """
    weight = plain.wiring.before.weight
    assert isinstance(weight, torch.Tensor)
    dtype, hidden_size = weight.dtype, weight.shape[0]
    if dtype not in ELEMENTS or not rotated_width(plain.kinds, plain.dim, angles):
        return False

    with ExitStack() as stack:
        generator = stack.enter_context(probing())
        normal = normal_numbers(generator, dtype)
        stand_in = stack.enter_context(_stand_ins(plain, normal))
        cache: Any = DynamicCache()
        cache.layers = [ReservedLayer(_PROBE_KEYS + _PROBES) for _ in range(plain.index + 1)]
        kept: tuple[torch.Tensor, torch.Tensor] = (
            normal(1, plain.kv_heads, _PROBE_KEYS, plain.dim),
            normal(1, plain.kv_heads, _PROBE_KEYS, plain.dim),
        )
        cache.layers[plain.index].update(*kept)
        for _ in range(_PROBES):
            hidden, angle = normal(1, 1, hidden_size), torch.rand(angles, generator=generator) * 6
            turns = angle.cos()[None, None].to(dtype), angle.sin()[None, None].to(dtype)
            try:
                theirs = layer.forward(
                    hidden.clone(), attention_mask=None, position_embeddings=turns, **{CACHE: cache}
                )
                ours, kept, normed = _computed(plain, hidden, turns, kept, stand_in.answer)
            except Exception:  # the family's code needs more than the probe has
                return False
            slot = cache.layers[plain.index]
            if not isinstance(theirs, torch.Tensor) or not stand_in.seen:
                return False
            x, *choice = stand_in.seen
            pairs = [
                (theirs, ours),
                (slot.keys, kept[0]),
                (slot.values, kept[1]),
                (x.view_as(normed), normed),
            ]
            if not all(close(found, wanted) for found, wanted in pairs):
                return False
            if rule is not None and not chooses(plain.wiring.router, rule, x, choice):
                return False
    return True


def _computed(
    plain: PlainLayer,
    hidden: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor],
    answer: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The layer's result, its keys and values, and the inputs of its feed-forward part, from its parts."""
    wiring, attention = plain.wiring, plain.wiring.attention
    normed = plain.before.apply(hidden, weight_of(wiring.before))
    states = [getattr(attention, name)(normed) for name in wiring.projections[:3]]
    gates = None
    if wiring.gated:
        states[0], gates = states[0].view(1, 1, plain.heads, 2 * plain.dim).chunk(2, -1)
    states = [rows.reshape(1, 1, -1, plain.dim).transpose(1, 2) for rows in states]
    if plain.head_norms is not None:
        for place, (name, norm) in enumerate(zip(wiring.head_norms, plain.head_norms, strict=True)):
            states[place] = norm.apply(states[place], weight_of(getattr(attention, name)))
    states[:2] = plain.rotate(*states[:2], *turns)
    query, keys, values = states[0], *(torch.cat(pair, dim=2) for pair in zip(kept, states[1:], strict=True))
    group = plain.heads // plain.kv_heads
    scores = query.float() @ keys.float().repeat_interleave(group, 1).transpose(2, 3) * plain.scaling
    if plain.sinks is not None:
        scores = torch.cat([scores, plain.sinks.float().view(1, -1, 1, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    attended = (weights @ values.float().repeat_interleave(group, 1)).to(hidden.dtype)
    attended = attended.transpose(1, 2).reshape(1, 1, -1)
    if gates is not None:
        attended = attended * gates.reshape(1, 1, -1).sigmoid()
    if wiring.gate is not None:
        own = wiring.attention._modules[OWN_GATE](normed)
        active = nn.functional.softplus(own.float()).to(own.dtype) if wiring.softplus else own.sigmoid()
        attended = (attended.view(*active.shape, -1) * active.unsqueeze(-1)).view(1, 1, -1)
    hidden = hidden + attention._modules[wiring.projections[-1]](attended)
    return hidden + answer, (keys, values), plain.after.apply(hidden, weight_of(wiring.after))


def weight_of(norm: nn.Module) -> torch.Tensor:
    """The weight of a norm."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight


@contextmanager
def _stand_ins(plain: PlainLayer, normal: Callable[..., torch.Tensor]) -> Iterator[StandIn]:
    """Replace the projections of a layer, and its experts or its feed-forward part, in the block."""
    wiring = plain.wiring
    stand_in = StandIn(normal(1, 1, weight_of(wiring.before).shape[0]))
    part = wiring.mlp if wiring.experts is None else wiring.experts
    names = [*wiring.projections, *([] if wiring.gate is None else [OWN_GATE])]
    with random_projections(wiring.attention, names, normal), stand_in.in_place_of(part):
        yield stand_in
