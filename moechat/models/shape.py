"""A model's sizes from its configuration alone: built on the meta device, where nothing takes memory.

The counts are those of the model that transformers builds, not of formulas; experts and their encoding are
those that the block store would hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import logging

from moechat import _native
from moechat.errors import UnsupportedModelError
from moechat.geometry import ExpertGeometry, WeightType
from moechat.hub.known_shapes import shape_values
from moechat.models.assets import context_length
from moechat.models.attention_cache import CacheShape, cache_shape
from moechat.models.dense_form import DenseForm, choose_form, unpacked_bytes, watched_weights
from moechat.models.footprint import (
    one_pass_bytes,
    pass_tokens,
    scratch_bytes,
    workspace_bytes,
)
from moechat.models.skeleton import ExpertsModule, Skeleton, build_skeleton, load_config

# Where neither a trial pass nor the configuration says how many experts a token takes.
_USUAL_TOP_K = 8
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class DenseWeights:
    """Weights that are no routed expert's, counted by what they belong to.

    Attributes:
        attention: Attention (or what a family has in its place) and norms of all layers.
        shared: Shared experts, beside the routed ones.
        routers: Of all layers.
        feed_forward: Of layers without routed experts.
        embedding: Of the words of the vocabulary; 0 where it is the head's.
        head: Final norm, head, and what else lies outside of the layers.
    """

    attention: int
    shared: int
    routers: int
    feed_forward: int
    embedding: int
    head: int

    @property
    def in_layers(self) -> int:
        """What a token reads between the embedding and the final norm."""
        return self.attention + self.shared + self.routers + self.feed_forward

    @property
    def total(self) -> int:
        """All of them."""
        return self.in_layers + self.embedding + self.head


@dataclass(frozen=True)
class ModelOutline:
    """What a plan has to know about a model.

    Attributes:
        model_type: The family, as transformers calls it.
        layers: Decoder layers.
        expert_layers: Those with routed experts, ascending.
        top_k: Experts a token takes of a layer.
        experts: Shape of every expert; the encoding is that of :meth:`geometry`.
        dense: Weights that are no routed expert's.
        dtype: Type that they are computed in.
        largest: Weights of the largest dense tensor that is not kept as it is stored.
        form: How they are kept.
        cache: Shape of the attention cache, in that type.
        own_context: Tokens that the model was made for.
        config: transformers' configuration, as the model was built with it.
    """

    model_type: str
    layers: int
    expert_layers: tuple[int, ...]
    top_k: int
    experts: ExpertsModule
    dense: DenseWeights
    dtype: torch.dtype
    largest: int
    form: DenseForm
    cache: CacheShape
    own_context: int
    config: Any

    def geometry(self, bits: int) -> ExpertGeometry:
        """Shape and encoding of the experts with so many bits a weight.

        Raises:
            UsageError: So many bits are not supported.
        """
        entry = self.experts
        return ExpertGeometry(
            hidden_size=entry.hidden_size,
            intermediate_size=entry.intermediate_size,
            num_experts=entry.num_experts,
            bits=bits,
            weight_type=WeightType.BF16,
            activation=entry.gate.activation,
            alpha=entry.gate.alpha,
            limit=entry.gate.limit,
            has_bias=entry.has_bias,
        )

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, biases included."""
        entry = self.experts
        biases = 2 * entry.intermediate_size + entry.hidden_size if entry.has_bias else 0
        return 3 * entry.hidden_size * entry.intermediate_size + biases

    @property
    def parameters(self) -> int:
        """All weights of the model."""
        return self.dense.total + len(self.expert_layers) * self.experts.num_experts * self.expert_weights

    @property
    def active_parameters(self) -> int:
        """Weights that a token is computed with, without the embedding."""
        routed = len(self.expert_layers) * self.top_k * self.expert_weights
        return self.dense.in_layers + self.dense.head + routed

    @property
    def dense_bytes(self) -> int:
        """Dense weights as they are kept, and buffers."""
        return self.form.nbytes

    @property
    def loading(self) -> int:
        """What loading the dense weights takes besides them for a time: the largest one that is not used as
        it is stored. Stored as bfloat16, as nearly all are.
        """
        return 2 * self.largest

    @property
    def router_copies(self) -> int:
        """Bytes of the float32 routers that prediction keeps beside the model's own."""
        if self.dtype == torch.float32:
            return 0
        entry = self.experts
        return len(self.expert_layers) * entry.num_experts * entry.hidden_size * 4

    def workspace(self, context: int) -> int:
        """What the largest pass takes in a context of so many tokens."""
        if self.cache.appendable:
            return workspace_bytes(self.config, self.dtype, self.pass_tokens(context), context)
        return one_pass_bytes(self.config, self.dtype, context)

    def pass_tokens(self, context: int) -> int:
        """Tokens of the longest pass when prompts fill a context of so many."""
        return pass_tokens(self.config, self.cache, context)

    @property
    def scratch(self) -> int:
        """What the native kernels take."""
        longest = self.pass_tokens(self.own_context)
        blocks = self.geometry(16).blocks_per_expert  # the same for all bits
        return scratch_bytes(self.experts.hidden_size, blocks, self.top_k, longest)

    @property
    def unpacked(self) -> int:
        """What a card takes beside packed dense weights, to unpack them for products of many tokens."""
        return unpacked_bytes(self.form, self.dtype.itemsize)


