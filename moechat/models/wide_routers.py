"""Routers with float32 weights in models of 16 bits, which many families have since transformers 5.24.

Their code makes hidden states and weights float32 before the product. So a weight that the checkpoint stores
in the model's 16 bits has the same results if it stays so, and takes half the memory: 48 MB less in
GLM-4.5-Air.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import nn

from moechat.models.decode.probe import takes_hidden_states_only


def widening_routers(model: nn.Module, dtype: torch.dtype) -> set[nn.Module]:
    """Modules with a float32 matrix as ``weight`` that compute the same with one of ``dtype``, if its values
    are of this type.

    Args:
        model: On the meta device.
        dtype: Of hidden states, bfloat16 or float16.
    """
    found = set()
    known: dict[tuple[type[nn.Module], torch.Size], bool] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or weight.dtype is not torch.float32:
            continue
        # Linear layers do not widen, and what has parts may use the weight elsewhere.
        if isinstance(module, nn.Linear | nn.Embedding) or any(True for _ in module.children()):
            continue
        kind = type(module), weight.shape
        if kind not in known:
            # If it takes both, it makes both operands of its product float32.
            known[kind] = takes_hidden_states_only(module) and all(
                _takes(module, each, dtype) for each in (torch.float32, dtype)
            )
        if known[kind]:
            found.add(module)
    return found


def _takes(module: nn.Module, weight_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the code of a module multiplies its weight in one type with hidden states in another one."""
    # On the meta device torch would not compare the types.
    trial = copy(module)
    for held in ("_parameters", "_buffers"):
        values = {
            name: each if each is None else torch.zeros(each.shape, dtype=each.dtype)
            for name, each in vars(module)[held].items()
        }
        trial.__dict__[held] = values
    weight = trial._parameters["weight"]
    assert weight is not None
    trial._parameters["weight"] = nn.Parameter(weight.to(weight_dtype), requires_grad=False)
    try:
        with torch.inference_mode():
            trial(torch.zeros((1, weight.shape[1]), dtype=dtype))
    except Exception:  # torch multiplies no matrices of two types
        return False
    return True
