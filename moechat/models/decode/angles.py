"""Cosines and sines of rotary embeddings, looked up in a table for one token instead of computed.

A family computes them in every pass from the positions. For a single token torch starts its threads for a
hundred numbers, which takes longer than a layer's norms, rotation and attention together. Here the family's
own module fills a table for a range of positions, and a decoding step reads one row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moechat.models.decode.probe import close, probing
from moechat.models.element_types import ELEMENTS
from moechat.models.skeleton import base_of
from moechat.models.threads import one_thread

_POSITIONS = 256  # per table
# Kept at a time: those of answers that are decoded together, each at a position of its own.
_TABLES = 20
_DIMENSIONS = 3  # of positions in a pass of a model for texts and images
# Kinds whose frequencies do not depend on the length of the context.
_STEADY = frozenset({"default", "linear", "llama3", "yarn"})

Angles = Callable[..., Any]


def recognise_angles(module: Any) -> Angles | None:
    """A ``forward`` for ``module``; ``None`` unless its cosines and sines depend only on each position."""
    if "forward" in vars(module) or not isinstance(getattr(module, "inv_freq", None), torch.Tensor):
        return None
    kind = getattr(module, "rope_type", None)
    if not isinstance(kind, str) or kind not in _STEADY or module.inv_freq.ndim != 1:
        return None
    if list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]:
        return None
    with probing() as generator:
        for dimensions, broadcasts in ((1, True), (1, False), (_DIMENSIONS, True)):
            ours = tabled_angles(module, dimensions=dimensions, broadcasts=broadcasts)
            if _agrees(module, ours, generator, dimensions, broadcasts):
                return ours
    return None


def _agrees(
    module: nn.Module, ours: Angles, generator: torch.Generator, dimensions: int, broadcasts: bool
) -> bool:
    """Whether the angles of a table are those of the module, for several positions and hidden states."""
    for dtype in (torch.float32, torch.bfloat16):
        x, other = torch.randn((2, 1, 1, 8), generator=generator).to(dtype)
        for position in (0, 5, _POSITIONS + 3):
            at = torch.tensor([[position]])
            try:
                wanted = module(x, _in_dimensions(at, dimensions))
                found = [ours(other, at)]
                if broadcasts:
                    found += [
                        ours(other, at.expand(_DIMENSIONS, 1, 1)),
                        module(x, at.expand(_DIMENSIONS, 1, 1)),
                    ]
            except Exception:  # it needs other inputs
                return False
            if type(wanted) is not tuple or len(wanted) != 2:
                return False
            if not all(len(each) == 2 and all(map(close, each, wanted)) for each in found):
                return False
    return True


def _in_dimensions(positions: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Positions ``[1, tokens]`` as a module of several dimensions takes them."""
    return positions if dimensions == 1 else positions.expand(dimensions, *positions.shape)


def tabled_angles(module: nn.Module, *, dimensions: int = 1, broadcasts: bool = False) -> Angles:
    """The ``forward`` of ``module`` with a table for passes of one token.

    Args:
        module: Its cosines and sines depend only on each position.
        dimensions: Of the positions that it takes: 1 for ``[1, tokens]``.
        broadcasts: With equal positions in several dimensions, ``[dimensions, 1, 1]``, they are those of one.
    """
    own = module.forward
    tables: dict[tuple[torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        dtype = x.dtype
        if dtype not in ELEMENTS or not (x.is_cpu and position_ids.is_cpu):
            return own(x, position_ids)
        position = _position(position_ids, broadcasts)
        if position is None:
            return own(x, position_ids)
        table, row = divmod(position, _POSITIONS)
        found = tables.get((dtype, table))
        if found is None:
            while len(tables) >= _TABLES:
                del tables[next(iter(tables))]
            positions = torch.arange(table * _POSITIONS, (table + 1) * _POSITIONS)[None]
            with one_thread():
                cos, sin = own(x, _in_dimensions(positions, dimensions))
            found = tables[dtype, table] = cos.contiguous(), sin.contiguous()
        cos, sin = found
        return cos.narrow(1, row, 1), sin.narrow(1, row, 1)

    return forward


def _position(position_ids: torch.Tensor, several: bool) -> int | None:
    """The position of the only token, ``[1, 1]``, or of ``several`` equal ones, ``[dimensions, 1, 1]``."""
    if position_ids.numel() == 1:
        return int(position_ids)
    if not several or position_ids.shape != (_DIMENSIONS, 1, 1):
        return None
    first, *others = position_ids.flatten().tolist()
    return first if all(other == first for other in others) else None


def angle_counts(model: nn.Module) -> set[int]:
    """Numbers of cosines per token of the modules of ``model`` that :func:`recognise_angles` knows."""
    return {angle_count(module) for module in model.modules() if recognise_angles(module) is not None}


def angles_of_layers(model: Any) -> dict[nn.Module, int]:
    """Numbers of cosines per token that the decoder layers of ``model`` get; without those not known."""
    base = base_of(model)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return {}
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    rotary = next((part for part in base.children() if takes_layer_types(part)), None)
    if rotary is None or kinds is None or len(kinds) < len(layers):
        counts = angle_counts(model)
        return dict.fromkeys(layers, next(iter(counts))) if len(counts) == 1 else {}
    with probing():
        x, at = torch.zeros(1, 1, 1), torch.tensor([[0]])
        try:
            found = {kind: rotary(x, at, kind)[0].shape[-1] for kind in set(kinds)}
        except Exception:  # it needs other inputs
            return {}
    return {layer: found[kind] for layer, kind in zip(layers, kinds, strict=False)}


def takes_layer_types(module: nn.Module) -> bool:
    """Whether a module makes the angles of each type of layer, whose name it takes beside positions."""
    try:
        names = list(inspect.signature(type(module).forward).parameters)
    except (TypeError, ValueError):
        return False
    return names[1:] == ["x", "position_ids", "layer_type"]


def angle_count(module: nn.Module) -> int:
    """Number of cosines per token from a module of angles."""
    at = torch.tensor([[0]])
    with probing():
        try:
            cos: torch.Tensor = module(torch.zeros(1, 1, 1), at)[0]
        except Exception:  # it takes positions in several dimensions only
            cos = module(torch.zeros(1, 1, 1), _in_dimensions(at, _DIMENSIONS))[0]
        return cos.shape[-1]
