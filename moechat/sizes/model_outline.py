"""The sizes of a model that plans and loading count with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moechat.geometry import ExpertGeometry
from moechat.sizes.cache_shape import CacheShape
from moechat.sizes.context_length import context_length
from moechat.sizes.dense_sizes import DenseSizes, DenseWeights
from moechat.sizes.dense_types import ITEM_SIZES
from moechat.sizes.footprint import (
    PassSizes,
    counted_bytes,
    one_pass_bytes,
    pass_tokens,
    scratch_bytes,
    wave_bytes,
    workspace_bytes,
)
from moechat.sizes.layer_kernels import OTHER, family_kernels, layer_kernels


@dataclass(frozen=True)
class ModelOutline:
    """Sizes of a model.

    Attributes:
        model_type: transformers' name of the family.
        layers: Number of decoder layers.
        expert_layers: Indices of the layers with routed experts, ascending.
        top_k: Experts per token and layer.
        experts: Shape and gates of the experts, with 16 bits; :meth:`geometry` gives other bits.
        dense: Number of dense weights.
        dtype: Compute type of the dense weights, by its name in torch.
        loading: Largest temporary memory for loading the dense weights, in bytes.
        form: What the dense weights take in memory.
        cache: Shape of the attention cache, in ``dtype``.
        stated_context: Context length of the model, in tokens; ``None``: its configuration names none.
        sizes: Sizes that the activations depend on.
        chunk: Tokens of a part of a prompt, where prompts are computed in parts.
        live: Most bytes of activations alive at a time in a pass of ``chunk`` tokens, but for attention;
            0: not counted, because formulas give them.
        router_copies: Most bytes of the float32 copies of routers that prediction uses.
        kinds: Kinds of the decoder layers, by transformers' names; empty: all are alike.

    Raises:
        ValueError: ``dtype`` is unknown.
    """

    model_type: str
    layers: int
    expert_layers: tuple[int, ...]
    top_k: int
    experts: ExpertGeometry
    dense: DenseWeights
    dtype: str
    loading: int
    form: DenseSizes
    cache: CacheShape
    stated_context: int | None
    sizes: PassSizes
    chunk: int
    live: int
    router_copies: int
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"{self.dtype} is no type of dense weights")

    @property
    def own_context(self) -> int:
        """Tokens of a context where the user wants no other."""
        return context_length(self.stated_context, None)

    def geometry(self, bits: int) -> ExpertGeometry:
        """Shape and encoding of the experts with ``bits`` bits per weight.

        Raises:
            UsageError: ``bits`` is not supported.
        """
        return replace(self.experts, bits=bits)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of :attr:`dtype`."""
        return ITEM_SIZES[self.dtype]

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, biases included."""
        return self.experts.expert_weights + self.experts.expert_biases

    @property
    def parameters(self) -> int:
        """Number of all weights."""
        return self.dense.total + len(self.expert_layers) * self.experts.num_experts * self.expert_weights

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
    def kernels(self) -> float:
        """Kernels of the dense part of a decoded token on a GPU, for each layer with routed experts."""
        return layer_kernels(family_kernels(self.model_type), self.layers, self.expert_layers, self.kinds)

    @property
    def torch_kernels(self) -> float:
        """The same where torch launches them, without kernels of ours."""
        return max(self.kernels, layer_kernels(OTHER, self.layers, self.expert_layers, self.kinds))

    @property
    def can_replay(self) -> bool:
        """Whether CUDA graphs can replay a token: masks and frequencies depend only on its position."""
        cache = self.cache
        return cache.reserved and cache.unlimited and cache.replays

    def workspace(self, context: int, *, on_gpu: bool) -> int:
        """Bytes of activations of the largest pass in a context of ``context`` tokens."""
        tokens = self.pass_tokens(context)
        known = one_pass_bytes(self.sizes, self.itemsize, context)
        if self.cache.appendable:
            known = workspace_bytes(self.sizes, self.itemsize, tokens, context, on_gpu=on_gpu)
        # Layers compute one after another, so the largest counts.
        return max(known, counted_bytes(self.sizes, self.live * tokens // self.chunk) if self.live else 0)

    def pass_tokens(self, context: int) -> int:
        """Tokens of the longest pass when prompts fill a context of ``context`` tokens."""
        return pass_tokens(self.chunk, self.cache, context)

    @property
    def wave_chunk(self) -> int:
        """Tokens of a chunk of a wave; 0 if prompts are not computed in waves."""
        return self.chunk if self.cache.reserved and self.cache.unlimited else 0

    def wave(self, tokens: int, context: int, *, on_gpu: bool) -> int:
        """Bytes of a wave of so many tokens beyond :meth:`workspace`; see :func:`wave_bytes`."""
        return wave_bytes(self.sizes, self.itemsize, tokens, context, top_k=self.top_k, on_gpu=on_gpu)

    @property
    def scratch(self) -> int:
        """Scratch bytes of the native kernels in the longest pass."""
        return self.scratch_for(self.pass_tokens(self.own_context))

    def scratch_for(self, tokens: int) -> int:
        """Scratch bytes of the native kernels for so many tokens."""
        blocks = self.experts.blocks_per_expert  # the same for all bits
        return scratch_bytes(self.experts.hidden_size, blocks, self.top_k, tokens)

    @property
    def unpacked(self) -> int:
        """Bytes on a GPU for unpacking packed dense weights in products of many tokens."""
        return self.form.unpacked_bytes(self.itemsize)
