"""Activation memory of a pass, and the number of tokens per pass.

The estimate is an upper bound of the largest set of tensors alive at a time, computed from the configuration.
Measured peaks on a CPU, with q tokens in a pass over a cache of n tokens, and the estimate, in MiB:

| model | q | n | measured | estimate |
|---|---|---|---|---|
| Qwen3-MoE, hidden 2048, 32 heads over 4 of 128, float32 | 1024 | 1,088 | 144 | 203 |
| the same | 1024 | 16,448 | 749 | 851 |
| the same in bfloat16 | 1024 | 8,256 | 229 | 302 |
| DeepSeek-V2 (latent attention), hidden 2048, 16 heads, dense 10944 | 1024 | 8,256 | 1600 | 1729 |
| gpt-oss (scores materialised), hidden 1024, 64 heads over 8 of 64 | 128 | 4,160 | 590 | 657 |
| the same | 1024 | 4,160 | 3352 | 3825 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from moechat.sizes.cache_shape import PREFILL_CHUNK, CacheShape
from moechat.sizes.layer_configs import different_configs

# Memory kept by the allocator, set up by the BLAS library at its first use, alignment, and small tensors that
# are not in the formula.
_SLACK_BYTES = 32 << 20
_SLACK_FACTOR = 1.08
# Holes that freed tensors of less than 32 MiB leave in the heap where a family's own attention allocates them
# between its scores: 0 to 94 MiB from run to run, of which the slack above covers most.
_EAGER_HOLES = 32 << 20
# Fewest tokens for which the kernels gather tokens by expert.
_MANY_TOKENS = 6
# Per pair of tokens: a mask of one byte, its float copy, and temporaries for making it.
_MASK_BYTES = 8
# Most scores per token of the cache: 16 heads with PREFILL_CHUNK tokens.
_MOST_SCORES = 16 * PREFILL_CHUNK
# Accumulators and inputs of one expert that ExpertSum keeps for as many tokens as choose it, beyond its usual
# memory; experts that are chosen twice as often as others are counted.
_SUM_BYTES = 8 << 20
_POPULAR = 2


@dataclass(frozen=True)
class PassSizes:
    """Sizes in a configuration that determine the tensors of a pass.

    Attributes:
        hidden: Of the hidden states.
        heads: Of queries.
        kv_heads: Of keys and values.
        query: Dimensions of a query or key.
        value: Dimensions of a value.
        latent: Keys and values of all heads are expanded from one vector per token.
        intermediate: Of the widest dense part.
        experts: In a layer.
        vocabulary: Tokens.
        index_heads: Of an indexer, which scores all pairs of tokens; 0: none.
        index_dim: Its dimensions.
        chosen: Tokens that it chooses for each.
        streams: Of hidden states.
        compressed: Fewest tokens that an entry of the cache stands for; 1: keys are not compressed.
        window: Of the keys that are not, where others are.
        eager: The family's own attention is used, which materialises scores.
    """

    hidden: int
    heads: int
    kv_heads: int
    query: int
    value: int
    latent: bool
    intermediate: int
    experts: int
    vocabulary: int
    index_heads: int
    index_dim: int
    chosen: int
    streams: int
    compressed: int
    window: int
    eager: bool

    @classmethod
    def of(cls, config: Any) -> PassSizes:
        """The sizes in transformers' configuration of a model."""
        text = config.get_text_config()
        layers = different_configs(text)

        def number(*names: str, default: int) -> int:
            found = [getattr(layer, name, None) for layer in layers for name in names]
            return max((item for item in found if isinstance(item, int) and item > 0), default=default)

        hidden, heads = int(text.hidden_size), number("num_attention_heads", default=1)
        head = number("head_dim", default=math.ceil(hidden / heads))
        nope = number("qk_nope_head_dim", default=0)
        latent = number("kv_lora_rank", default=0) > 0 and nope > 0
        shared = number("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", default=1)
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else number("num_key_value_heads", default=heads),
            query=nope + number("qk_rope_head_dim", default=0) if latent else head,
            value=number("v_head_dim", default=head) if latent else head,
            latent=latent,
            intermediate=max(
                number("intermediate_size", "shared_expert_intermediate_size", default=hidden),
                shared * number("moe_intermediate_size", default=0),
            ),
            experts=number(
                "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=256
            ),
            vocabulary=int(text.vocab_size),
            index_heads=number("index_n_heads", default=0),
            index_dim=number("index_head_dim", default=0),
            chosen=number("index_topk", default=0),
            streams=number("hc_mult", default=1),
            compressed=min((getattr(text, "compress_rates", None) or {"none": 1}).values()),
            window=number("sliding_window", default=0),
            eager=str(getattr(text, "_attn_implementation", None)).removeprefix("moechat-") == "eager",
        )

    @property
    def score_copies(self) -> float:
        """Number of score tensors ``[heads, tokens, context]`` that attention materialises at a time."""
        if self.eager:
            return 3.1
        # torch's fused kernel needs values of the same size as keys.
        return 2.0 if self.query != self.value else 0.0

    def keys(self, tokens: int, context: int) -> int:
        """Most keys that a layer attends to in a pass of so many tokens."""
        if self.compressed == 1:
            return context
        return min(context, self.window + tokens + -(-context // self.compressed))


def prefill_chunk(sizes: PassSizes) -> int:
    """Tokens per pass of a prompt that may be computed in parts.

    Less than :data:`PREFILL_CHUNK` for models with many heads whose attention, or whose indexer, materialises
    scores. It depends only on the model, so that the rounding of a prompt's logits does not depend on a
    budget.
    """
    # Scores of an indexer are in float32, so its heads count twice.
    heads = max(sizes.heads if sizes.score_copies else 0, 2 * sizes.index_heads)
    if heads == 0:
        return PREFILL_CHUNK
    wanted = min(PREFILL_CHUNK, max(64, _MOST_SCORES // heads))
    return 1 << (wanted.bit_length() - 1)


def pass_tokens(chunk: int, shape: CacheShape, context: int) -> int:
    """Tokens of the longest pass when prompts fill a context of ``context`` tokens.

    Args:
        chunk: Tokens of a part of a prompt, where prompts are computed in parts.
        shape: Of the attention cache.
        context: Tokens of the context.
    """
    if shape.appendable >= context:
        return min(chunk, context)
    return context


def workspace_bytes(
    sizes: PassSizes, itemsize: int, tokens: int, context: int, *, on_gpu: bool = False
) -> int:
    """Upper estimate of the memory of a pass besides weights, attention cache and the kernels' scratch.

    The larger of two sets. Attention: 5 tensors like the hidden states, 4 like the queries, 6 like the
    keys; for each token of the context the keys and values repeated for every head (or, if latent, expanded
    three times), the mask, and materialised scores of attention or of an indexer. Feed-forward: 3 tensors
    like the hidden states, 4 of the widest dense part, input and output of the experts in float32, the
    router's output. Then hidden states in several streams, one row of logits, and 8 % plus 32 MiB for the
    rest, with a family's own attention on a CPU 64 MiB.

    Args:
        sizes: Of the model.
        itemsize: Bytes of an activation.
        tokens: Tokens of the pass.
        context: Tokens in the attention cache at its end.
        on_gpu: The pass runs on a GPU, whose memory has no such holes.

    Returns:
        Bytes.
    """
    context = sizes.keys(tokens, context)
    queries = sizes.heads * sizes.query
    attention = tokens * itemsize * (5 * sizes.hidden + 4 * queries + 6 * sizes.kv_heads * sizes.query)
    if sizes.latent:
        attention = tokens * itemsize * (5 * sizes.hidden + 4 * queries)
        each = sizes.heads * (2 * sizes.value + 2 * sizes.query + (sizes.query + sizes.value) // 2)
    elif sizes.kv_heads < sizes.heads:
        each = 2 * queries
    else:
        each = 0
    scores = sizes.score_copies * sizes.heads * tokens * itemsize
    pairs = tokens * _MASK_BYTES + max(scores, _indexer(sizes, tokens))
    attention += int(context * (each * itemsize + pairs))
    attention += 16 * tokens * min(sizes.chosen, context)
    feed_forward = tokens * (itemsize * (3 * sizes.hidden + 4 * sizes.intermediate) + 8 * sizes.hidden)
    feed_forward += tokens * 24 * sizes.experts
    logits = 8 * sizes.vocabulary
    largest = max(attention, feed_forward) + _stream_bytes(sizes, tokens, itemsize)
    holes = _EAGER_HOLES if sizes.eager and not on_gpu else 0
    return int(_SLACK_FACTOR * largest) + logits + _SLACK_BYTES + holes


def _indexer(sizes: PassSizes, tokens: int) -> int:
    """Bytes for each token of the context: two scores of each head and their sums in float32, and keys."""
    if not sizes.index_heads:
        return 0
    return 4 * tokens * (2 * sizes.index_heads + 4) + 8 * sizes.index_dim


def _stream_bytes(sizes: PassSizes, tokens: int, size: int) -> int:
    """Hidden states in several streams: two tensors of the model's type, three in float32."""
    return tokens * sizes.streams * sizes.hidden * (2 * size + 12) if sizes.streams > 1 else 0


def wave_bytes(
    sizes: PassSizes, itemsize: int, tokens: int, context: int, *, top_k: int, on_gpu: bool
) -> int:
    """Memory of a wave (:mod:`moechat.models.waves`) beyond that of a pass of one of its chunks.

    For each token: hidden states, output of attention, input and output of the experts (on a CPU also in
    float32), the router's output, rotary angles, the tokens that an indexer has chosen in two layers. The
    masks of two chunks, which contain those of the others. On a CPU, one popular expert's rows of inputs and
    sums. The experts' workspace on a GPU is not among it.

    Args:
        sizes: Of the model.
        itemsize: Bytes of an activation.
        tokens: Tokens of the wave.
        context: Tokens in the attention cache at its end.
        top_k: Experts of a token.
        on_gpu: The experts are computed on a GPU.

    Returns:
        Bytes.
    """
    # Streams are mixed before and after each part of a layer.
    kept = 4 if sizes.streams == 1 else sizes.streams + 5
    token = kept * itemsize * sizes.hidden + 8 * sizes.experts + 16 * top_k + 8 * sizes.query
    token += 8 * min(sizes.chosen, context)
    rows = 0
    if not on_gpu:
        token += 8 * sizes.hidden if itemsize < 4 else 0
        of_one = tokens * min(1.0, _POPULAR * top_k / sizes.experts) * 4 * sizes.hidden
        rows = 2 * max(0, int(of_one) - _SUM_BYTES)
    # Masks are numbers where scores are materialised by the family's own code.
    mask = itemsize if sizes.score_copies > 2 else 1
    masks = 2 * min(tokens, prefill_chunk(sizes)) * context * mask
    return int(_SLACK_FACTOR * (tokens * token + masks)) + rows


def counted_bytes(sizes: PassSizes, live: int) -> int:
    """Upper estimate of the memory of a pass whose tensors were counted (:mod:`moechat.models.live_bytes`).

    Args:
        sizes: Of the model.
        live: Most bytes of activations that are alive at a time.
    """
    return int(_SLACK_FACTOR * live) + 8 * sizes.vocabulary + _SLACK_BYTES


def split_sums(sizes: PassSizes, programs: int, most: int) -> int:
    """Most bytes that the attention of a token writes where its keys are divided among programs.

    Args:
        sizes: Of the model.
        programs: Number of programs, each with the query heads of one head of keys.
        most: Most float32 sums of a program.
    """
    # Latents are keys and values of one head.
    each = most if sizes.latent else min(most, -(-sizes.heads // sizes.kv_heads) * sizes.value)
    return 4 * programs * each


def one_pass_bytes(sizes: PassSizes, itemsize: int, context: int) -> int:
    """As :func:`workspace_bytes`, for a family whose prompts are computed in one pass.

    Such families keep states instead of keys; computing those is estimated as three times attention.
    """
    widest = max(5 * sizes.hidden + 10 * sizes.heads * max(sizes.query, 128), 4 * sizes.intermediate)
    scores = sizes.score_copies * sizes.heads * context * itemsize
    return int(3 * context * itemsize * widest + context * scores) + 8 * sizes.vocabulary + _SLACK_BYTES


def scratch_bytes(hidden_size: int, blocks: int, top_k: int, tokens: int) -> int:
    """Most scratch memory of the native kernels and expert sums: prepared inputs, activations, accumulators,
    indices; for many tokens also inputs and activations gathered by expert
    (native/src/kernels/experts/forward.cc).

    Args:
        hidden_size: Columns of the experts.
        blocks: Blocks per expert.
        top_k: Experts per token.
        tokens: Tokens of the longest pass.

    Returns:
        Bytes.
    """
    rows = tokens * max(1, top_k)
    inputs = min(14 << 20, tokens * (hidden_size + 128) * 4)
    activations = min(14 << 20, rows * blocks * 400)
    accumulators = min(8 << 20, rows * (hidden_size + 64) * 4)
    gathered = 0
    if tokens >= _MANY_TOKENS:
        at_once = min(tokens, (14 << 20) // (4 * hidden_size))
        gathered = at_once * max(1, top_k) * (hidden_size * 17 // 8 + 128) + min(7 << 20, rows * blocks * 192)
    return inputs + activations + accumulators + gathered + 64 * rows
