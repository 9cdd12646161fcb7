"""Manifold-constrained hyper-connections, recognised by their results and computed natively for one token.

A token has several residual streams. Before each part of a layer their norm gives, by one product, weights of
the streams for the part's input, for its output, and a matrix that mixes the streams, which the algorithm of
Sinkhorn and Knopp makes doubly stochastic (Xie et al., arXiv:2512.24880, section 4). DeepSeek-V4 has two for
each layer, and torch launches some ninety operations for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.layer_kind import agreeing_modules
from moechat.models.decode.norms import Norm
from moechat.models.decode.probe import SIZES, close, hooks_of, probing, takes_hidden_states_only
from moechat.models.element_types import ELEMENTS

_WEIGHT, _BASE, _SCALE, _NORM = "fn", "base", "scale", "input_norm"
_STREAMS, _ROUNDS, _EPS = "hc_mult", "hc_sinkhorn_iters", "hc_eps"


@dataclass(frozen=True)
class HyperConnection:
    """A module of this kind. It returns the weights behind a part, the matrix, and the part's input.

    Attributes:
        module: The module.
        norm: Of all streams, without a weight.
        streams: Number of streams.
        hidden: Elements of each.
        rounds: Of the algorithm.
        eps: Added to weights and sums.
    """

    module: Any
    norm: Norm
    streams: int
    hidden: int
    rounds: int
    eps: float

    def apply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reference implementation in torch, of ``[1, tokens, streams, hidden]``."""
        n, tokens = self.streams, x.shape[:2]
        weight, base, scale = (self.module._parameters[name] for name in (_WEIGHT, _BASE, _SCALE))
        flat = self.norm.apply(x.reshape(*tokens, -1).float(), torch.ones(n * self.hidden))
        before, behind, matrix = torch.split(nn.functional.linear(flat, weight), [n, n, n * n], dim=-1)
        pre = (before * scale[0] + base[:n]).sigmoid() + self.eps
        post = 2 * (behind * scale[1] + base[n : 2 * n]).sigmoid()
        comb = (matrix * scale[2] + base[2 * n :]).view(*tokens, n, n).softmax(-1) + self.eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.rounds - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        return post, comb, (pre.unsqueeze(-1) * x).sum(2).to(x.dtype)


def recognise_hyper_connections(
    model: nn.Module, bare_norms: Mapping[nn.Module, Norm]
) -> dict[nn.Module, HyperConnection]:
    """The modules of this kind in a model. One of each kind is tried.

    Args:
        model: Its parameters of this kind are on the CPU.
        bare_norms: Its norms without a weight.
    """
    return agreeing_modules(model, lambda module: _described(module, bare_norms), _agrees)


def _described(module: Any, bare_norms: Mapping[nn.Module, Norm]) -> HyperConnection | None:
    """What a module seems to be, by its names and sizes."""
    children, parameters = dict(module.named_children()), module._parameters
    if children.keys() != {_NORM} or parameters.keys() != {_WEIGHT, _BASE, _SCALE}:
        return None
    if "forward" in vars(module) or children[_NORM] not in bare_norms or not takes_hidden_states_only(module):
        return None
    streams, rounds, eps = (getattr(module, name, None) for name in (_STREAMS, _ROUNDS, _EPS))
    if type(streams) is not int or type(rounds) is not int or type(eps) is not float:
        return None
    weight, base, scale = (parameters[name] for name in (_WEIGHT, _BASE, _SCALE))
    logits = (2 + streams) * streams
    if streams < 1 or rounds < 1 or weight.ndim != 2 or weight.shape[1] % streams:
        return None
    if (weight.shape[0], base.shape, scale.shape) != (logits, (logits,), (3,)):
        return None
    if not all(
        each.dtype is torch.float32 and each.is_cpu and each.is_contiguous() for each in parameters.values()
    ):
        return None
    hidden = weight.shape[1] // streams
    return HyperConnection(module, bare_norms[children[_NORM]], streams, hidden, rounds, eps)


def _agrees(mixing: HyperConnection) -> bool:
    """Whether the module has the results of :meth:`HyperConnection.apply` for random streams of all types."""
    with probing() as generator:
        for dtype in ELEMENTS:
            for size in SIZES:
                x = torch.randn((1, 2, mixing.streams, mixing.hidden), generator=generator) * size
                try:
                    theirs = mixing.module.forward(x.to(dtype))
                except Exception:  # the family's code needs more than the probe has
                    return False
                if type(theirs) is not tuple or len(theirs) != 3:
                    return False
                if not all(map(close, theirs, mixing.apply(x.to(dtype)))):
                    return False
    return True


def native_hyper_connection(mixing: HyperConnection) -> Callable[..., Any] | None:
    """A native ``forward`` for one token; ``None`` if there are too many streams."""
    module, n, hidden = mixing.module, mixing.streams, mixing.hidden
    weights = tuple(module._parameters[name] for name in (_WEIGHT, _BASE, _SCALE))

    def native(kind: str) -> _native.HyperConnection:
        return _native.HyperConnection(
            kind,
            n,
            hidden,
            weights[0].data_ptr(),
            weights[1].data_ptr(),
            weights[2].data_ptr(),
            mixing.norm.eps,
            mixing.eps,
            mixing.rounds,
        )

    try:
        runs = {dtype: native(kind) for dtype, kind in ELEMENTS.items()}
    except ValueError:
        return None
    own, shape, empty = module.forward, (1, 1, n, hidden), torch.empty
    hooks = hooks_of([module._modules[_NORM]])

    def forward(hidden_streams: torch.Tensor) -> Any:
        dtype = hidden_streams.dtype
        run = runs.get(dtype)
        if (
            run is None
            or hidden_streams.shape != shape
            or not (hidden_streams.is_cpu and hidden_streams.is_contiguous())
            or any(hooks)
        ):
            return own(hidden_streams)
        post, comb = empty((1, 1, n)), empty((1, 1, n, n))
        collapsed = empty((1, 1, hidden), dtype=dtype)
        run(hidden_streams.data_ptr(), post.data_ptr(), comb.data_ptr(), collapsed.data_ptr())
        return post, comb, collapsed

    forward.__dict__["weights"] = weights  # keeps the memory alive that the native parts read
    return forward
