"""Weights to continue from (used by train.py --start): of a checkpoint, or of the store in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from moechat import _native
from moechat.store.store import Store


def first_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a trained model.

    Args:
        path: A checkpoint as transformers writes it, or a block store. The experts of a store are
            quantised; they begin as the kernels use them, dequantised.

    Returns:
        float32 tensors under the names of :class:`Qwen3MoeForCausalLM`'s state.

    Raises:
        OSError: There is neither.
        StoreDamagedError: The store is not what its manifest says.
    """
    if not (path / "manifest.json").exists():
        model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
        return dict(model.state_dict())
    store = Store.open(path)
    store.verify()
    found = {name: _float(store.dense.array(name)) for name in store.dense}
    layout = store.geometry.layout
    for layer in store.layers:
        experts = [_native.unpack_expert(layout, record) for record in store.expert_layer(layer.layer)]
        both = [torch.cat([torch.from_numpy(gate), torch.from_numpy(up)]) for gate, up, _, _ in experts]
        found[f"{layer.module}.gate_up_proj"] = torch.stack(both)
        found[f"{layer.module}.down_proj"] = torch.stack(
            [torch.from_numpy(down) for _, _, down, _ in experts]
        )
    return found


def _float(values: NDArray[Any]) -> Tensor:
    """A tensor of the store in float32; the store gives bf16 as ``uint16``."""
    if values.dtype != np.uint16:
        return torch.from_numpy(np.array(values, np.float32))
    return torch.from_numpy(np.array(values).view(np.int16)).view(torch.bfloat16).float()
