"""Which modules differ only in their weights, so that one of each kind is tried."""

from __future__ import annotations

from typing import Any

from torch import nn


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
