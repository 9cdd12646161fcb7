"""Linear attention by the gated delta rule, recognised by its results (Qwen3-Next, Qwen3.5 and 3.6).

For each head of values with a state ``S`` ``[k_dim, v_dim]``, a token computes (Yang et al.,
arXiv:2412.06464, section 3.1)::

    S = exp(decay) S;  S = S + k (beta (v - S' k))';  out = S' q

after a short convolution of queries, keys and values over the last tokens, with normed queries and keys, and
before a norm that a gate multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.cache_argument import STATES
from moechat.models.decode.layer_kind import agreeing_modules
from moechat.models.decode.probe import MANY, SIZES, close, hooks_of, normal_numbers, probing
from moechat.models.decode.stand_ins import random_projections
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer, begun_states, layer_in, token_states

# Added to the sum of squares of a query or a key.
UNIT_EPS = _native.DELTA_UNIT_EPS
_INPUTS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
_OUTPUT = "out_proj"
_NUMBERS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "layer_idx")


@dataclass(frozen=True)
class Rows:
    """Where something of every head lies in the output of a projection.

    Attributes:
        source: The projection.
        start: Of the first head.
        stride: From the elements of one head of keys to those of the next.
    """

    source: int
    start: int
    stride: int


@dataclass(frozen=True)
class GatedDelta:
    """A mixer of this kind.

    Attributes:
        mixer: The module.
        inputs: Names of its projections.
        q: Queries, before the convolution.
        k: Keys, likewise.
        v: Values, likewise.
        gate: Factors of the normed output, before their activation.
        beta: A number for each head of values, before its activation.
        decay: Likewise.
        k_heads: Heads of queries and of keys.
        v_heads: Heads of values: :attr:`group` for each head of keys, one behind the other.
        k_dim: Elements of a query or a key.
        v_dim: Elements of a value.
        taps: Tokens of the convolution, the new one included.
        eps: Of the norm.
        index: Of the layer in the attention cache.
    """

    mixer: Any
    inputs: tuple[str, ...]
    q: Rows
    k: Rows
    v: Rows
    gate: Rows
    beta: Rows
    decay: Rows
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int
    eps: float
    index: int

    @property
    def group(self) -> int:
        """Heads of values for each head of keys."""
        return self.v_heads // self.k_heads

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, then all keys, then all values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def projections(self) -> list[Any]:
        """Modules of :attr:`inputs`."""
        return [self.mixer._modules[name] for name in self.inputs]

    @property
    def output(self) -> Any:
        """The last projection."""
        return self.mixer._modules[_OUTPUT]

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if the mixer is computed in another way."""
        return hooks_of(module for module in self.mixer.modules() if module is not self.mixer)

    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Taps ``[channels, taps]``, rates and biases of the decays ``[v_heads]``, norm ``[v_dim]``."""
        mixer = self.mixer
        taps = mixer.conv1d.weight.view(self.channels, self.taps)
        return taps, mixer.A_log, mixer.dt_bias, mixer.norm.weight

    def kind(self) -> GatedDelta:
        """What mixers with the same sizes and code have in common."""
        return replace(self, mixer=type(self.mixer), index=0)

    def first_states(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States of zeros, as :meth:`states_of` returns them, with the type and device of ``like``."""
        before = like.new_zeros((1, self.channels, self.taps))
        heads = (1, self.v_heads, self.k_dim, self.v_dim)
        return before, torch.zeros(heads, dtype=torch.float32, device=like.device)

    def states_of(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """States of the convolution ``[1, channels, taps]`` and of the heads ``[1, v_heads, k_dim, v_dim]``,
        float32; ``None``: before the first token, or of another shape.
        """
        return self.states_in(layer_in(cache, self.index))

    def begun_in(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`states_of`; before the first token the cache gets states of zeros."""
        return begun_states(layer_in(cache, self.index), *self._shapes, self.parameters()[0].dtype)

    def states_in(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`states_of`, of the layer of a cache."""
        return token_states(layer, *self._shapes)

    @property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1, self.channels, self.taps), (1, self.v_heads, self.k_dim, self.v_dim)


def recognise_gated_deltas(model: nn.Module) -> dict[nn.Module, GatedDelta]:
    """The mixers of this kind in a model. One of each kind is tried.

    Args:
        model: Its weights are on the CPU, but for its projections.
    """
    return agreeing_modules(model, _described, agrees)


def _described(module: Any) -> GatedDelta | None:
    """The mixer that a module seems to be, by its names and sizes."""
    children = dict(module.named_children())
    inputs = next((names for names in _INPUTS if names[0] in children), None)
    if inputs is None or set(children) != {*inputs, _OUTPUT, "conv1d", "norm"} or "forward" in vars(module):
        return None
    if {name for name, held in module._parameters.items() if held is not None} != {"A_log", "dt_bias"}:
        return None
    numbers = [number for name in _NUMBERS if type(number := getattr(module, name, None)) is int]
    eps = getattr(module.norm, "variance_epsilon", None)
    if len(numbers) < len(_NUMBERS) or not isinstance(eps, float):
        return None
    delta = _laid_out(module, inputs, numbers, eps)
    return delta if delta is not None and _fits(delta) else None


def _laid_out(module: Any, inputs: tuple[str, ...], numbers: list[int], eps: float) -> GatedDelta | None:
    k_heads, v_heads, k_dim, v_dim, taps, index = numbers
    if min(k_heads, v_heads, k_dim, v_dim, taps) < 1 or v_heads % k_heads:
        return None
    group, keys = v_heads // k_heads, k_heads * k_dim
    values = group * v_dim
    if len(inputs) == 2:
        # All of a head of keys together: its query, its key, the values and the gates of its group.
        stride = 2 * k_dim + 2 * values
        places = [
            Rows(0, 0, stride),
            Rows(0, k_dim, stride),
            Rows(0, 2 * k_dim, stride),
            Rows(0, 2 * k_dim + values, stride),
            Rows(1, 0, 2 * group),
            Rows(1, group, 2 * group),
        ]
    else:
        places = [
            Rows(0, 0, k_dim),
            Rows(0, keys, k_dim),
            Rows(0, 2 * keys, values),
            Rows(1, 0, values),
            Rows(2, 0, group),
            Rows(3, 0, group),
        ]
    q, k, v, gate, beta, decay = places
    return GatedDelta(
        module, inputs, q, k, v, gate, beta, decay, k_heads, v_heads, k_dim, v_dim, taps, eps, index
    )


def _fits(delta: GatedDelta) -> bool:
    """Whether all weights have the sizes and types that the layout needs."""
    mixer, conv = delta.mixer, delta.mixer.conv1d
    others = [mixer.A_log, mixer.dt_bias, conv.weight, mixer.norm.weight]
    values = delta.v_heads * delta.v_dim
    if not isinstance(conv, nn.Conv1d) or conv.bias is not None or "forward" in vars(mixer.norm):
        return False
    if not all(weight.dtype in ELEMENTS and weight.dtype is conv.weight.dtype for weight in others):
        return False
    if not all(hasattr(module, "out_features") for module in [*delta.projections, delta.output]):
        return False
    rows = [2 * delta.k_heads * delta.k_dim + values, values, delta.v_heads, delta.v_heads]
    if len(delta.inputs) == 2:
        rows = [rows[0] + rows[1], rows[2] + rows[3]]
    return (
        [module.out_features for module in delta.projections] == rows
        and delta.output.in_features == values
        and conv.weight.shape == (delta.channels, 1, delta.taps)
        and mixer.norm.weight.shape == (delta.v_dim,)
        and mixer.A_log.shape == mixer.dt_bias.shape == (delta.v_heads,)
        and all(weight.is_cpu and weight.is_contiguous() for weight in others)
    )


def reference(
    delta: GatedDelta, rows: Sequence[torch.Tensor], before: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """What the mixer gives to its last projection, ``[1, v_heads * v_dim]``, in torch; overwrites the states.

    Args:
        delta: The mixer.
        rows: Outputs of its projections for a token, ``[1, out_features]``.
        before: As of :meth:`GatedDelta.states_of`.
        state: Likewise.
    """
    taps, log_rates, biases, weight = delta.parameters()
    dtype = rows[0].dtype
    heads, group = delta.k_heads, delta.group

    def of(place: Rows, count: int) -> torch.Tensor:
        starts = place.start + place.stride * torch.arange(heads)
        return rows[place.source].view(-1)[(starts[:, None] + torch.arange(count)).view(-1)]

    x = torch.cat([of(delta.q, delta.k_dim), of(delta.k, delta.k_dim), of(delta.v, group * delta.v_dim)])
    window = torch.cat([before[0, :, 1:], x[:, None].to(before.dtype)], dim=1)
    before[0].copy_(window)
    mixed = functional.silu((window.float() * taps.float()).sum(1).to(dtype))
    keys = heads * delta.k_dim
    q, k = (
        part.view(heads, 1, delta.k_dim).expand(-1, group, -1).reshape(delta.v_heads, -1).float()
        for part in (mixed[:keys], mixed[keys : 2 * keys])
    )
    v = mixed[2 * keys :].view(delta.v_heads, delta.v_dim).float()
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + UNIT_EPS) for part in (q, k))
    q = q / delta.k_dim**0.5
    beta = of(delta.beta, group).sigmoid().float()[:, None]
    rates = -log_rates.float().exp()
    decay = rates * functional.softplus(of(delta.decay, group).float() + biases.float())
    state[0] *= decay.exp()[:, None, None]
    change = (v - (state[0] * k[:, :, None]).sum(1)) * beta
    state[0] += k[:, :, None] * change[:, None, :]
    out = (state[0] * q[:, :, None]).sum(1).to(dtype).float()
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + delta.eps)
    gate = functional.silu(of(delta.gate, group * delta.v_dim).view(delta.v_heads, -1).float())
    normed: torch.Tensor = weight * out.to(dtype)
    return (normed * gate).to(dtype).view(1, -1)