def read_config(source: Path) -> Any:
    """The configuration in a model's directory, or in a file of that kind.

    Raises:
        UnsupportedModelError: It cannot be read or used; the message says why.
    """
    with without_warnings():
        return load_config(source)


def known_config(name: str) -> Any:
    """The configuration of a known shape, one of :func:`moechat.hub.known_shapes.shape_names`.

    Raises:
        UsageError: The name is unknown.
    """
    with without_warnings():
        return AutoConfig.for_model(**shape_values(name))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Without what transformers says about spellings in configurations: to a plan they mean nothing."""
    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def automatic_type() -> torch.dtype:
    """Type of dense weights on this CPU: bfloat16 where it multiplies that natively, else float32."""
    # Without native support torch multiplies bf16 on a CPU several times slower than float32.
    features = _native.cpu_features()
    native_bf16 = features.get("avx512_bf16", False) or features.get("amx_bf16", False)
    return torch.bfloat16 if native_bf16 else torch.float32


def outline_model(config: Any, dtype: torch.dtype, dense_bits: int = 16) -> ModelOutline:
    """Build the model of a configuration without weights, and count.

    Args:
        config: See :func:`read_config` and :func:`known_config`.
        dtype: Type that the dense weights are computed in.
        dense_bits: Bits of a dense weight: 16, 8 or 4.

    Raises:
        UnsupportedModelError: The installed transformers cannot build it, it has no routed experts, or they
            are of a kind that moechat cannot run.
    """
    with without_warnings():
        skeleton = build_skeleton(config, dtype)
    chosen: list[int] = []

    def trial(hidden: torch.Tensor, index: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        chosen.append(index.shape[-1])
        return torch.empty_like(hidden)

    for entry in skeleton.experts:
        # An attribute of the instance: the experts have no weights that the class's own could use.
        entry.module.forward = trial
    text = skeleton.model.config.get_text_config()
    with watched_weights(skeleton.model) as reads:
        cache = cache_shape(skeleton.model, skeleton.model.config, dtype)
    stored = dict.fromkeys(skeleton.state, torch.bfloat16)
    form = choose_form(skeleton, stored, bits=dense_bits, activation_bits=16, reads=reads)
    first = skeleton.experts[0]
    top_k = max(chosen, default=configured_top_k(config))
    layers = getattr(text, "num_hidden_layers", None)
    return ModelOutline(
        model_type=str(skeleton.model.config.model_type),
        layers=layers if isinstance(layers, int) else len(skeleton.experts),
        expert_layers=tuple(entry.layer for entry in skeleton.experts),
        top_k=min(top_k, first.num_experts),
        experts=first,
        dense=_dense_weights(skeleton),
        dtype=dtype,
        largest=_largest(skeleton, dtype, form),
        form=form,
        cache=cache,
        own_context=context_length(config, None),
        config=skeleton.model.config,
    )


def configured_top_k(config: Any) -> int:
    """Experts a token takes, as the configuration says; the usual number where it does not."""
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"):
        value = getattr(text, name, None)
        if isinstance(value, list):
            value = max(value, default=None)
        if isinstance(value, int) and value > 0:
            return value
    return _USUAL_TOP_K


def _dense_weights(skeleton: Skeleton) -> DenseWeights:
    """Every parameter once, by where it lies; tied ones count where a token reads them, at the head."""
    counts = dict.fromkeys(("attention", "shared", "routers", "feed_forward", "embedding", "head"), 0)
    embedding = _weight_of(skeleton.model.get_input_embeddings())
    output = _weight_of(skeleton.model.get_output_embeddings())  # type: ignore[no-untyped-call]
    owners = {entry.layer: _owner(entry) for entry in skeleton.experts}
    usual = next(iter(owners.values())).rpartition(".")[2]
    first = skeleton.experts[0]
    prefix = first.name[: _number_at(first)]  # "model.layers."
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
                # Where the experts hang on the layer itself, what lies beside them is all of the layer.
                part = "attention" if owner + "." == below else "shared"
        counts[part] += tensor.numel()
    return DenseWeights(**counts)


def _largest(skeleton: Skeleton, dtype: torch.dtype, form: DenseForm) -> int:
    """Weights of the largest tensor that loading reads instead of mapping it."""
    sizes = [
        parameter.numel()
        for name, parameter in skeleton.model.named_parameters()
        if (dtype != torch.bfloat16 and name not in form.kept)
        or (form.packs and name.removesuffix(".weight") in form.linears)
    ]
    return max(sizes, default=0)


def _weight_of(module: Any) -> Any:
    return getattr(module, "weight", None)


def _owner(entry: ExpertsModule) -> str:
    return entry.name.rpartition(".")[0]


def _number_at(entry: ExpertsModule) -> int:
    match = _LAYER_NUMBER.search(entry.name)
    if match is None:
        raise UnsupportedModelError(f"{entry.name} does not say which decoder layer it belongs to")
    return match.start() + 1
