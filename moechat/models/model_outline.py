"""The sizes of a model from its configuration: the model is built on the meta device, without memory.

Weights are counted in the model that transformers builds, not by formulas; experts have the encoding that
the block store would use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import AutoConfig

from moechat import _native
from moechat.geometry import (
    AUTO_BITS,
    DEFAULT_ACTIVATION_BITS,
    PLAIN_KV_BITS,
    DenseBits,
    ExpertGeometry,
)
from moechat.hub.known_shapes import shape_values
from moechat.models.assets import context_length
from moechat.models.attention_cache import CacheShape, cache_shape
from moechat.models.dense import HeaderTable, TensorHeaders, loading_bytes, stored_encodings, stored_types
from moechat.models.dense_form import DenseForm, WatchedReads, choose_form, unpacked_bytes, watched_weights
from moechat.models.dense_weights import DenseWeights, count_dense_weights
from moechat.models.footprint import (
    counted_bytes,
    one_pass_bytes,
    pass_tokens,
    prefill_chunk,
    scratch_bytes,
    wave_bytes,
    workspace_bytes,
)
from moechat.models.kept_trials import Trial, read_trial, trial_key, write_trial
from moechat.models.live_bytes import part_of_prompt
from moechat.models.quiet import without_warnings
from moechat.models.router_search import copied_bytes
from moechat.models.skeleton import (
    ExpertsModule,
    Skeleton,
    build_skeleton,
    experts_geometry,
    load_config,
)

# Top-k if neither a trial pass nor the configuration gives it.
_USUAL_TOP_K = 8
# Names of types in configurations, and in safetensors files.
_STORED_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class ModelOutline:
    """Sizes of a model, for planning.

    Attributes:
        model_type: transformers' name of the family.
        layers: Number of decoder layers.
        expert_layers: Indices of the layers with routed experts, ascending.
        top_k: Experts per token and layer.
        experts: The layers with routed experts, of one shape; :meth:`geometry` adds the encoding.
        dense: Number of dense weights.
        dtype: Compute type of the dense weights.
        loading: Largest temporary memory for loading the dense weights, in bytes.
        form: Form of the dense weights in memory.
        cache: Shape of the attention cache, in ``dtype``.
        own_context: Context length of the model, in tokens.
        config: transformers' configuration of the built model.
        chunk: Tokens of a part of a prompt, where prompts are computed in parts.
        live: Most bytes of activations alive at a time in a pass of ``chunk`` tokens, but for attention;
            0: not counted, because formulas give them.
        router_copies: Most bytes of the float32 copies of routers that prediction uses.
    """

    model_type: str
    layers: int
    expert_layers: tuple[int, ...]
    top_k: int
    experts: tuple[ExpertsModule, ...]
    dense: DenseWeights
    dtype: torch.dtype
    loading: int
    form: DenseForm
    cache: CacheShape
    own_context: int
    config: Any
    chunk: int
    live: int
    router_copies: int

    def geometry(self, bits: int) -> ExpertGeometry:
        """Shape and encoding of the experts with ``bits`` bits per weight.

        Raises:
            UsageError: ``bits`` is not supported.
        """
        return experts_geometry(self.experts, bits)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, biases included."""
        geometry = self.geometry(16)
        return geometry.expert_weights + geometry.expert_biases

    @property
    def parameters(self) -> int:
        """Number of all weights."""
        return self.dense.total + len(self.expert_layers) * self.experts[0].num_experts * self.expert_weights

    @property
    def active_parameters(self) -> int:
        """Number of weights used for one token, without the embedding."""
        routed = len(self.expert_layers) * self.top_k * self.expert_weights
        return self.dense.in_layers + self.dense.head + routed

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense weights in memory, and of buffers."""
        return self.form.nbytes

    @property
    def can_replay(self) -> bool:
        """Whether CUDA graphs can replay a token: masks and frequencies depend only on its position."""
        cache = self.cache
        return cache.reserved and cache.unlimited and not cache.has_states and not cache.has_indexer

    def workspace(self, context: int, *, on_gpu: bool) -> int:
        """Bytes of activations of the largest pass in a context of ``context`` tokens."""
        tokens = self.pass_tokens(context)
        known = one_pass_bytes(self.config, self.dtype, context)
        if self.cache.appendable:
            known = workspace_bytes(self.config, self.dtype, tokens, context, on_gpu=on_gpu)
        # Layers compute one after another, so the largest counts.
        return max(known, counted_bytes(self.config, self.live * tokens // self.chunk) if self.live else 0)

    def pass_tokens(self, context: int) -> int:
        """Tokens of the longest pass when prompts fill a context of ``context`` tokens."""
        return pass_tokens(self.chunk, self.cache, context)

    @property
    def wave_chunk(self) -> int:
        """Tokens of a chunk of a wave; 0 if prompts are not computed in waves."""
        return self.chunk if self.cache.reserved and self.cache.unlimited else 0

    def wave(self, tokens: int, context: int, *, on_gpu: bool) -> int:
        """Bytes of a wave of so many tokens beyond :meth:`workspace`; see :func:`wave_bytes`."""
        return wave_bytes(self.config, self.dtype, tokens, context, top_k=self.top_k, on_gpu=on_gpu)

    @property
    def scratch(self) -> int:
        """Scratch bytes of the native kernels."""
        longest = self.pass_tokens(self.own_context)
        blocks = self.geometry(16).blocks_per_expert  # the same for all bits
        return scratch_bytes(self.experts[0].hidden_size, blocks, self.top_k, longest)

    @property
    def unpacked(self) -> int:
        """Bytes on a GPU for unpacking packed dense weights in products of many tokens."""
        return unpacked_bytes(self.form, self.dtype.itemsize)


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
        return AutoConfig.for_model(**shape_values(name))


def automatic_type() -> torch.dtype:
    """Type of dense weights on this CPU: bfloat16 if it has native bf16 products, else float32."""
    # Without native support, torch's bf16 products on a CPU are several times slower than float32.
    features = _native.cpu_features()
    native_bf16 = features.get("avx512_bf16", False) or features.get("amx_bf16", False)
    return torch.bfloat16 if native_bf16 else torch.float32


def resolve_type(
    name: str, *, on_gpu: bool, capability: tuple[int, int] | None = None, here: bool = True
) -> torch.dtype:
    """Compute type of the dense part.

    Args:
        name: ``float32``, ``bfloat16``, ``float16`` or ``auto``.
        on_gpu: The dense part runs on a GPU.
        capability: CUDA compute capability of the GPU.
        here: The machine is this one; for the CPU of another one, native bf16 products are unknown.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if on_gpu:
        return gpu_type(capability)
    return automatic_type() if here else torch.float32


