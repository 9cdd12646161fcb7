"""Mamba-2 mixers, recognised by their results (Nemotron-H, Granite).

For each element of a head with a state ``h`` ``[state_size]``, a token computes (Dao and Gu,
arXiv:2405.21060, section 6)::

    step = softplus(dt + bias);  h = exp(-rate step) h + step x B;  y = C' h + skip x

after a short convolution of ``x``, ``B`` and ``C`` over the last tokens, and before a norm of ``y`` times the
gates' silu, in groups. In transformers a prompt's steps are limited, those of single tokens behind it not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from moechat.models.cache_argument import STATES
from moechat.models.decode.layer_kind import agreeing_modules
from moechat.models.decode.probe import MANY, SIZES, close, hooks_of, normal_numbers, probing
from moechat.models.decode.stand_ins import random_projections
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer, begun_states, layer_in, token_states

_PROJECTIONS = ("in_proj", "out_proj")
_NUMBERS = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "conv_kernel_size", "layer_idx")
_VECTORS = ("A_log", "dt_bias", "D")
# Of hidden states that are tried in float16: larger ones, which meet random projections, give infinities.
_FP16_SIZES = (0.5, 1.0, 2.0)
_EXTREME_BIASES = (-12.0, 30.0)  # steps of 6e-6, and of 30


@dataclass(frozen=True)
class Mamba2:
    """A mixer of this kind.

    Attributes:
        mixer: The module.
        heads: Heads.
        head_dim: Elements of a head.
        groups: Of heads with the same ``B`` and ``C``.
        state_size: Elements of ``B``.
        taps: Tokens of the convolution, the new one included.
        index: Of the layer in the attention cache.
        norm_group: Elements that are normed together.
        eps: Of the norm.
        limits: Least and largest step of a prompt.
    """

    mixer: Any
    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    index: int
    norm_group: int
    eps: float
    limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: all heads, then ``B`` of all groups, then ``C``."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projections(self) -> list[Any]:
        """To gates, channels and steps; and back to the hidden size."""
        return [self.mixer._modules[name] for name in _PROJECTIONS]

    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Taps ``[channels, taps]``, rates, biases of steps, skips ``[heads]``, norm ``[inner]``."""
        mixer = self.mixer
        taps = mixer.conv1d.weight.view(self.channels, self.taps)
        return taps, *(mixer._parameters[name] for name in _VECTORS), mixer.norm.weight

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if the mixer is computed in another way."""
        return hooks_of(module for module in self.mixer.modules() if module is not self.mixer)

    def states_of(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """States of the convolution ``[1, channels, taps]`` and of the heads ``[1, heads, head_dim,
        state_size]``, float32; ``None``: before the first token, or of another shape.
        """
        return self.states_in(layer_in(cache, self.index))

    def states_in(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`states_of`, of the layer of a cache."""
        return token_states(layer, *self.shapes)

    def begun_in(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`states_of`; before the first token the cache gets states of zeros."""
        return begun_states(layer_in(cache, self.index), *self.shapes, self.mixer.conv1d.weight.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of both states."""
        return (1, self.channels, self.taps), (1, self.heads, self.head_dim, self.state_size)


def recognise_mamba2(model: nn.Module) -> dict[nn.Module, Mamba2]:
    """The mixers of this kind in a model. One of each kind is tried.

    Args:
        model: Its weights are on the CPU, but for its projections.
    """
    return agreeing_modules(model, _described, agrees)


def _described(module: Any) -> Mamba2 | None:
    """The mixer that a module seems to be, by its names and sizes."""
    children = dict(module.named_children())
    if not {*_PROJECTIONS, "conv1d", "norm"} <= set(children) or "forward" in vars(module):
        return None
    if {name for name, held in module._parameters.items() if held is not None} != set(_VECTORS):
        return None
    numbers = [number for name in _NUMBERS if type(number := getattr(module, name, None)) is int]
    eps = getattr(module.norm, "variance_epsilon", None)
    if len(numbers) < len(_NUMBERS) or not isinstance(eps, float):
        return None
    heads, head_dim, groups, state_size, taps, index = numbers
    # Until transformers 5.22 some families' norms have no groups.
    group = getattr(module.norm, "group_size", heads * head_dim)
    if type(group) is not int:
        return None
    limits = getattr(module, "time_step_limit", (0.0, float("inf")))
    if not isinstance(limits, tuple | list) or [type(each) for each in limits] != [float, float]:
        return None
    mamba = Mamba2(module, heads, head_dim, groups, state_size, taps, index, group, eps, (*limits,))
    return mamba if min(heads, head_dim, groups, state_size, taps, group) > 0 and _fits(mamba) else None


def _fits(mamba: Mamba2) -> bool:
    """Whether all weights have the sizes and types that the layout needs."""
    conv, norm = mamba.mixer.conv1d, mamba.mixer.norm
    if not isinstance(conv, nn.Conv1d) or conv.weight.shape != (mamba.channels, 1, mamba.taps):
        return False
    if mamba.heads % mamba.groups or mamba.inner % mamba.norm_group or "forward" in vars(norm):
        return False
    weights = [*mamba.parameters(), *([] if conv.bias is None else [conv.bias])]
    first, last = mamba.projections
    return (
        all(weight.dtype is conv.weight.dtype and weight.dtype in ELEMENTS for weight in weights)
        and all(weight.is_cpu and weight.is_contiguous() for weight in weights)
        and all(vector.shape == (mamba.heads,) for vector in mamba.parameters()[1:4])
        and norm.weight.shape == (mamba.inner,)
        and getattr(first, "out_features", 0) == mamba.inner + mamba.channels + mamba.heads
        and getattr(last, "in_features", 0) == mamba.inner
        and getattr(last, "out_features", 0) == getattr(first, "in_features", 0)
    )


def reference(
    mamba: Mamba2, row: torch.Tensor, before: torch.Tensor, state: torch.Tensor, *, limited: bool = False
) -> torch.Tensor:
    """What the mixer gives to its last projection, ``[1, inner]``, in torch; overwrites the states.

    Args:
        mamba: The mixer.
        row: Output of its first projection for a token, ``[1, out_features]``.
        before: As of :meth:`Mamba2.states_of`.
        state: Likewise.
        limited: As in prompts.
    """
    taps, log_rates, biases, skips, weight = mamba.parameters()
    dtype, bias = row.dtype, mamba.mixer.conv1d.bias
    gate, x, steps = torch.split(row[0], [mamba.inner, mamba.channels, mamba.heads])
    window = torch.cat([before[0, :, 1:], x[:, None].to(before.dtype)], dim=1)
    before[0].copy_(window)
    mixed = (window.float() * taps.float()).sum(1)
    mixed = functional.silu((mixed if bias is None else mixed + bias.float()).to(dtype))
    sizes = mamba.groups * mamba.state_size
    x, keys, queries = torch.split(mixed.float(), [mamba.inner, sizes, sizes])
    heads = x.view(mamba.heads, mamba.head_dim, 1)
    each = mamba.heads // mamba.groups
    keys, queries = (
        part.view(mamba.groups, 1, -1).expand(-1, each, -1).reshape(mamba.heads, 1, -1)
        for part in (keys, queries)
    )
    step = functional.softplus(steps + biases)
    if limited:
        step = step.clamp(*mamba.limits)
    step = step.float().view(-1, 1, 1)
    kept = (-step * log_rates.float().exp().view(-1, 1, 1)).exp()
    state[0] = state[0] * kept + step * heads * keys
    out = (state[0] * queries).sum(-1).to(dtype)
    out = (out + (heads[..., 0].to(dtype) * skips[:, None])).float().view(-1)
    out = (out * functional.silu(gate.float())).view(-1, mamba.norm_group)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + mamba.eps)
    normed: torch.Tensor = weight * out.view(-1).to(dtype)
    return normed.view(1, -1)


