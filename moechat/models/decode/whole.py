"""Computes the pass of one token through a whole model: embedding, native layer steps, norm and head.

Between the layers of a pass transformers prepares arguments, masks and outputs, which for one token takes
longer than some of the parts. A model is recognised like a layer (:mod:`moechat.models.decode.layers`):
its code must use only the names listed here, and both ways must give the same bits for random tokens.

The code around the decoder of a model that also takes pictures or sound is not looked at: without these it
adds nothing, as the trial shows, unless an id stands for one; such ids are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moechat.models.cache_argument import CACHE
from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.decode.ends import ModelEnds
from moechat.models.decode.layer_check import stub_experts
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.native_pass import NativePass
from moechat.models.decode.native_step import NativeStep, layer_angles
from moechat.models.decode.probe import probing
from moechat.models.decode.together import TogetherPass
from moechat.models.decode.wiring import MODEL_WRAPPERS, only_calls_layers, uses_only
from moechat.models.skeleton import base_of
from moechat.models.state_layer import StateLayer

# Names in the forward of a causal language model: its parts, the loss, and the fields of its output.
_MODEL_NAMES = frozenset(
    {
        *("model", "lm_head", "slice_logits_to_keep", "MoeCausalLMOutputWithPast", "config", "vocab_size"),
        *("loss_function", "load_balancing_loss_func", "output_router_logits", "router_aux_loss_coef"),
        *("num_experts", "num_experts_per_tok", "to", "device"),
        *("last_hidden_state", CACHE, "hidden_states", "attentions", "router_logits"),
        # Of Gemma 4.
        *("Gemma4CausalLMOutputWithPast", "shared_kv_states", "shape"),
        *("final_logit_softcapping", "torch", "tanh"),
        "float",  # of Nemotron-H
        *("logits_scaling", "outputs", "aux_loss"),  # of Granite
        # Until transformers 5.22.
        *("slice", "isinstance", "int", "CausalLMOutputWithPast"),
    }
)
_ARGUMENTS = frozenset({CACHE, "use_cache", "logits_to_keep"})
_PROBE_TOKENS = 3

Forward = Callable[..., Any]


def recognise_model(model: Any) -> tuple[Forward, TogetherPass] | None:
    """A ``forward`` for a model whose layers all have native steps, and passes for several caches.

    The first computes passes of one token behind a cache, and leaves all others to the model's own.

    Args:
        model: A causal language model of transformers, on the CPU.

    Returns:
        ``None`` if the model is not recognised.
    """
    if "forward" in vars(model) or model.training:
        return None
    if set(dict(model.named_children())) != {"model", "lm_head"}:
        return None
    base = base_of(model)
    if base is model.model:
        if not uses_only(model, _MODEL_NAMES, wrappers=MODEL_WRAPPERS):
            return None
    elif list(model.model.children()) != [base] or "forward" in vars(model.model):
        return None
    if not only_calls_layers(base):
        return None
    config = model.config.get_text_config()
    layers = list(base.layers)
    pairs: list[tuple[Any, NativeStep]] = []
    for layer in layers:
        step = getattr(vars(layer).get("forward"), "__dict__", {}).get("kept")
        if not isinstance(step, NativeStep) or step.index != len(pairs):
            return None
        pairs.append((layer, step))
    slots = _slots(config, [step for _, step in pairs])
    if not pairs or len(pairs) != config.num_hidden_layers or len(slots) != len(pairs):
        return None
    if getattr(config, "output_router_logits", False):
        return None
    kinds = list(map(layer_kind, layers))
    first = max(map(kinds.index, kinds)) + 1  # each kind is among so many
    if not _agrees(model, pairs[:first], slots[:first]):
        return None
    native = NativePass([step for _, step in pairs])
    together = TogetherPass(
        model,
        pairs,
        native,
        _supports(model, pairs, slots),
        lambda tokens: _trial_cache(config, slots, tokens),
    )
    forward = _with(model.forward, _decode(model, pairs, native, slots))
    forward.__dict__["native_pass"] = native
    return forward, together


def _with(own: Forward, decode: Forward) -> Forward:
    @wraps(own)
    def forward(input_ids: Any = None, *rest: Any, **named: Any) -> Any:
        out = None if rest else decode(input_ids, named)
        return own(input_ids, *rest, **named) if out is None else out

    return forward


def _slots(config: Any, steps: list[NativeStep]) -> list[tuple[type, ...]]:
    """Types of a cache's layers with which the only new token attends to all keys, so that no mask is needed.

    The cache of a layer with a sliding window must drop the keys that have left it.
    """
    windowed = bool(getattr(config, "sliding_window", None))
    each = "sliding_attention" if windowed else "full_attention"
    kinds = getattr(config, "layer_types", None) or [each] * len(steps)
    return [
        tuple(slot for slot in step.slots if slot is not ReservedLayer or kind == "full_attention")
        for kind, step in zip(kinds, steps, strict=False)
    ]


def _supports(
    model: Any, pairs: list[tuple[Any, NativeStep]], slots: list[tuple[type, ...]]
) -> Callable[[Any], bool]:
    """Whether native steps take a token for an attention cache, and no module has a hook, now."""
    modules = (model, model.model, base_of(model), *ModelEnds(model, [step for _, step in pairs]).modules)
    hooks = tuple(
        found
        for module in (*modules, *(layer for layer, _ in pairs))
        for found in (module._forward_pre_hooks, module._forward_hooks)
    ) + tuple(found for _, step in pairs for found in step.hooks())

    def supports(cache: Any) -> bool:
        return (
            type(cache) is DynamicCache
            and len(cache.layers) == len(pairs)
            and all(type(slot) in allowed for slot, allowed in zip(cache.layers, slots, strict=True))
            and not any(hooks)
        )

    return supports


def _trial_cache(config: Any, slots: list[tuple[type, ...]], tokens: int) -> DynamicCache:
    """A cache for so many tokens, with layers of the types that native steps take."""

    def layer(allowed: tuple[type, ...]) -> Any:
        if StateLayer in allowed:
            return StateLayer()
        if set(allowed) & set(EMPTY):
            return EMPTY[0]()
        return ReservedLayer(tokens) if ReservedLayer in allowed else WindowLayer(window, tokens)

    window: Any = getattr(config, "sliding_window", None)
    cache = DynamicCache()
    cache.layers = list(map(layer, slots))
    return cache


def _decode(
    model: Any, pairs: list[tuple[Any, NativeStep]], native: NativePass, slots: list[tuple[type, ...]]
) -> Forward:
    """A function of token ids and named arguments; its result is ``None``, without any change, if it does not
    support the pass.
    """
    ends = ModelEnds(model, [step for _, step in pairs])
    takes_cache = _supports(model, pairs, slots)

    def supports(input_ids: Any, cache: Any, named: dict[str, Any]) -> bool:
        return (
            isinstance(input_ids, torch.Tensor)
            and input_ids.shape == (1, 1)
            and input_ids.is_cpu
            and _ARGUMENTS.issuperset(named)
            and named.get("use_cache") is True
            and type(named.get("logits_to_keep", 0)) is int
            and takes_cache(cache)
        )

    def decode(input_ids: Any, named: dict[str, Any]) -> Any:
        cache: Any = named.get(CACHE)
        if not supports(input_ids, cache, named):
            return None
        if ends.media_ids and int(input_ids) in ends.media_ids:
            return None
        hidden = ends.embed(input_ids)
        each = ends.angles(hidden, cache.get_seq_length())
        if not ends.takes(hidden, each):
            return None
        whole = native(hidden, [(slot,) for slot in cache.layers], each)
        if whole is not None:
            return MoeCausalLMOutputWithPast(logits=ends.logits(whole), **{CACHE: cache})
        for (layer, step), slot, angles in zip(pairs, cache.layers, each, strict=True):
            out = step.decode(hidden, (slot,), *angles)
            if out is None:
                out = layer(
                    hidden, position_embeddings=layer_angles(*angles), use_cache=True, **{CACHE: cache}
                )
            hidden = out
        return MoeCausalLMOutputWithPast(logits=ends.logits(hidden), **{CACHE: cache})

    return decode


def _agrees(model: Any, pairs: list[tuple[Any, NativeStep]], slots: list[tuple[type, ...]]) -> bool:
    """Whether both ways give the same logits, bit by bit, with the first layers and stub experts."""
    decode = _decode(model, pairs, NativePass([step for _, step in pairs]), slots)
    ends = ModelEnds(model, [step for _, step in pairs])
    results: list[list[torch.Tensor]] = [[], []]
    with stub_experts(model), _layers(base_of(model), [layer for layer, _ in pairs]), probing() as generator:
        config = model.config.get_text_config()
        caches = [_trial_cache(config, slots, _PROBE_TOKENS) for _ in range(2)]
        for ids in ends.draw(generator, _PROBE_TOKENS, 1, 1):
            try:
                theirs = model.forward(ids, use_cache=True, **{CACHE: caches[0]})
                ours = decode(ids, {CACHE: caches[1], "use_cache": True})
            except Exception:  # the family's code needs more than the probe has
                return False
            if ours is None:
                return False
            for result, out in zip(results, (theirs, ours), strict=True):
                result.append(out.logits)
    return torch.equal(*map(torch.cat, results))


@contextmanager
def _layers(base: Any, layers: list[Any]) -> Iterator[None]:
    """Leave a model these layers only, in this context."""
    before = base.layers
    base.layers = nn.ModuleList(layers)
    try:
        yield
    finally:
        base.layers = before
