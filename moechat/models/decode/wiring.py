"""How the parts of a decoder layer are connected, recognised by the names that its code uses.

The code of a layer and of its attention must use only the names listed here, so that no unknown clipping,
scaling or addition is missed. What computes a layer in another way still has to be compared with it on random
tokens: see :mod:`moechat.models.decode.layer_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from moechat.models.cache_argument import CACHE, STATES
from moechat.models.decode.probe import hooks_of
from moechat.models.experts_interface import is_experts_module

_INPUTS = ("q_proj", "k_proj", "v_proj")
# Names of the last projection, and of the norms of queries and keys.
_OUTPUTS = ("o_proj", "out_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
# What mixes the tokens of a layer: attention, linear attention or a short convolution.
ATTENTION, LINEAR_ATTENTION, SHORT_CONV, MAMBA = "self_attn", "linear_attn", "conv", "mamba"
# Names of a layer's norms and its feed-forward part.
_BESIDE = (
    ("input_layernorm", "post_attention_layernorm", "mlp"),
    ("operator_norm", "ffn_norm", "feed_forward"),
)
# Names in the code of layers that have one of several mixers, or whose ``mlp`` may return a tuple.
_CHOOSES = frozenset(
    {
        *(ATTENTION, LINEAR_ATTENTION, SHORT_CONV, "is_attention_layer"),
        *("layer_type", "block_type", "isinstance", "tuple"),
        "get",  # of a dictionary of masks, until transformers 5.22
    }
)
ATTENTION_NAMES = frozenset(
    {
        # modules and sizes
        *(*_INPUTS, *_OUTPUTS, *(name for pair in _HEAD_NORMS for name in pair)),
        *("head_dim", "layer_idx", "config"),
        # arguments of the attention function, and numbers of a module that the trial covers
        *("training", "attention_dropout", "scaling", "sliding_window", "sinks", "getattr", "use_qk_norm"),
        *("_attn_implementation", "ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward"),
        # tensors
        *("shape", "view", "transpose", "reshape", "contiguous", "update", "apply_rotary_pos_emb"),
    }
)
# Parts of latent attention, in their order: queries are projected at once, or twice with a norm between.
_LATENT_REST = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
LATENT_PARTS = {
    "whole": ("q_proj", *_LATENT_REST),
    "shortened": ("q_a_proj", "q_a_layernorm", "q_b_proj", *_LATENT_REST),
}
_LATENT_NAMES = frozenset(
    {
        *LATENT_PARTS["whole"],
        *LATENT_PARTS["shortened"],
        *("expand_kv", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("rope_interleave", "apply_rotary_pos_emb_interleave", "torch", "split", "cat"),
    }
)
# And of attention whose results are multiplied by gates, which are projected with the queries, or by a
# projection of their own, for each head or for each element.
_GATES = frozenset({"torch", "chunk", "sigmoid"})
OWN_GATE = "g_proj"
_OWN_GATES = frozenset(
    {OWN_GATE, "gate_per_head", "F", "softplus", "torch", "sigmoid", "float", "dtype", "to", "unsqueeze"}
)
# Options without effect if not set, and the names that their code uses.
_OPTIONAL = {"clip_qkv": frozenset({"clip_qkv", "clamp_"})}
_EXPERTS_NAMES = frozenset(
    {
        *("gate", "router", "experts", "shape", "view", "reshape", "size", "input_size"),
        # What a router gets from its block; see :func:`moechat.models.decode.routers.given_corrections`.
        *("expert_bias", "use_expert_bias", "e_score_correction_bias"),
    }
)
_JITTER = frozenset({"jitter_noise", "input_jitter_noise", "torch", "empty_like", "uniform_", "training"})
# Modules of the wrappers around the forward of every decoder layer, which only training uses.
_WRAPPERS = frozenset({"transformers.modeling_layers"})
# Of those that rename arguments, around any forward.
_RENAMING = frozenset({"transformers.utils.deprecation"})
# Modules of transformers' wrappers around the forward of models.
MODEL_WRAPPERS = frozenset({"transformers.utils.generic", "transformers.utils.output_capturing"})
# Names of a model's embedding, of what makes its rotary angles, if there are any, and of its last norm.
_BASE_PARTS = (
    ("embed_tokens", "rotary_emb", "norm"),
    ("embed_tokens", "pos_emb", "embedding_norm"),
    ("embed_tokens", "", "norm"),
    ("embeddings", "", "norm_f"),
)
# Names in the forward of a model below its head.
_BASE_NAMES = frozenset(
    {
        *(name for names in _BASE_PARTS for name in names),
        *("layers", "config", "num_hidden_layers", "layer_types", "block_type", "layers_block_type"),
        *("DynamicCache", "get_seq_length", "MoeModelOutputWithPast", "ValueError"),
        *("create_causal_mask", "create_sliding_window_causal_mask", "sliding_window"),
        "create_recurrent_attention_mask",
        *("torch", "arange", "shape", "device", "unsqueeze", "dict", "enumerate", "isinstance", "set"),
        # Of models that also take pictures, and what they add to hidden states for these.
        *("jit", "is_tracing", "len", "range", "_deepstack_process"),
        *("view", "expand", "ndim"),
        "embedding_multiplier",  # of Granite
        # Until transformers 5.22, of some families.
        *("BaseModelOutputWithPast", "Qwen3_5MoeModelOutputWithPast", "UserDict", "has_sliding_layers"),
        # Of Gemma 4: angles of each type of layer, and options that its layers' steps exclude.
        *("unique_layer_types", "Gemma4TextModelOutputWithPast", "pop", "get"),
        *("hidden_size_per_layer_input", "get_per_layer_inputs", "project_per_layer_inputs"),
        *("KVSharingDict", "first_kv_shared_layer_idx", "_maybe_slice_kv_shared_inputs"),
    }
)
# Arguments of a layer that its parts use, or that have no effect for one token that attends to all keys.
_KNOWN_ARGUMENTS = frozenset(
    {
        "attention_mask",
        *(CACHE, STATES),
        "position_embeddings",
        "position_ids",
        "use_cache",
        "cache_position",
        "shared_kv_states",  # of layers that share keys and values, which have no native step
    }
)


@dataclass(frozen=True)
class Wiring:
    """A decoder layer: ``a = x + attention(before(x))``, then ``a + mlp(after(a))``.

    In Gemma 4's layers, which have more parts, ``mlp`` is the dense feed-forward part.

    Attributes:
        before: Norm of its inputs.
        attention: Its attention module, or linear attention.
        after: Norm before its feed-forward part.
        mlp: Its feed-forward part.
        router: Router, if ``mlp`` has only a router and its experts; else ``None``.
        experts: Experts, if ``router`` is set.
        gated: The results of attention are multiplied by gates, which are projected with the queries.
        gate: The projection of gates of their own, or ``None``.
    """

    before: nn.Module
    attention: Any
    after: nn.Module
    mlp: nn.Module
    router: nn.Module | None
    experts: nn.Module | None
    gated: bool
    gate: nn.Module | None = None

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if the layer is computed in another way."""
        modules = [self.before, self.after, *self.attention.modules()]
        if self.router is not None and self.experts is not None:
            modules += [self.mlp, self.router, self.experts]
        return hooks_of(modules)

    @property
    def projections(self) -> tuple[str, str, str, str]:
        """Names of the attention's projections: to queries, keys and values, and the last one."""
        return (*_INPUTS, next((name for name in _OUTPUTS if hasattr(self.attention, name)), _OUTPUTS[0]))

    @property
    def softplus(self) -> bool:
        """Whether softplus activates the results of :attr:`gate`, in place of a sigmoid."""
        return "softplus" in names_of(self.attention)

    @property
    def head_norms(self) -> tuple[str, str]:
        """Names of the norms of queries and keys, which the attention may have."""
        held = (names for names in _HEAD_NORMS if any(hasattr(self.attention, name) for name in names))
        return next(held, _HEAD_NORMS[0])

    def plain_attention(self) -> bool:
        """Whether the attention has no parts but projections, norms of heads, a gate and sinks."""
        children, known = set(dict(self.attention.named_children())), {*self.projections, *self.head_norms}
        if self.gate is not None:
            known.add(OWN_GATE)
        return children <= known and not set(self.attention._parameters) - {"sinks"}


