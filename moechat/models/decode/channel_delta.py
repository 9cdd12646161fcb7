"""Linear attention by the delta rule with a decay for each channel, recognised by its results (Kimi Linear).

As :mod:`moechat.models.decode.gated_delta`, but each element of a key has a decay of its own (Kimi Linear,
arXiv:2510.26692, section 3), gates and decays are projected twice, and a sigmoid activates the gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.cache_argument import STATES
from moechat.models.decode.gated_delta import UNIT_EPS
from moechat.models.decode.layer_kind import agreeing_modules
from moechat.models.decode.mixer_forward import States, mixer_forward
from moechat.models.decode.probe import MANY, SIZES, close, hooks_of, normal_numbers, probing
from moechat.models.decode.stand_ins import random_projections
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer, begun_states, layer_in, token_states

_MIXED = ("q_proj", "k_proj", "v_proj")
_GATES, _BETA, _OUTPUT = ("g_a_proj", "g_b_proj"), "b_proj", "o_proj"
_DECAYS = ("f_a_proj", "f_b_proj")
_FORGET, _CONV, _NORM = "forget_gate", "conv1d", "o_norm"
_NUMBERS = ("num_heads", "head_dim", "conv_kernel_size", "layer_idx")


@dataclass(frozen=True)
class ChannelDelta:
    """A mixer of this kind.

    Attributes:
        mixer: The module.
        heads: Of queries, keys and values.
        dim: Elements of each.
        taps: Tokens of the convolution, the new one included.
        index: Of the layer in the attention cache.
        eps: Of the norm.
    """

    mixer: Any
    heads: int
    dim: int
    taps: int
    index: int
    eps: float

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.dim

    def states_of(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """States of the convolution ``[1, 3 * width, taps]`` and, in float32, of the heads ``[1, heads, dim,
        dim]``; ``None``: before the first token, or of another shape.
        """
        return token_states(layer_in(cache, self.index), *self._shapes)

    def begun_in(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`states_of`; before the first token the cache gets states of zeros."""
        dtype = self.mixer._modules[_CONV].weight.dtype
        return begun_states(layer_in(cache, self.index), *self._shapes, dtype)

    @property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1, 3 * self.width, self.taps), (1, self.heads, self.dim, self.dim)

    def rows(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Of tokens ``[1, tokens, hidden]``: queries, keys and values as one row ``[1, tokens, 3 * width]``;
        gates; betas; decays, without their biases.
        """
        parts, forget = self.mixer._modules, self.mixer._modules[_FORGET]._modules
        mixed = torch.cat([parts[name](hidden) for name in _MIXED], dim=-1)
        gates = parts[_GATES[1]](parts[_GATES[0]](hidden))
        decays = forget[_DECAYS[1]](forget[_DECAYS[0]](hidden))
        return [mixed, gates, parts[_BETA](hidden), decays]

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if the mixer is computed in another way."""
        return hooks_of(self.mixer._modules[name] for name in (_FORGET, _CONV, _NORM))


def recognise_channel_deltas(model: nn.Module) -> dict[nn.Module, ChannelDelta]:
    """The mixers of this kind in a model. One of each kind is tried.

    Args:
        model: Its weights are on the CPU, but for its projections.
    """
    return agreeing_modules(model, _described, _agrees)


def _described(module: Any) -> ChannelDelta | None:
    """The mixer that a module seems to be, by its names and sizes."""
    children = set(dict(module.named_children()))
    if children != {*_MIXED, *_GATES, _BETA, _OUTPUT, _FORGET, _CONV, _NORM} or "forward" in vars(module):
        return None
    forget, norm, conv = (module._modules[name] for name in (_FORGET, _NORM, _CONV))
    numbers = [number for name in _NUMBERS if type(number := getattr(module, name, None)) is int]
    eps = getattr(norm, "variance_epsilon", None)
    if len(numbers) < len(_NUMBERS) or not isinstance(eps, float) or type(conv) is not nn.Conv1d:
        return None
    if set(dict(forget.named_children())) != set(_DECAYS) or forget._parameters.keys() != {
        "dt_bias",
        "A_log",
    }:
        return None
    heads, dim, taps, index = numbers
    delta = ChannelDelta(module, heads, dim, taps, index, eps)
    width, dtype = delta.width, conv.weight.dtype
    weights = [conv.weight, norm.weight, *forget._parameters.values()]
    rows = dict.fromkeys((*_MIXED, _GATES[1]), width) | {_BETA: delta.heads}
    fits = (
        conv.bias is None
        and min(delta.heads, delta.dim, delta.taps) > 0
        and conv.weight.shape == (3 * width, 1, delta.taps)
        and norm.weight.shape == (delta.dim,)
        and norm.weight.dtype is dtype
        and forget.dt_bias.numel() == width
        and forget.A_log.numel() == delta.heads
        and all(weight.dtype in ELEMENTS for weight in weights)
        and all(weight.is_cpu and weight.is_contiguous() for weight in weights)
        and all(getattr(module._modules[name], "out_features", 0) == count for name, count in rows.items())
        and getattr(forget._modules[_DECAYS[1]], "out_features", 0) == width
        and getattr(module._modules[_OUTPUT], "in_features", 0) == width
    )
    return delta if fits else None


def reference(
    delta: ChannelDelta, rows: list[torch.Tensor], before: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """What the mixer gives to its last projection, ``[1, width]``, in torch; overwrites the states.

    Args:
        delta: The mixer.
        rows: Of :meth:`ChannelDelta.rows`, of a token, ``[columns]``.
        before: As of :meth:`ChannelDelta.states_of`.
        state: Likewise.
    """
    mixed, gates, betas, decays = rows
    mixer, forget = delta.mixer, delta.mixer._modules[_FORGET]
    each, dtype = (delta.heads, delta.dim), mixed.dtype
    before[0].copy_(torch.cat([before[0, :, 1:], mixed[:, None].to(before.dtype)], dim=1))
    taps = mixer._modules[_CONV].weight[:, 0].float()
    mixed = functional.silu((before[0].float() * taps).sum(1).to(dtype))
    q, k, v = (part.view(each).float() for part in mixed.chunk(3))
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + UNIT_EPS) for part in (q, k))
    q = q / delta.dim**0.5
    beta = betas.sigmoid().float()[:, None]
    rates = -forget.A_log.float().exp().view(-1, 1)
    kept = (rates * functional.softplus(decays.float() + forget.dt_bias.float()).view(each)).exp()
    state[0] *= kept[:, :, None]
    change = (v - (state[0] * k[:, :, None]).sum(1)) * beta
    state[0] += k[:, :, None] * change[:, None, :]
    out = (state[0] * q[:, :, None]).sum(1).to(dtype).float()
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + delta.eps)
    normed: torch.Tensor = mixer._modules[_NORM].weight.float() * out * gates.view(each).float().sigmoid()
    return normed.to(dtype).view(1, -1)


