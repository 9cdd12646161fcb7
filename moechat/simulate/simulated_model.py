"""Sizes of the model to simulate, without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moechat.configurator.estimate import ModelShape, Near
from moechat.errors import UsageError
from moechat.geometry import ExpertGeometry
from moechat.hub.known_shapes import find_shape, shape_names, shape_values
from moechat.options import LoadOptions
from moechat.outline.config_source import config_in, known_shape
from moechat.outline.find_outline import find_outline
from moechat.routing.trace import Trace

# Configuration keys of the number of experts, and of experts per token.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
# Context for the size of the attention cache.
_CONTEXT = 1024


@dataclass(frozen=True)
class SimulatedModel:
    """Sizes of a model.

    Attributes:
        name: Name to show.
        shape: Sizes that its times depend on, with its dense weights as the CPU keeps them.
        geometry: Geometry of its experts.
        guessed: Whether it was chosen by the shape of the trace.
        gpu_shape: The same with dense weights as a GPU keeps them; ``None``: no different.
    """

    name: str
    shape: ModelShape
    geometry: ExpertGeometry
    guessed: bool = False
    gpu_shape: ModelShape | None = None

    def on(self, near: Near) -> SimulatedModel:
        """The model as the near tier keeps it."""
        return self if near == "ram" or self.gpu_shape is None else replace(self, shape=self.gpu_shape)


def shape_of_trace(trace: Trace) -> str:
    """Name of the known model with the trace's layers, experts and experts per token.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = []
    for name in shape_names():
        values = shape_values(name)
        experts = next((values[key] for key in _EXPERTS if key in values), None)
        top_k = next((values[key] for key in _TOP_K if key in values), None)
        layers = values["num_hidden_layers"] - values.get("first_k_dense_replace", 0)
        if (layers, experts, top_k) == (trace.layers, trace.num_experts, trace.top_k):
            found.append(name)
    if len(found) == 1:
        return found[0]
    what = f"{trace.layers} layers of {trace.num_experts} experts, {trace.top_k} a token"
    raise UsageError(
        f"{'no' if not found else 'more than one'} known model has the trace's {what}",
        hint=f"name one with --model: a config.json, or one of: {', '.join(shape_names())}",
    )


def model_for(name: str | None, trace: Trace, bits: int) -> SimulatedModel:
    """Sizes of a model by the name of a known shape, a ``config.json`` or a directory with one.

    Args:
        name: ``None`` takes the known model with the shape of the trace.
        trace: Recorded routing.
        bits: Bits per expert weight.

    Raises:
        UsageError: The name is unknown, or ``bits`` is not supported.
        UnsupportedModelError: The configuration cannot be used.
    """
    guessed = name is None
    if name is None:
        name = shape_of_trace(trace)
    known = find_shape(name)
    path = Path(name).expanduser()
    if known is None and not path.exists():
        raise UsageError(
            f"there is no model {name!r}",
            hint=f"name a config.json, a directory with one, or one of: {', '.join(shape_names())}",
        )
    config = known_shape(known) if known is not None else config_in(path)
    outline = find_outline(config, "bfloat16", dense_bits=LoadOptions.dense_bits)
    geometry = outline.geometry(bits)
    size = outline.itemsize
    gpu_shape = ModelShape(
        layers=len(outline.expert_layers),
        experts=geometry.num_experts,
        top_k=outline.top_k,
        bits=bits,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=outline.expert_weights,
        dense_bytes=outline.dense.in_layers * size,
        head_bytes=outline.dense.head * size,
        dense_itemsize=size,
        kv_bytes=outline.cache.nbytes(_CONTEXT) // _CONTEXT,
        hidden_size=geometry.hidden_size,
    )
    form = outline.form
    shape = replace(
        gpu_shape, dense_bytes=form.in_layers, head_bytes=form.head_bytes, dense_itemsize=form.itemsize
    )
    label = known if known is not None else path.name
    return SimulatedModel(label, shape, geometry, guessed, gpu_shape)
