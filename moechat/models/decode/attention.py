"""Native attention directly on the attention cache, without copies of its heads or masks.

Few tokens and prompts have native code of their own.

The function is registered with transformers under two names: one replaces torch's
``scaled_dot_product_attention``, one the eager functions of families that cannot use that. Passes that the
native code does not support use the replaced function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    eager_mask,
    sdpa_mask,
)

from moechat import _native
from moechat.models.cache_argument import CACHE
from moechat.models.decode.latent import LATENT, Latent
from moechat.models.decode.probe import FEW_TOKENS, close, probing
from moechat.models.element_types import ELEMENTS

# transformers' name of an attention function -> name of its native replacement.
NAMES = {"sdpa": "moechat-sdpa", "eager": "moechat-eager"}

# Arguments without effect beyond keys, mask and module.
_IGNORED = frozenset(
    {
        "sliding_window",
        "position_ids",
        "cache_position",
        "use_cache",
        CACHE,
        "position_embeddings",
        "logits_to_keep",
        "dropout",
        "is_causal",
    }
)
_SINKS = "s_aux"
_PROBE_KEYS, _PROBE_TOKENS = 150, 3
_PLAN = "_moechat_attention"
_CLEAR = "_moechat_clear"
_VISIBLE = "_moechat_visible"

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class _Plan(NamedTuple):
    """The native attention of one module, for one shape of heads.

    Attributes:
        run: The native code; ``None`` if the module's own function has other results.
        sinks: float32 sinks that ``run`` reads.
        original_sinks: The tensor they were made from, kept so that no other tensor can get its id.
    """

    run: _native.Attention | None
    sinks: torch.Tensor | None = None
    original_sinks: torch.Tensor | None = None


def register() -> None:
    """Register both names with transformers; idempotent."""
    AttentionInterface.register(NAMES["sdpa"], _replacement(lambda _: sdpa_attention_forward))
    AttentionInterface.register(NAMES["eager"], _replacement(_eager))
    AttentionMaskInterface.register(NAMES["sdpa"], _masks(sdpa_mask, _no_mask))
    AttentionMaskInterface.register(NAMES["eager"], _masks(eager_mask, _clear_mask))


def registered(name: str | None) -> str | None:
    """Name of the native replacement for an attention function; ``None`` if there is none."""
    return NAMES.get(name or "") if name in ALL_MASK_ATTENTION_FUNCTIONS else None


def hides_nothing(mask: torch.Tensor | None) -> bool:
    """Whether there is no mask, or one that was made for a token that attends to all keys."""
    return mask is None or _CLEAR in getattr(mask, "__dict__", ())


def _no_mask(**_: Any) -> None:
    return None


def _clear_mask(
    *, batch_size: int, kv_length: int, dtype: torch.dtype = torch.float32, device: Any = "cpu", **_: Any
) -> torch.Tensor:
    """A mask that hides nothing, ``[batch, 1, 1, keys]``, and is known to.

    Families may extend it by keys that they make themselves, as DeepSeek-V4 does, and without one they would
    attend to all of those. What they make of it is another tensor, which :func:`hides_nothing` does not know.
    REQUIRES: none changes it in place.
    """
    mask = torch.zeros((batch_size, 1, 1, kv_length), dtype=dtype, device=device)
    mask.__dict__[_CLEAR] = True
    return mask


def _masks(
    own: Callable[..., torch.Tensor | None], clear: Callable[..., torch.Tensor | None]
) -> Callable[..., torch.Tensor | None]:
    """The family's masks, but those of ``clear`` if the only token of a pass attends to all keys."""

    def mask(**arguments: Any) -> torch.Tensor | None:
        if (
            arguments["q_length"] == 1
            and arguments.get("allow_is_causal_skip", True)
            and arguments.get("attention_mask") is None
            and _attends_to_all(**arguments)
        ):
            return clear(**arguments)
        return own(**arguments)

    return mask


