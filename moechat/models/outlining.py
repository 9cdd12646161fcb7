"""Counts the sizes of a model from its configuration: it is built on the meta device, without memory.

Weights are counted in the model that transformers builds, not by formulas; experts have the encoding that
the block store would use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moechat.errors import UnsupportedModelError, UsageError
from moechat.geometry import AUTO_BITS, DEFAULT_ACTIVATION_BITS, PLAIN_KV_BITS, DenseBits
from moechat.hub.known_shapes import shape_values
from moechat.models.attention_cache import cache_shape
from moechat.models.count_dense import count_dense_weights
from moechat.models.dense import loading_bytes, stored_encodings, stored_types
from moechat.models.dense_form import DenseForm, WatchedReads, choose_form, watched_weights
from moechat.models.live_bytes import part_of_prompt
from moechat.models.quiet import without_warnings
from moechat.models.router_search import copied_bytes
from moechat.models.skeleton import (
    Skeleton,
    build_skeleton,
    config_from,
    experts_geometry,
    load_config,
)
from moechat.sizes.cache_shape import CacheShape
from moechat.sizes.context_length import stated_context
from moechat.sizes.footprint import PassSizes, prefill_chunk
from moechat.sizes.model_outline import ModelOutline
from moechat.store.tensor_headers import HeaderTable, TensorHeaders

# Top-k if neither a trial pass nor the configuration gives it.
_USUAL_TOP_K = 8
# Names of types in configurations, and in safetensors files.
_STORED_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def read_config(source: Path) -> Any:
    """Read the configuration in a model's directory, or a ``config.json`` file.

    Raises:
        UnsupportedModelError: It cannot be read or used; the message gives the reason.
    """
    with without_warnings():
        return load_config(source)


def known_config(name: str) -> Any:
    """Configuration of a known model, one of :func:`moechat.hub.known_shapes.shape_names`.

    Raises:
        UsageError: The name is unknown.
    """
    with without_warnings():
        return config_from(shape_values(name), Path(name))


def outline_model(
    config: Any,
    dtype: torch.dtype,
    *,
    dense_bits: DenseBits,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    kv_bits: int = PLAIN_KV_BITS,
    on_gpu: bool = False,
    source: TensorHeaders | None = None,
) -> ModelOutline:
    """Build the model of a configuration without weights and count its weights; see :func:`outline_skeleton`.

    Args:
        config: From :func:`read_config` or :func:`known_config`.
        dtype: Compute type of the dense weights.
        dense_bits: Bits per dense weight: 16, 8, 6, 4 or ``auto``.
        activation_bits: Bits of the inputs of packed weights: 8, 16 or 32.
        kv_bits: Bits of a key or value in the attention cache: 16 or 8.
        on_gpu: The dense part runs on a GPU.
        source: Names, types and shapes of the weights; ``None`` assumes the type in the configuration, or
            bfloat16 if it names none.

    Raises:
        UnsupportedModelError: The installed transformers cannot build the model, it has no routed experts, or
            moechat cannot run experts of that kind, or not with ``kv_bits``.
    """
    # Building the model overwrites the type that its configuration names.
    named = str(getattr(config.get_text_config(), "dtype", None)).removeprefix("torch.")
    try:
        with without_warnings():  # among them those of the pass that counts the attention cache
            skeleton = build_skeleton(config, dtype)
            outline, _ = outline_skeleton(
                skeleton,
                dtype,
                dense_bits=dense_bits,
                activation_bits=activation_bits,
                kv_bits=kv_bits,
                on_gpu=on_gpu,
                source=headers_of(skeleton, _STORED_TYPES.get(named, "BF16")) if source is None else source,
            )
    except UsageError as error:  # the sizes are not those of the user
        raise UnsupportedModelError(f"moechat cannot run such a model: {error}", hint=error.hint) from error
    return outline


@dataclass(frozen=True)
class _Trial:
    """What passes on the meta device have shown of a model.

    Attributes:
        cache: Its attention cache.
        top_k: Experts of a token, as its routers chose them; 0: they were not reached.
        reads: Plain layers whose weights are read from outside their own forward.
        chunk: Tokens of a part of a prompt.
        live: Bytes of activations of such a part; 0 where they are not counted in a pass.
    """

    cache: CacheShape
    top_k: int
    reads: WatchedReads
    chunk: int
    live: int


def _try_out(skeleton: Skeleton, dtype: torch.dtype, *, kv_bits: int) -> _Trial:
    """Run a model on the meta device; arguments and errors as :func:`outline_skeleton`."""
    model = skeleton.model
    top_k: list[int] = []

    def trial(hidden: torch.Tensor, index: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        top_k.append(index.shape[-1])
        return torch.empty_like(hidden)

    with skeleton.experts_computed_by(trial), watched_weights(model) as reads:
        cache = cache_shape(model, model.config, dtype, bits=kv_bits)
    chunk, live = prefill_chunk(PassSizes.of(model.config)), 0
    if cache.has_states:
        with skeleton.experts_computed_by(trial):
            chunk, live = part_of_prompt(skeleton, chunk, in_parts=cache.appendable > 0)
    return _Trial(cache, max(top_k, default=0), reads, chunk, live)


def outline_skeleton(
    skeleton: Skeleton,
    dtype: torch.dtype,
    *,
    source: TensorHeaders,
    dense_bits: DenseBits,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    kv_bits: int = PLAIN_KV_BITS,
    on_gpu: bool = False,
) -> tuple[ModelOutline, DenseForm]:
    """Count the weights of a model on the meta device; a trial pass gives its attention cache and top-k.

    Args:
        skeleton: A model without weights; its modules are restored at the end.
        dtype: Compute type of the dense weights.
        source: Names, types and shapes of the weights.
        dense_bits: Bits per dense weight: 16, 8, 6, 4 or ``auto``.
        activation_bits: Bits of the inputs of packed weights: 8, 16 or 32.
        kv_bits: Bits of a key or value in the attention cache: 16 or 8.
        on_gpu: The dense part runs on a GPU.

    Returns:
        The outline, and the form of every dense weight.

    Raises:
        UnsupportedModelError: The attention cache cannot be kept in ``kv_bits``.
    """
    model, first = skeleton.model, skeleton.experts[0]
    text = model.config.get_text_config()
    trial = _try_out(skeleton, dtype, kv_bits=kv_bits)
    encodings, decoded = stored_encodings(skeleton, source)
    form = choose_form(
        skeleton,
        stored_types(skeleton, source),
        bits=16 if on_gpu and dense_bits == AUTO_BITS else dense_bits,
        # A GPU computes in floats. With 16 bits the logits hardly depend on the blocks that the CPU computes.
        activation_bits=max(16, activation_bits) if on_gpu else activation_bits,
        encodings=encodings,
        decoded=decoded,
        reads=trial.reads,
        stored_rows=not on_gpu,
    )
    layers = getattr(text, "num_hidden_layers", None)
    outline = ModelOutline(
        model_type=str(model.config.model_type),
        layers=layers if isinstance(layers, int) else len(skeleton.experts),
        expert_layers=tuple(entry.layer for entry in skeleton.experts),
        top_k=min(trial.top_k or configured_top_k(model.config), first.num_experts),
        experts=experts_geometry(skeleton.experts, 16),
        dense=count_dense_weights(skeleton),
        dtype=str(dtype).removeprefix("torch."),
        loading=loading_bytes(skeleton, source, form),
        form=form.sizes,
        cache=trial.cache,
        stated_context=stated_context(model.config),
        sizes=PassSizes.of(model.config),
        chunk=trial.chunk,
        live=trial.live,
        router_copies=copied_bytes(model, skeleton.experts),
        kinds=_kinds(text),
    )
    return outline, form


def _kinds(text: Any) -> tuple[str, ...]:
    """Kinds of the decoder layers that a configuration names, if there is more than one."""
    kinds = tuple(map(str, getattr(text, "layer_types", None) or ()))
    return kinds if len(set(kinds)) > 1 else ()


def headers_of(skeleton: Skeleton, dtype: str) -> HeaderTable:
    """Headers of a checkpoint that is not here: the names of the model's own weights, all of one type.

    Args:
        skeleton: The model.
        dtype: ``BF16``, ``F16`` or ``F32``.
    """
    return HeaderTable({name: (dtype, tuple(tensor.shape)) for name, tensor in skeleton.state.items()})


def configured_top_k(config: Any) -> int:
    """Experts per token in the configuration; 8 if it does not say."""
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"):
        value = getattr(text, name, None)
        if isinstance(value, list):
            value = max(value, default=None)
        if isinstance(value, int) and value > 0:
            return value
    return _USUAL_TOP_K
