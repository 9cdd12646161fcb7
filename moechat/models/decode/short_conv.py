"""Gated short convolutions, as of LFM2, recognised by their results and computed natively for one token.

``out_proj(C * convolution(B * x))``, where ``in_proj`` makes ``B``, ``C`` and ``x``. The convolution sums the
last tokens of each channel by weights of the channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.cache_argument import CACHE
from moechat.models.decode.layer_kind import agreeing_modules
from moechat.models.decode.probe import SIZES, close, hooks_of, normal_numbers, probing
from moechat.models.decode.products import native_products
from moechat.models.decode.stand_ins import random_projections
from moechat.models.decode.state_steps import StateMixer
from moechat.models.decode.wiring import only_known_arguments
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer, token_convolution

_PROJECTIONS = ("in_proj", "out_proj")
_MOST_TAPS = 8


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution.

    Attributes:
        mixer: The module.
        channels: Elements of ``B``, ``C`` and ``x`` each.
        taps: Tokens of the convolution, the new one included.
        index: Of its layer in the attention cache.
    """

    mixer: Any
    channels: int
    taps: int
    index: int

    @property
    def projections(self) -> list[Any]:
        """The first and the last one."""
        return [self.mixer._modules[name] for name in _PROJECTIONS]

    @property
    def weight(self) -> torch.Tensor:
        """Of the convolution, ``[channels, taps]``."""
        weight: torch.Tensor = self.mixer.conv.weight
        return weight.view(self.channels, self.taps)

    def before_in(self, layer: Any) -> torch.Tensor | None:
        """The last elements of each channel in the layer of a cache, ``[1, channels, taps]``; ``None`` before
        the first token.
        """
        before = token_convolution(layer, (1, self.channels, self.taps))
        return before if before is not None and before.dtype is self.mixer.conv.weight.dtype else None

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if it is computed in another way."""
        return hooks_of(module for module in self.mixer.modules() if module is not self.mixer)


def recognise_short_convs(model: nn.Module) -> dict[nn.Module, ShortConv]:
    """The gated short convolutions of a model. One of each kind is tried.

    Args:
        model: Its weights are on the CPU, but for its projections.
    """
    return agreeing_modules(model, _described, _agrees)


def _described(module: Any) -> ShortConv | None:
    """The convolution that a module seems to be, by its names and sizes."""
    children = dict(module.named_children())
    if children.keys() != {*_PROJECTIONS, "conv"} or "forward" in vars(module) or module._parameters:
        return None
    conv, index = children["conv"], getattr(module, "layer_idx", None)
    if type(conv) is not nn.Conv1d or type(index) is not int:
        return None
    channels, each, taps = conv.weight.shape
    weights = [conv.weight, *([] if conv.bias is None else [conv.bias])]
    first, last = (children[name] for name in _PROJECTIONS)
    fits = (
        each == 1
        and taps <= _MOST_TAPS
        and conv.weight.dtype in ELEMENTS
        and all(weight.dtype is conv.weight.dtype for weight in weights)
        and all(weight.is_cpu and weight.is_contiguous() for weight in weights)
        and getattr(first, "out_features", 0) == 3 * channels
        and getattr(last, "in_features", 0) == channels
        and getattr(last, "out_features", 0) == getattr(first, "in_features", 0)
    )
    return ShortConv(module, channels, taps, index) if fits else None


def reference(short: ShortConv, row: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What it gives to its last projection, ``[1, channels]``, in torch; overwrites ``before``.

    Args:
        short: The convolution.
        row: Output of its first projection for a token, ``[1, 3 * channels]``.
        before: As of :meth:`ShortConv.before_in`.
    """
    b, c, x = row[0].chunk(3)
    before[0].copy_(torch.cat([before[0, :, 1:], (b * x)[:, None]], dim=1))
    mixed, bias = (before[0].float() * short.weight.float()).sum(1), short.mixer.conv.bias
    return (c * (mixed if bias is None else mixed + bias.float()).to(row.dtype)).view(1, -1)


def _agrees(short: ShortConv) -> bool:
    """Whether it has the results of :func:`reference`, but for rounding, for random tokens."""
    mixer, layer = short.mixer, StateLayer()
    with probing() as generator:
        normal = normal_numbers(generator, mixer.conv.weight.dtype)
        cache: Any = DynamicCache()
        cache.layers = [*(StateLayer() for _ in range(short.index)), layer]
        layer.update_conv_state(normal(1, short.channels, short.taps), conv_kernel_size=short.taps)
        before = layer.tensors()[0].clone()
        first, last = _PROJECTIONS
        try:
            with random_projections(mixer, _PROJECTIONS, normal):
                for size in SIZES:
                    x = normal(1, 1, short.projections[0].in_features) * size
                    theirs = mixer.forward(x.clone(), attention_mask=None, **{CACHE: cache})
                    made = reference(short, mixer._modules[first](x).view(1, -1), before)
                    pairs = [
                        (theirs, mixer._modules[last](made).view_as(theirs)),
                        (layer.tensors()[0], before),
                    ]
                    if not all(close(found, wanted) for found, wanted in pairs):
                        return False
        except Exception:  # the family's code needs more than the probe has
            return False
    return short.before_in(layer) is not None


def native_short_conv(short: ShortConv) -> Callable[..., Any] | None:
    """A ``forward`` for ``short.mixer``; ``None`` if native code does not read its projections."""
    products, weight, bias = native_products(short.projections), short.weight, short.mixer.conv.bias
    if products is None:
        return None
    dtype, shape = weight.dtype, (1, 1, short.projections[0].in_features)
    try:
        run = _native.ShortConvMixer(
            ELEMENTS[dtype],
            short.channels,
            short.taps,
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            *products,
        )
    except ValueError:
        return None
    own, hooks, index, before_in = short.mixer.forward, short.hooks(), short.index, short.before_in

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        before = None
        layers = getattr(named.get(CACHE), "layers", ())
        if (
            hidden_states.shape == shape
            and hidden_states.dtype is dtype
            and hidden_states.is_cpu
            and hidden_states.is_contiguous()
            and attention_mask is None
            and index < len(layers)
            and not any(hooks)
            and only_known_arguments(named)
        ):
            before = before_in(layers[index])
        if before is None:
            return own(hidden_states, attention_mask=attention_mask, **named)
        out = torch.empty_like(hidden_states)
        run(hidden_states.data_ptr(), before.data_ptr(), 0, out.data_ptr())
        return out

    forward.__dict__["weights"] = (weight, bias)  # keeps the memory alive that ``run`` reads
    forward.__dict__["mixer"] = run
    return forward


def short_conv_mixer(short: ShortConv) -> StateMixer:
    """``short`` as :func:`moechat.models.decode.state_steps.state_step` takes it."""
    dtype, before_in = short.weight.dtype, short.before_in

    def places(slot: Any) -> tuple[int, int] | None:
        before = before_in(slot)
        return None if before is None else (before.data_ptr(), 0)

    def fill(slot: StateLayer, generator: torch.Generator) -> None:
        drawn = torch.randn((1, short.channels, short.taps), generator=generator).to(dtype)
        slot.update_conv_state(drawn, conv_kernel_size=short.taps)

    return StateMixer(
        short.index, dtype, short.projections[0].in_features, _native.ShortConvStep, places, fill
    )