def _agrees(delta: ChannelDelta) -> bool:
    """Whether the mixer has the results of :func:`reference`, but for rounding, for random tokens, one by one
    and then several at once, behind these and without any before them.
    """
    mixer, dtype = delta.mixer, delta.mixer._modules[_CONV].weight.dtype
    hidden, heads = mixer._modules[_MIXED[0]].in_features, (1, delta.heads, delta.dim, delta.dim)
    channels = (1, 3 * delta.width, delta.taps)
    with probing() as generator:
        normal, layer = normal_numbers(generator, dtype), StateLayer()
        layer.update_conv_state(normal(*channels), conv_kernel_size=delta.taps)
        layer.update_recurrent_state(torch.randn(heads, generator=generator))
        ours = [each.clone() for each in layer.tensors()]
        first = [[torch.zeros(channels, dtype=dtype), torch.zeros(heads)] for _ in range(2)]
        outer, inner = (*_MIXED, *_GATES, _BETA, _OUTPUT), mixer._modules[_FORGET]
        with random_projections(mixer, outer, normal), random_projections(inner, _DECAYS, normal):
            return (
                all(_same(delta, layer, ours, normal(1, 1, hidden) * size) for size in SIZES)
                and _same(delta, layer, ours, normal(1, MANY, hidden))
                and _same(delta, StateLayer(), first[0], normal(1, MANY, hidden))
                and _same(delta, StateLayer(), first[1], normal(1, 1, hidden))
            )


def _same(delta: ChannelDelta, layer: StateLayer, ours: list[torch.Tensor], x: torch.Tensor) -> bool:
    """Whether both ways agree for tokens, from these states on."""
    cache: Any = DynamicCache()
    cache.layers = [*(StateLayer() for _ in range(delta.index)), layer]
    try:
        theirs = delta.mixer.forward(hidden_states=x.clone(), attention_mask=None, **{STATES: cache})
        rows = delta.rows(x)
        made = [reference(delta, [row[0, at] for row in rows], *ours) for at in range(x.shape[1])]
        pairs = [(theirs, delta.mixer._modules[_OUTPUT](torch.stack(made, dim=1)).view_as(theirs))]
        pairs += zip(layer.tensors(), ours, strict=True)
        alike = all(close(found, wanted) for found, wanted in pairs)
    except Exception:  # the family's code needs more than the probe has
        return False
    return alike and delta.states_of(cache) is not None


def native_channel_delta(delta: ChannelDelta) -> Callable[..., Any] | None:
    """A ``forward`` for ``delta.mixer``, native between its projections; ``None``: native code does not
    serve its sizes.
    """
    mixer, dim, width = delta.mixer, delta.dim, delta.width
    taps, norm = mixer._modules[_CONV].weight, mixer._modules[_NORM].weight
    forget, dtype = mixer._modules[_FORGET], taps.dtype
    log_rates, biases = (each.detach().float().contiguous() for each in (forget.A_log, forget.dt_bias))
    places = [(0, dim), (width, dim), (2 * width, dim), (0, dim), (0, 1), (0, dim)]
    try:
        run = _native.GatedDelta(
            ELEMENTS[dtype],
            delta.heads,
            1,
            dim,
            dim,
            delta.taps,
            places,
            delta.eps,
            taps.data_ptr(),
            log_rates.data_ptr(),
            biases.data_ptr(),
            norm.data_ptr(),
            by_channel=True,
        )
    except ValueError:
        return None
    output, rows_of = mixer._modules[_OUTPUT], delta.rows

    def compute(hidden: torch.Tensor, states: States, _: bool) -> torch.Tensor:
        tokens, rows = hidden.shape[1], [row.contiguous() for row in rows_of(hidden)]
        addresses, cols = [row.data_ptr() for row in rows], [row.shape[-1] for row in rows]
        out = torch.empty((1, tokens, width), dtype=dtype)
        run.many(tokens, addresses, cols, states[0].data_ptr(), states[1].data_ptr(), out.data_ptr())
        result: torch.Tensor = output(out)
        return result

    forward = mixer_forward(delta, mixer._modules[_MIXED[0]].in_features, dtype, compute)
    forward.__dict__["weights"] = (taps, norm, log_rates, biases)  # keeps the memory alive that ``run`` reads
    return forward