def agrees(delta: GatedDelta) -> bool:
    """Whether the mixer has the results of :func:`reference`, but for rounding, for random tokens, one by one
    and then several at once, behind these and without any before them.
    """
    mixer, dtype = delta.mixer, delta.mixer.conv1d.weight.dtype
    hidden = delta.projections[0].in_features
    with probing() as generator:
        normal, layer = normal_numbers(generator, dtype), StateLayer()
        state = torch.randn((1, delta.v_heads, delta.k_dim, delta.v_dim), generator=generator)
        layer.update_conv_state(normal(1, delta.channels, delta.taps), conv_kernel_size=delta.taps)
        layer.update_recurrent_state(state)
        ours = [each.clone() for each in layer.tensors()]
        first = [list(delta.first_states(normal(1))) for _ in range(2)]
        with random_projections(mixer, (*delta.inputs, _OUTPUT), normal):
            return (
                all(_same(delta, layer, ours, normal(1, 1, hidden) * size) for size in SIZES)
                and _same(delta, layer, ours, normal(1, MANY, hidden))
                and _same(delta, StateLayer(), first[0], normal(1, MANY, hidden))
                and _same(delta, StateLayer(), first[1], normal(1, 1, hidden))
                and delta.states_in(layer) is not None
            )


def _same(delta: GatedDelta, layer: StateLayer, ours: list[torch.Tensor], x: torch.Tensor) -> bool:
    """Whether both ways agree for tokens, from these states on."""
    cache: Any = DynamicCache()
    cache.layers = [*(StateLayer() for _ in range(delta.index)), layer]
    try:
        theirs = delta.mixer.forward(hidden_states=x.clone(), attention_mask=None, **{STATES: cache})
        rows = [module(x) for module in delta.projections]
        made = [reference(delta, [row[:, token] for row in rows], *ours) for token in range(x.shape[1])]
        pairs = [(theirs, delta.output(torch.stack(made, dim=1)).view_as(theirs))]
        pairs += zip(layer.tensors(), ours, strict=True)
        return all(close(found, wanted) for found, wanted in pairs)
    except Exception:  # the family's code needs more than the probe has
        return False
