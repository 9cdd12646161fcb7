"""What a pass of a model takes besides weights and attention cache, and how many tokens a pass may have.

The estimate is an upper one of the largest set of tensors alive at a time, computed from the configuration.
Measured peaks on a CPU, with q tokens in a pass over a cache of n tokens, and the estimate, in MiB:

| model | q | n | measured | estimate |
|---|---|---|---|---|
| Qwen3-MoE, hidden 2048, 32 heads over 4 of 128, float32 | 1024 | 1,088 | 144 | 203 |
| the same | 1024 | 16,448 | 749 | 851 |
| the same in bfloat16 | 1024 | 8,256 | 229 | 302 |
| DeepSeek-V2 (latent attention), hidden 2048, 16 heads, dense 10944 | 1024 | 8,256 | 1600 | 1729 |
| gpt-oss (scores materialised), hidden 1024, 64 heads over 8 of 64 | 128 | 4,160 | 590 | 625 |
| the same | 1024 | 4,160 | 3352 | 3793 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from moechat.models.attention_cache import PREFILL_CHUNK, CacheShape

# Kept by the allocator, what the library of the dense products sets up at its first use, alignment, and
# small tensors that are not in the formula.
_SLACK_BYTES = 32 << 20
_SLACK_FACTOR = 1.08
# From how many on the kernels gather tokens by expert, at the earliest.
_MANY_TOKENS = 6
# A mask of one byte a pair, its copy in numbers, and what it is made of.
_MASK_BYTES = 8
# Most scores a token of the cache: 16 heads with PREFILL_CHUNK tokens.
_MOST_SCORES = 16 * PREFILL_CHUNK


@dataclass(frozen=True)
class _Sizes:
    """Figures of a configuration that tensors of a pass are made of."""

    hidden: int
    heads: int
    kv_heads: int
    query: int  # dimensions of a query or key
    value: int
    latent: bool  # keys and values of all heads are expanded from one vector a token
    intermediate: int
    experts: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> _Sizes:
        text = config.get_text_config()

        def number(*names: str, default: int) -> int:
            found = [getattr(text, name, None) for name in names]
            return max((item for item in found if isinstance(item, int) and item > 0), default=default)

        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
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
        )


def score_copies(config: Any) -> float:
    """How many matrices of scores, a number a head for each pair of tokens, attention holds at a time."""
    sizes = _Sizes.of(config)
    named = getattr(config.get_text_config(), "_attn_implementation", None)
    if str(named).removeprefix("moechat-") == "eager":
        return 3.1
    # The fused kernel wants values as long as keys.
    return 2.0 if sizes.query != sizes.value else 0.0


def prefill_chunk(config: Any) -> int:
    """Tokens of a prompt that are computed in one pass, where a prompt may come in parts.

    Fewer than :data:`PREFILL_CHUNK` for models of many heads whose attention holds its scores. It depends
    on the model alone, so that no budget changes how a prompt's logits round.
    """
    if score_copies(config) == 0:
        return PREFILL_CHUNK
    wanted = min(PREFILL_CHUNK, max(64, _MOST_SCORES // _Sizes.of(config).heads))
    return 1 << (wanted.bit_length() - 1)


def pass_tokens(config: Any, shape: CacheShape, context: int) -> int:
    """Tokens of the longest pass when prompts fill a context of ``context`` tokens."""
    chunk = prefill_chunk(config)
    if shape.appendable >= context:
        return min(chunk, context)
    return context


def workspace_bytes(config: Any, dtype: torch.dtype, tokens: int, context: int) -> int:
    """Upper estimate of what a pass takes besides weights, attention cache and the kernels' scratch.

    The larger of two sets. Attention: 5 tensors like the hidden states, 4 like the queries, 6 like the
    keys; for each token of the context the keys and values repeated for every head (or expanded, three
    times, where they are latent), the mask, and the scores where they are materialised. Feed-forward: 3
    tensors like the hidden states, 4 of the widest dense part, input and output of the experts in float32,
    the router's numbers. Then one row of logits, and 8 % and 32 MiB for what is not listed.

    Args:
        config: Of the model.
        dtype: Of the activations.
        tokens: In the pass.
        context: In the attention cache when it ends.

    Returns:
        Bytes.
    """
    sizes = _Sizes.of(config)
    size = dtype.itemsize
    queries = sizes.heads * sizes.query
    attention = tokens * size * (5 * sizes.hidden + 4 * queries + 6 * sizes.kv_heads * sizes.query)
    if sizes.latent:
        attention = tokens * size * (5 * sizes.hidden + 4 * queries)
        each = sizes.heads * (2 * sizes.value + 2 * sizes.query + (sizes.query + sizes.value) // 2)
    elif sizes.kv_heads < sizes.heads:
        each = 2 * queries
    else:
        each = 0
    scores = score_copies(config) * sizes.heads * tokens * size
    attention += int(context * (each * size + tokens * _MASK_BYTES + scores))
    feed_forward = tokens * (size * (3 * sizes.hidden + 4 * sizes.intermediate) + 8 * sizes.hidden)
    feed_forward += tokens * 24 * sizes.experts
    logits = 8 * sizes.vocabulary
    return int(_SLACK_FACTOR * max(attention, feed_forward)) + logits + _SLACK_BYTES


def one_pass_bytes(config: Any, dtype: torch.dtype, context: int) -> int:
    """As :func:`workspace_bytes`, for a family whose prompts go in one pass.

    Such families keep states instead of keys; what they compute them from is taken as three times what
    attention would.
    """
    sizes = _Sizes.of(config)
    size = dtype.itemsize
    widest = max(5 * sizes.hidden + 10 * sizes.heads * max(sizes.query, 128), 4 * sizes.intermediate)
    scores = score_copies(config) * sizes.heads * context * size
    return int(3 * context * size * widest + context * scores) + 8 * sizes.vocabulary + _SLACK_BYTES


def scratch_bytes(hidden_size: int, blocks: int, top_k: int, tokens: int) -> int:
    """Most that the native kernels and the expert sums keep: prepared inputs, activations, accumulators,
    indices; of many tokens also both gathered by expert (native/src/kernels/forward.cc).

    Args:
        hidden_size: Columns of the experts.
        blocks: Of an expert.
        top_k: Experts of a token.
        tokens: Of the longest pass.

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