def recognise_wiring(
    layer: Any, is_router: Callable[[nn.Module | None], bool], mixer: str = ATTENTION
) -> Wiring | None:
    """The parts of a decoder layer; ``None`` if its code does anything else with them.

    Args:
        layer: Any module.
        is_router: Whether a module is a router that is known.
        mixer: :data:`ATTENTION`, or another one, whose own code is not looked at.
    """
    parts = dict(layer.named_children())
    beside = next((names for names in _BESIDE if parts.keys() == {*names, mixer}), None)
    if beside is None or "forward" in vars(layer) or layer.training:
        return None
    if not uses_only(layer, _CHOOSES.union(beside)):
        return None
    attention, (before, after, mlp) = parts[mixer], (parts[name] for name in beside)
    names, gated = ATTENTION_NAMES, False
    for option, more in _OPTIONAL.items():
        if getattr(getattr(attention, "config", None), option, None) is None:
            names |= more
    gate = attention._modules.get(OWN_GATE) if mixer == ATTENTION else None
    if gate is not None:
        if not uses_only(attention, names | _OWN_GATES):
            return None
    elif mixer == ATTENTION and not uses_only(attention, names):
        gated = uses_only(attention, names | _GATES)
        if not gated and not uses_only(attention, names | _LATENT_NAMES):
            return None
    router, experts = router_and_experts(mlp, is_router)
    return Wiring(before, attention, after, mlp, router, experts, gated, gate)