def gpu_type(capability: tuple[int, int] | None) -> torch.dtype:
    """Type of dense weights on a GPU: bfloat16 from compute capability 8.0, else float16.

    Args:
        capability: Compute capability; ``None`` (unknown) counts as recent.
    """
    return torch.bfloat16 if capability is None or capability >= (8, 0) else torch.float16


def outline_model(
    config: Any,
    dtype: torch.dtype,
    *,
    dense_bits: DenseBits,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    kv_bits: int = PLAIN_KV_BITS,
    on_gpu: bool = False,
    source: TensorHeaders | None = None,
    trials: Path | None = None,
    keep_trial: bool = True,
) -> ModelOutline:
    """Build the model of a configuration without weights and count its weights; see :func:`outline_skeleton`.

    Args:
        config: From :func:`read_config` or :func:`known_config`.
        dtype: Compute type of the dense weights.
        dense_bits: Bits per dense weight: 16, 8, 4 or ``auto``.
        activation_bits: Bits of the inputs of packed weights: 8, 16 or 32.
        kv_bits: Bits of a key or value in the attention cache: 16 or 8.
        on_gpu: The dense part runs on a GPU.
        source: Names, types and shapes of the weights; ``None`` assumes the type in the configuration, or
            bfloat16 if it names none.
        trials: Directory of kept results of trial passes; ``None``: they are made anew.
        keep_trial: Keep new ones there.

    Raises:
        UnsupportedModelError: The installed transformers cannot build the model, it has no routed experts, or
            moechat cannot run experts of that kind, or not with ``kv_bits``.
    """
    # Building the model overwrites the type that its configuration names.
    named = str(getattr(config.get_text_config(), "dtype", None)).removeprefix("torch.")
    key = "" if trials is None else trial_key(config, dtype, kv_bits)
    with without_warnings():  # among them those of the pass that counts the attention cache
        skeleton = build_skeleton(config, dtype)
        trial = None if trials is None else read_trial(trials, key, skeleton.model)
        if trial is None:
            trial = try_out(skeleton, dtype, kv_bits=kv_bits)
            if trials is not None and keep_trial:
                write_trial(trials, key, trial)
        return outline_skeleton(
            skeleton,
            dtype,
            dense_bits=dense_bits,
            activation_bits=activation_bits,
            kv_bits=kv_bits,
            on_gpu=on_gpu,
            source=headers_of(skeleton, _STORED_TYPES.get(named, "BF16")) if source is None else source,
            trial=trial,
        )


