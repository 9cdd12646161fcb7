"""Mamba-2 mixers, recognised by their results, and natively for one token on the CPU (Nemotron-H, Granite).

For each element of a head with a state ``h`` ``[state_size]``, a token computes (Dao and Gu,
arXiv:2405.21060, section 6)::

    step = softplus(dt + bias);  h = exp(-rate step) h + step x B;  y = C' h + skip x

after a short convolution of ``x``, ``B`` and ``C`` over the last tokens, and before a norm of ``y`` times the
gates' silu, in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.decode.layer_kind import agreeing_modules
from moechat.models.decode.probe import SIZES, close, hooks_of, normal_numbers, probing
from moechat.models.decode.products import native_products
from moechat.models.decode.stand_ins import random_projections
from moechat.models.decode.wiring import only_known_arguments
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer, token_states

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
        layers = getattr(cache, "layers", ())
        layer = layers[self.index] if self.index < len(layers) else None
        shapes = (1, self.channels, self.taps), (1, self.heads, self.head_dim, self.state_size)
        return token_states(layer, *shapes)


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
    mamba = Mamba2(module, heads, head_dim, groups, state_size, taps, index, group, eps)
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


def reference(mamba: Mamba2, row: torch.Tensor, before: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """What the mixer gives to its last projection, ``[1, inner]``, in torch; overwrites the states.

    Args:
        mamba: The mixer.
        row: Output of its first projection for a token, ``[1, out_features]``.
        before: As of :meth:`Mamba2.states_of`.
        state: Likewise.
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
    step = functional.softplus(steps + biases).float().view(-1, 1, 1)
    kept = (-step * log_rates.float().exp().view(-1, 1, 1)).exp()
    state[0] = state[0] * kept + step * heads * keys
    out = (state[0] * queries).sum(-1).to(dtype)
    out = (out + (heads[..., 0].to(dtype) * skips[:, None])).float().view(-1)
    out = (out * functional.silu(gate.float())).view(-1, mamba.norm_group)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + mamba.eps)
    normed: torch.Tensor = weight * out.view(-1).to(dtype)
    return normed.view(1, -1)


def agrees(mamba: Mamba2) -> bool:
    """Whether the mixer has the results of :func:`reference`, but for rounding, for random tokens.

    Two of them meet states of zeros with very short and very long steps, so that a limit of steps is seen.
    """
    dtype = mamba.mixer.conv1d.weight.dtype
    heads = (1, mamba.heads, mamba.head_dim, mamba.state_size)
    with probing() as generator:
        normal = normal_numbers(generator, dtype)
        before, state = normal(1, mamba.channels, mamba.taps), torch.randn(heads, generator=generator)
        sizes = _FP16_SIZES if dtype is torch.float16 else SIZES
        if not _same(mamba, before, state, sizes, normal):
            return False
        for bias in _EXTREME_BIASES:
            with _biased(mamba.mixer, bias):
                if not _same(mamba, before, torch.zeros(heads), (0.1,), normal):
                    return False
    return True


def _same(
    mamba: Mamba2,
    before: torch.Tensor,
    state: torch.Tensor,
    sizes: tuple[float, ...],
    normal: Callable[..., torch.Tensor],
) -> bool:
    """Whether both ways agree for a token of each size, from these states on."""
    mixer, dtype, layer = mamba.mixer, before.dtype, StateLayer()
    cache: Any = DynamicCache()
    cache.layers = [*(StateLayer() for _ in range(mamba.index)), layer]
    layer.update_conv_state(before.clone(), conv_kernel_size=mamba.taps)
    layer.update_recurrent_state(state.clone())
    ours = [each.clone() for each in layer.tensors()]
    # The family rounds what a token adds to its states, and these once more where it reads them.
    rough = torch.float32 if dtype is torch.float32 else torch.bfloat16
    first, last = _PROJECTIONS
    try:
        with random_projections(mixer, _PROJECTIONS, normal):
            for size in sizes:
                x = normal(1, 1, mamba.projections[0].in_features) * size
                theirs = mixer.forward(x.clone(), cache_params=cache, attention_mask=None)
                made = reference(mamba, mixer._modules[first](x).view(1, -1), *ours)
                pairs = [(theirs, mixer._modules[last](made).view_as(theirs))]
                pairs += zip(layer.tensors(), ours, strict=True)
                if not all(close(found.to(rough), wanted.to(rough)) for found, wanted in pairs):
                    return False
    except Exception:  # the family's code needs more than the probe has
        return False
    return mamba.states_of(cache) is not None


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


def native_mamba2(mamba: Mamba2) -> Callable[..., Any] | None:
    """A ``forward`` for ``mamba.mixer``; ``None`` if native code does not read its projections."""
    products, weights, bias = native_products(mamba.projections), mamba.parameters(), mamba.mixer.conv1d.bias
    if products is None:
        return None
    taps, log_rates, step_biases, skips, norm = weights
    dtype, shape = taps.dtype, (1, 1, mamba.projections[0].in_features)
    try:
        run = _native.MambaMixer(
            ELEMENTS[dtype],
            mamba.heads,
            mamba.head_dim,
            mamba.groups,
            mamba.state_size,
            mamba.taps,
            mamba.norm_group,
            mamba.eps,
            taps.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            log_rates.data_ptr(),
            step_biases.data_ptr(),
            skips.data_ptr(),
            norm.data_ptr(),
            *products,
        )
    except ValueError:
        return None
    own, hooks, states_of = mamba.mixer.forward, mamba.hooks(), mamba.states_of

    def forward(
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        states = None
        if (
            hidden_states.shape == shape
            and hidden_states.dtype is dtype
            and hidden_states.is_cpu
            and hidden_states.is_contiguous()
            and attention_mask is None
            and not any(hooks)
            and only_known_arguments(named)
        ):
            states = states_of(cache_params)
        if states is None or states[0].dtype is not dtype:
            return own(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named)
        before, state = states
        out = torch.empty_like(hidden_states)
        run(hidden_states.data_ptr(), before.data_ptr(), state.data_ptr(), out.data_ptr())
        return out

    forward.__dict__["weights"] = (weights, bias)  # keeps the memory alive that ``run`` reads
    return forward