def agrees(mamba: Mamba2) -> bool:
    """Whether the mixer has the results of :func:`reference`, but for rounding, for random tokens, one by one
    and then several at once, behind these and without any before them.

    Some meet states of zeros with very short and very long steps, so that a limit of steps is seen.
    """
    dtype, hidden = mamba.mixer.conv1d.weight.dtype, mamba.projections[0].in_features
    heads = (1, mamba.heads, mamba.head_dim, mamba.state_size)
    with probing() as generator:
        normal = normal_numbers(generator, dtype)

        def filled(state: torch.Tensor) -> StateLayer:
            layer = StateLayer()
            layer.update_conv_state(normal(1, mamba.channels, mamba.taps), conv_kernel_size=mamba.taps)
            layer.update_recurrent_state(state)
            return layer

        def same(layer: StateLayer, *inputs: torch.Tensor) -> bool:
            shapes = (1, mamba.channels, mamba.taps), heads
            held = layer.tensors() or [torch.zeros(shapes[0], dtype=dtype), torch.zeros(shapes[1])]
            ours = [each.clone() for each in held]
            return all(_same(mamba, layer, ours, x) for x in inputs)

        with random_projections(mamba.mixer, _PROJECTIONS, normal):
            sizes = _FP16_SIZES if dtype is torch.float16 else SIZES
            several = normal(1, MANY, hidden) * min(sizes)
            layer = filled(torch.randn(heads, generator=generator))
            agree = same(layer, *(normal(1, 1, hidden) * size for size in sizes), several)
            agree = agree and same(StateLayer(), several, several[:, :1] * 0.1)
            agree = agree and same(StateLayer(), several[:, :1])
            for bias in _EXTREME_BIASES:
                with _biased(mamba.mixer, bias):
                    for x in (normal(1, 1, hidden) * 0.1, several * 0.1):
                        agree = agree and same(filled(torch.zeros(heads)), x)
    return agree


def _same(mamba: Mamba2, layer: StateLayer, ours: list[torch.Tensor], x: torch.Tensor) -> bool:
    """Whether both ways agree for tokens, from these states on."""
    mixer = mamba.mixer
    cache: Any = DynamicCache()
    cache.layers = [*(StateLayer() for _ in range(mamba.index)), layer]
    limited = x.shape[1] > 1 or not layer.tensors()
    # The family rounds what a token adds to its states, and these once more where it reads them.
    rough = torch.float32 if x.dtype is torch.float32 else torch.bfloat16
    first, last = _PROJECTIONS
    try:
        theirs = mixer.forward(x.clone(), attention_mask=None, **{STATES: cache})
        rows = mixer._modules[first](x)
        made = [reference(mamba, rows[:, at], *ours, limited=limited) for at in range(x.shape[1])]
        pairs = [(theirs, mixer._modules[last](torch.stack(made, dim=1)).view_as(theirs))]
        pairs += zip(layer.tensors(), ours, strict=True)
        alike = all(close(found.to(rough), wanted.to(rough)) for found, wanted in pairs)
    except Exception:  # the family's code needs more than the probe has
        return False
    return alike and mamba.states_of(cache) is not None


@contextmanager
def _biased(mixer: nn.Module, bias: float) -> Iterator[None]:
    """Give all steps of a mixer this bias in the block."""
    own = mixer._parameters["dt_bias"]
    assert own is not None
    mixer._parameters["dt_bias"] = nn.Parameter(torch.full_like(own, bias), requires_grad=False)
    try:
        yield
    finally:
        mixer._parameters["dt_bias"] = own