def try_out(skeleton: Skeleton, dtype: torch.dtype, *, kv_bits: int) -> Trial:
    """Run a model on the meta device; arguments and errors as :func:`outline_skeleton`."""
    model = skeleton.model
    top_k: list[int] = []

    def trial(hidden: torch.Tensor, index: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        top_k.append(index.shape[-1])
        return torch.empty_like(hidden)

    with skeleton.experts_computed_by(trial), watched_weights(model) as reads:
        cache = cache_shape(model, model.config, dtype, bits=kv_bits)
    chunk, live = prefill_chunk(model.config), 0
    if cache.has_states:
        with skeleton.experts_computed_by(trial):
            chunk, live = part_of_prompt(skeleton, chunk, in_parts=cache.appendable > 0)
    names = tuple(name for name, module in model.named_modules() if module in reads.modules)
    return Trial(cache, max(top_k, default=0), names, chunk, live)


def outline_skeleton(
    skeleton: Skeleton,
    dtype: torch.dtype,
    *,
    source: TensorHeaders,
    dense_bits: DenseBits,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    kv_bits: int = PLAIN_KV_BITS,
    on_gpu: bool = False,
    trial: Trial | None = None,
) -> ModelOutline:
    """Count the weights of a model on the meta device; a trial pass gives its attention cache and top-k.

    Args:
        skeleton: A model without weights; its modules are restored at the end.
        dtype: Compute type of the dense weights.
        source: Names, types and shapes of the weights.
        dense_bits: Bits per dense weight: 16, 8, 4 or ``auto``.
        activation_bits: Bits of the inputs of packed weights: 8, 16 or 32.
        kv_bits: Bits of a key or value in the attention cache: 16 or 8.
        on_gpu: The dense part runs on a GPU.
        trial: Results of trial passes; ``None``: they are made now.

    Raises:
        UnsupportedModelError: The attention cache cannot be kept in ``kv_bits``.
    """
    model, first = skeleton.model, skeleton.experts[0]
    text = model.config.get_text_config()
    trial = try_out(skeleton, dtype, kv_bits=kv_bits) if trial is None else trial
    cache = trial.cache
    reads = WatchedReads()
    reads.modules.update(model.get_submodule(name) for name in trial.reads)
    form = choose_form(
        skeleton,
        stored_types(skeleton, source),
        bits=16 if on_gpu and dense_bits == AUTO_BITS else dense_bits,
        # A GPU computes in floats. With 16 bits the logits hardly depend on the blocks that the CPU computes.
        activation_bits=max(16, activation_bits) if on_gpu else activation_bits,
        encodings=stored_encodings(skeleton, source),
        reads=reads,
        stored_rows=not on_gpu,
    )
    layers = getattr(text, "num_hidden_layers", None)
    return ModelOutline(
        model_type=str(model.config.model_type),
        layers=layers if isinstance(layers, int) else len(skeleton.experts),
        expert_layers=tuple(entry.layer for entry in skeleton.experts),
        top_k=min(trial.top_k or configured_top_k(model.config), first.num_experts),
        experts=skeleton.experts,
        dense=count_dense_weights(skeleton),
        dtype=dtype,
        loading=loading_bytes(skeleton, source, form),
        form=form,
        cache=cache,
        own_context=context_length(model.config, None),
        config=model.config,
        chunk=trial.chunk,
        live=trial.live,
        router_copies=copied_bytes(model, skeleton.experts),
    )


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