def _attends_to_all(
    *,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> bool:
    """Whether the single new token attends to every key."""
    if type(q_offset) is not int or type(kv_offset) is not int or kv_offset + kv_length != q_offset + 1:
        return False
    if local_size is None:
        return True
    # Chunked attention has a local size too, but it is not a window.
    chunked = config is None or getattr(config, "attention_chunk_size", None) is not None
    return not chunked and q_offset - kv_offset < local_size


def _eager(module: nn.Module) -> Attend:
    """The attention function of the module's family."""
    found: Attend = sys.modules[type(module).__module__].eager_attention_forward
    return found


def _replacement(own_of: Callable[[nn.Module], Attend]) -> Attend:
    """Native attention, with a fallback to the function that ``own_of`` gives for a module."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = own_of(module)
        mask = None if hides_nothing(attention_mask) else attention_mask
        latent = module.__dict__.get(LATENT)
        if latent is not None:
            out = _attend_latents(latent, query, key, value, mask, named)
            if out is not None:
                return out, None
            key, value = latent.expand(key, value)
        out = _attend(module, query, key, value, mask, named, own)
        return (out, None) if out is not None else own(module, query, key, value, attention_mask, **named)

    return attention


def _attend_latents(
    latent: Latent,
    query: torch.Tensor,
    kept: torch.Tensor,
    rotated: torch.Tensor,
    mask: torch.Tensor | None,
    named: dict[str, Any],
) -> torch.Tensor | None:
    """As :func:`_attend`, for latents instead of keys and values."""
    if mask is not None or query.shape[2] != 1 or named.get(_SINKS) is not None or not _supported(named):
        return None
    scaling = named.get("scaling")
    return latent.attend(query, kept, rotated, query.shape[-1] ** -0.5 if scaling is None else float(scaling))


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    named: dict[str, Any],
    own: Attend,
) -> torch.Tensor | None:
    """Native attention ``[1, tokens, heads, value_dim]``; ``None`` if the native code does not support it."""
    batch, heads, tokens, key_dim = query.shape
    dtype = query.dtype
    _, kv_heads, context, value_dim = value.shape
    few = tokens <= FEW_TOKENS
    if batch != 1 or (not few and own is sdpa_attention_forward and _torch_uses_amx(dtype)):
        return None
    if mask is None and tokens > 1 and (few or not _is_causal(module, named, own) or tokens != context):
        return None
    if dtype not in ELEMENTS or key.dtype is not dtype or value.dtype is not dtype or not query.is_cpu:
        return None
    _, query_head, query_token, query_step = query.stride()
    _, key_head, key_token, key_step = key.stride()
    _, value_head, value_token, value_step = value.stride()
    if query_step != 1 or key_step != 1 or value_step != 1 or key.shape != (1, kv_heads, context, key_dim):
        return None
    seen, seen_token, visible = 0, 0, None
    if mask is not None:
        visible = _visible(mask) if mask.shape == (1, 1, tokens, context) else None
        if visible is None or visible.stride(-1) != 1:
            return None
        seen, seen_token = visible.data_ptr(), visible.stride(2)
    added = mask is not None and visible is not mask
    sinks = named.get(_SINKS)
    scaling = named.get("scaling")
    shape = (dtype, heads, kv_heads, key_dim, value_dim, scaling, id(sinks), added)
    plans: dict[Any, _Plan] = module.__dict__.setdefault(_PLAN, {})
    plan = plans.get(shape)
    if plan is None:
        plan = plans[shape] = _make_plan(module, query, key, value, named, own, added=added)
    if plan.run is None or not _supported(named):
        return None
    out = torch.empty((1, tokens, heads, value_dim), dtype=dtype)
    done = plan.run(
        query.data_ptr(),
        query_head,
        query_token,
        tokens,
        key.data_ptr(),
        key_head,
        key_token,
        0,
        0,
        value.data_ptr(),
        value_head,
        value_token,
        context,
        seen,
        seen_token,
        out.data_ptr(),
        not few,
    )
    return out if done else None


def _visible(mask: torch.Tensor) -> torch.Tensor | None:
    """The keys that tokens see, by a mask of booleans, or of numbers that are added to scores; ``None`` if it
    says more than that, or hides all keys of a token.

    What numbers say is kept with them: layers share a mask. REQUIRES: none changes it in place.
    """
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    kept = mask.__dict__
    if _VISIBLE not in kept:
        seen = mask == 0
        plain = bool((seen | (mask <= torch.finfo(mask.dtype).min)).all() and seen.any(-1).all())
        kept[_VISIBLE] = seen if plain else None
    found: torch.Tensor | None = kept[_VISIBLE]
    return found


@functools.cache
def _torch_uses_amx(dtype: torch.dtype) -> bool:
    """Whether torch multiplies queries and keys with AMX. Its fused attention of prompts was not compared
    with ours. Families' own functions keep all scores: on a Zen 5, for gpt-oss and 1,024 tokens, that takes
    three times as long as all of our attention, products not counted.
    """
    return dtype is torch.bfloat16 and bool(_native.cpu_features().get("amx_bf16"))


def _is_causal(module: nn.Module, named: dict[str, Any], own: Attend) -> bool:
    """Whether ``own`` masks later keys by itself where it gets no mask; see transformers."""
    given = named.get("is_causal")
    return own is sdpa_attention_forward and bool(
        getattr(module, "is_causal", True) if given is None else given
    )


def _supported(named: dict[str, Any]) -> bool:
    return all(name in ("scaling", _SINKS) or without_effect(name, value) for name, value in named.items())


def without_effect(name: str, value: Any) -> bool:
    """Whether an argument of an attention function says nothing beyond keys, mask and module."""
    return value is None or value is False or (name in _IGNORED and not (name == "dropout" and value))


def _make_plan(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    named: dict[str, Any],
    own: Attend,
    *,
    added: bool,
) -> _Plan:
    """The native attention of ``module``, if its results for random queries equal the family's.

    Args:
        module: The module.
        query: Shows sizes and type, as the next two.
        key: Likewise.
        value: Likewise.
        named: Further arguments of the family's function.
        own: The family's function.
        added: It gets masks that are added to scores: it is tried with one.
    """
    _, heads, _, key_dim = query.shape
    _, kv_heads, _, value_dim = value.shape
    if heads % kv_heads:
        return _Plan(None)
    scaling = named.get("scaling")
    sinks = named.get(_SINKS)
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
        if sinks.shape != (heads,):
            return _Plan(None)
    run = _native.Attention(
        ELEMENTS[query.dtype],
        kv_heads,
        heads // kv_heads,
        key_dim,
        0,
        value_dim,
        key_dim**-0.5 if scaling is None else float(scaling),
        0 if sinks is None else sinks.data_ptr(),
    )
    with probing() as generator:

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(query.dtype)

        # Scaled so that scores differ by a few units, as in real models.
        tokens = _PROBE_TOKENS if added else 1
        size = (2.0 / (abs(float(scaling)) if scaling else 1.0) / key_dim) ** 0.5
        probe = normal(1, heads, tokens, key_dim) * size
        keys, values = normal(1, kv_heads, _PROBE_KEYS, key_dim), normal(1, kv_heads, _PROBE_KEYS, value_dim)
        out = torch.empty((1, tokens, heads, value_dim), dtype=query.dtype)
        mask, seen = None, torch.ones(tokens, _PROBE_KEYS, dtype=torch.bool)
        if added:
            seen = seen.tril(_PROBE_KEYS - tokens).triu(3)
            mask = torch.zeros(seen.shape, dtype=query.dtype)[None, None]
            mask.masked_fill_(~seen, torch.finfo(query.dtype).min)
        run(
            probe.data_ptr(), tokens * key_dim, key_dim, tokens,
            keys.data_ptr(), _PROBE_KEYS * key_dim, key_dim, 0, 0,
            values.data_ptr(), _PROBE_KEYS * value_dim, value_dim, _PROBE_KEYS,
            seen.data_ptr() if added else 0, _PROBE_KEYS, out.data_ptr(),
        )  # fmt: skip
        try:
            wanted = own(module, probe, keys, values, mask, **named)[0]
        except Exception:  # the family needs more than the probe has
            return _Plan(None)
    return _Plan(run if close(out, wanted) else None, sinks, named.get(_SINKS))
