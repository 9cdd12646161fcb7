"""Rotary position embedding of queries and keys, recognised by its results.

Families call a function of their Python module, ``apply_rotary_pos_emb(q, k, cos, sin)``. An attention module
gets a copy of its ``forward`` in which this name refers to the native function; the family's Python module is
not changed. DeepSeek and GLM-4.7-Flash also have ``apply_rotary_pos_emb_interleave``, which rotates
neighbouring elements; the kernels of a GPU compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.probe import FEW_TOKENS, close, probing
from moechat.models.decode.wiring import own_forward
from moechat.models.element_types import ELEMENTS

_NAME = "apply_rotary_pos_emb"
_NEIGHBOURS = "apply_rotary_pos_emb_interleave"
WHOLE, _PART, _SHARED = "whole", "part", "shared"
Rotate = Callable[..., Any]


def recognise_rotary(module: nn.Module) -> Rotate | None:
    """A native replacement for the rotary function of ``module``; ``None`` if the results differ."""
    own = _function(module, _NAME)
    if own is None:
        return None
    with probing() as generator:
        q = torch.randn((1, 3, 4, 32), generator=generator).transpose(1, 2)
        k = torch.randn((1, 3, 1, 32), generator=generator).transpose(1, 2)
        whole, half = (
            torch.randn((2, 1, 3, 32), generator=generator),
            torch.randn((2, 1, 3, 16), generator=generator),
        )
        kinds = {
            kind
            for kind, (cos, sin) in ((WHOLE, whole), (_PART, half), (_SHARED, half))
            if _same(native_rotary(own, {kind}), own, q, k, cos, sin)
        }
    return native_rotary(own, kinds) if kinds else None


def recognise_neighbours(module: nn.Module) -> Rotate | None:
    """The function of ``module`` that rotates neighbouring elements, 2i and 2i + 1, by angle i, of as many
    angles as elements. It returns the first ones of all pairs, then the second ones.

    ``None``: the module has none, or the results differ.
    """
    own = _function(module, _NEIGHBOURS)
    if own is None:
        return None
    with probing() as generator:
        q = torch.randn((1, 3, 4, 32), generator=generator).transpose(1, 2)
        k = torch.randn((1, 3, 1, 32), generator=generator).transpose(1, 2)
        angles = torch.randn((2, 1, 3, 16), generator=generator).repeat(1, 1, 1, 2)
        found: Rotate | None = own if _same(_turned_neighbours, own, q, k, *angles) else None
    return found


def _function(module: nn.Module, name: str) -> Rotate | None:
    """The function that the ``forward`` of a module calls by ``name``; ``None``: it calls none."""
    forward = own_forward(module)
    if "forward" in vars(module) or not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    own: Any = forward.__globals__.get(name)
    return own if name in forward.__code__.co_names and callable(own) else None


def _turned_neighbours(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation in torch."""
    turned = []
    for x in (q, k):
        first, second = x[..., ::2], x[..., 1::2]
        c, s = (each[:, None, :, : first.shape[-1]] for each in (cos, sin))
        turned.append(torch.cat([first * c - second * s, second * c + first * s], dim=-1))
    return turned[0], turned[1]


def _same(ours: Rotate, own: Rotate, *arguments: torch.Tensor) -> bool:
    try:
        wanted = own(*arguments)
    except Exception:  # it does not accept angles of this kind
        return False
    return len(wanted) == 2 and all(map(close, ours(*arguments), wanted))


def with_rotary(
    module: nn.Module, rotate: Rotate | None, neighbours: Rotate | None = None
) -> Callable[..., Any]:
    """The ``forward`` of ``module`` with others in place of its family's functions.

    Args:
        module: The attention module.
        rotate: In place of that of :func:`recognise_rotary`; ``None``: it stays.
        neighbours: In place of that of :func:`recognise_neighbours`; ``None``: it stays.
    """
    own = own_forward(module)
    assert isinstance(own, FunctionType)
    given = {name: each for name, each in ((_NAME, rotate), (_NEIGHBOURS, neighbours)) if each is not None}
    copy = FunctionType(
        own.__code__, {**own.__globals__, **given}, own.__name__, own.__defaults__, own.__closure__
    )
    copy.__kwdefaults__ = own.__kwdefaults__
    copy.__dict__["rotates"] = rotate
    return MethodType(copy, module)


def rotation_width(forward: Any, dim: int, angles: int) -> int:
    """Elements of a head of ``dim`` that a ``forward`` of :func:`with_rotary` rotates by ``angles`` angles.

    0 for another ``forward``, or if it leaves the rotation to its family.
    """
    rotate = getattr(forward, "__dict__", {}).get("rotates")
    return rotated_width(getattr(rotate, "__dict__", {}).get("kinds", ()), dim, angles)


def rotated_width(kinds: Collection[str], dim: int, angles: int) -> int:
    """Elements of a head of ``dim`` that ``angles`` angles of one of the ``kinds`` rotate; 0: of none."""
    if angles == dim:
        width = dim if WHOLE in kinds else 0
    elif 2 * angles == dim and _SHARED in kinds:
        width = dim
    else:
        width = angles if angles < dim and _PART in kinds else 0
    return 0 if width % 2 else width


def native_rotary(own: Rotate, kinds: Collection[str]) -> Rotate:
    """A function that rotates like ``own``, natively for a few tokens of one sequence in the usual layout.

    Args:
        own: The family's function.
        kinds: Verified kinds of angles: one per element of a head (``whole``), for the first elements only
            (``part``), one per pair (``shared``).
    """
    turn = _native.rotate

    def rotate(*arguments: Any, **named: Any) -> Any:
        # Some families also rotate queries alone, or name the arguments.
        if named or len(arguments) != 4 or not all(isinstance(each, torch.Tensor) for each in arguments):
            return own(*arguments, **named)
        q, k, cos, sin = arguments
        dtype, shape, angles = q.dtype, q.shape, cos.shape[-1]
        tokens, dim = shape[-2], shape[-1]
        width = rotated_width(kinds, dim, angles)
        if (
            tokens > FEW_TOKENS
            or width == 0
            or not (k.dtype is dtype and cos.dtype is dtype and sin.dtype is dtype and dtype in ELEMENTS)
            or not (q.is_cpu and cos.is_contiguous() and sin.is_contiguous())
            or not len(shape) == k.ndim == 4
            or not shape[0] == k.shape[0] == 1
            or k.shape[-2:] != shape[-2:]
            or cos.shape != (1, tokens, angles)
            or sin.shape != cos.shape
            or not q.stride(-1) == k.stride(-1) == 1
        ):
            return own(q, k, cos, sin)
        kind = ELEMENTS[dtype]
        at = (cos.data_ptr(), sin.data_ptr(), angles, width)
        turned = []
        for x in (q, k):
            heads = x.shape[1]
            out = torch.empty((1, tokens, heads, dim), dtype=dtype)
            _, head_stride, token_stride, _ = x.stride()
            turn(kind, x.data_ptr(), token_stride, head_stride, out.data_ptr(), tokens, heads, dim, *at)
            turned.append(out.transpose(1, 2))
        return turned[0], turned[1]

    rotate.__dict__["kinds"] = frozenset(kinds)
    rotate.__dict__["own"] = own
    return rotate
