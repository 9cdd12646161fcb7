"""Which modules differ only in their weights, so that one of each kind is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from torch import nn

_Found = TypeVar("_Found")
# Fields in which descriptions of modules of one kind differ: the module itself, and its layer.
_OF_ITS_OWN = ("mixer", "module", "index")


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for layers that differ only in their weights and index."""

    def plain(module: nn.Module) -> tuple[Any, ...]:
        values = sorted(
            (name, repr(value))
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str, tuple, type(None)) and name != "layer_idx"
        )
        tensors = [
            (name, tuple(tensor.shape), tensor.dtype)
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        rule = getattr(vars(module).get("forward"), "__dict__", {}).get("rule")
        return (type(module), tuple(values), tuple(tensors), repr(rule))

    return tuple((name, plain(module)) for name, module in layer.named_modules())


def agreeing_modules(
    model: nn.Module,
    describe: Callable[[nn.Module], _Found | None],
    agrees: Callable[[_Found], bool],
) -> dict[nn.Module, _Found]:
    """The modules of ``model`` that are what they seem to be. One of each kind is tried.

    Args:
        model: Any model.
        describe: What a module seems to be, as a dataclass; ``None``: something else.
        agrees: The trial.
    """

    def sizes_of(seeming: Any) -> tuple[Any, ...]:
        names = (each.name for each in fields(seeming))
        return tuple(getattr(seeming, name) for name in names if name not in _OF_ITS_OWN)

    tried: dict[Any, bool] = {}
    found = {}
    for module in model.modules():
        seeming = describe(module)
        if seeming is None:
            continue
        kind = sizes_of(seeming), type(module), layer_kind(module)
        if kind not in tried:
            tried[kind] = agrees(seeming)
        if tried[kind]:
            found[module] = seeming
    return found
