"""The memory of a model's dense weights, counted in its modules."""

from __future__ import annotations

from torch import nn

from moechat.models.linear import (
    EncodedEmbedding,
    PackedLinear,
    ReorderedLinear,
    SplitLinear,
    StoredEmbedding,
    StoredLinear,
)


def bytes_of_dense(model: nn.Module) -> int:
    """Bytes of the weights and buffers of a model as it is loaded; shared memory counts once.

    Experts have no weights there. Orders of columns, which forms leave out, are left out too.
    """
    orders = {id(module._order) for module in model.modules() if isinstance(module, ReorderedLinear)}
    seen: dict[int, int] = {
        buffer.data_ptr(): buffer.nbytes for buffer in model.buffers() if id(buffer) not in orders
    }
    for module in model.modules():
        if isinstance(module, EncodedEmbedding | StoredEmbedding | StoredLinear | SplitLinear):
            seen[id(module)] = module.nbytes
        elif isinstance(module, PackedLinear):
            seen[id(module)] = module.layout.nbytes
            if module.bias is not None:
                seen[id(module.bias)] = module.bias.nbytes
        else:
            for parameter in module._parameters.values():
                if parameter is not None:
                    seen[id(parameter)] = parameter.nbytes
    return sum(seen.values())