def router_and_experts(
    mlp: nn.Module, is_router: Callable[[nn.Module | None], bool]
) -> tuple[nn.Module | None, nn.Module | None]:
    """Those of a feed-forward part that has nothing else; else ``None`` for both."""
    children = dict(mlp.named_children())
    experts = next((child for child in children.values() if is_experts_module(child)), None)
    router = next((child for child in children.values() if child is not experts), None)
    plain = (
        len(children) == 2
        and experts is not None
        and is_router(router)
        and uses_only(mlp, _EXPERTS_NAMES | _JITTER)
        and not any(parameter is not None for parameter in mlp._parameters.values())
    )
    return (router, experts) if plain else (None, None)


def only_calls_layers(base: Any) -> bool:
    """Whether a model below its head only embeds, calls its layers one after the other, and its norm."""
    parts = set(dict(base.named_children()))
    if not any(parts == {"layers", *filter(None, names)} for names in _BASE_PARTS):
        return False
    return "forward" not in vars(base) and uses_only(base, _BASE_NAMES, wrappers=MODEL_WRAPPERS)


def ends_of(base: Any) -> tuple[Any, Any, Any]:
    """The embedding of a model, what makes its rotary angles, or ``None``, and its last norm."""
    embedding, rotary, norm = next(names for names in _BASE_PARTS if names[-1] in base._modules)
    return base._modules[embedding], base._modules.get(rotary), base._modules[norm]


def widens_logits(model: nn.Module) -> bool:
    """Whether a causal language model makes its logits float32, by the names that its code uses."""
    forward = own_forward(model, MODEL_WRAPPERS)
    return isinstance(forward, FunctionType) and "float" in forward.__code__.co_names


def uses_only(module: nn.Module, names: frozenset[str], *, wrappers: frozenset[str] = _WRAPPERS) -> bool:
    """Whether the ``forward`` of a module's class uses only these names.

    Args:
        module: Any module.
        names: Of globals, attributes and methods.
        wrappers: Modules whose functions may wrap it.
    """
    forward = own_forward(module, wrappers)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    return not forward.__code__.co_freevars and names.issuperset(_names(forward.__code__))


def own_forward(module: nn.Module, wrappers: frozenset[str] = frozenset()) -> Any:
    """The ``forward`` of a module's class without those wrappers, and without any that rename arguments."""
    forward: Any = type(module).forward
    known = wrappers | _RENAMING
    while getattr(forward, "__globals__", {}).get("__name__") in known and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def names_of(module: nn.Module) -> set[str]:
    """Names that the ``forward`` of a module's class uses."""
    code = getattr(own_forward(module), "__code__", None)
    return _names(code) if isinstance(code, CodeType) else set()


def _names(code: CodeType) -> set[str]:
    """Names that code uses, functions inside of it included."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


def only_known_arguments(named: dict[str, Any]) -> bool:
    """Whether a layer was called with arguments that its parts use, or that have no effect."""
    return all(name in _KNOWN_ARGUMENTS or value is None or value is False for name, value in named.items())
