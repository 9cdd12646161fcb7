"""Counts the dense (non-expert) weights of a model by part."""

from __future__ import annotations

import re
from typing import Any

from moechat.models.skeleton import ExpertsModule, Skeleton
from moechat.sizes.dense_sizes import DenseWeights

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def count_dense_weights(skeleton: Skeleton) -> DenseWeights:
    """Count every parameter once, by its part; tied ones count for the head."""
    counts = dict.fromkeys(("attention", "shared", "routers", "feed_forward", "embedding", "head"), 0)
    embedding = _weight_of(skeleton.model.get_input_embeddings())
    output = _weight_of(skeleton.model.get_output_embeddings())  # type: ignore[no-untyped-call]
    owners = {entry.layer: _owner(entry) for entry in skeleton.experts}
    usual = next(iter(owners.values())).rpartition(".")[2]
    first = skeleton.experts[0]
    prefix = skeleton.layers_name + "."
    for name, tensor in skeleton.model.named_parameters():
        if tensor is embedding and tensor is not output:
            part = "embedding"
        elif not name.startswith(prefix) or (match := _LAYER_NUMBER.search(name, len(prefix) - 1)) is None:
            part = "head"
        else:
            owner = owners.get(int(match[1]))
            below = f"{prefix}{match[1]}."
            if owner is None:
                part = "feed_forward" if name.startswith(f"{below}{usual}.") else "attention"
            elif not name.startswith(owner + "."):
                part = "attention"
            elif tuple(tensor.shape) in (
                (first.num_experts, first.hidden_size),
                (first.hidden_size, first.num_experts),
            ) or tuple(tensor.shape) == (first.num_experts,):
                part = "routers"
            else:
                # If the layer itself owns the experts, its other parameters are the attention and norms.
                part = "attention" if owner + "." == below else "shared"
        counts[part] += tensor.numel()
    return DenseWeights(**counts)


def _weight_of(module: Any) -> Any:
    return getattr(module, "weight", None)


def _owner(entry: ExpertsModule) -> str:
    return entry.name.rpartition(".")[0]
