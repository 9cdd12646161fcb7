"""Installs native replacements for the recognised modules of a loaded model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from moechat.geometry import Activation
from moechat.models.decode import attention
from moechat.models.decode.angles import angles_of_layers, recognise_angles
from moechat.models.decode.channel_delta import native_channel_delta, recognise_channel_deltas
from moechat.models.decode.gated_delta import recognise_gated_deltas
from moechat.models.decode.gemma4_layers import gemma4_step
from moechat.models.decode.half_layers import half_step
from moechat.models.decode.hyper_connection import native_hyper_connection, recognise_hyper_connections
from moechat.models.decode.known_layers import recognise_known_layers
from moechat.models.decode.latent import LATENT, Latent, latent_projections, recognise_latent
from moechat.models.decode.latent_layers import latent_step
from moechat.models.decode.layer_check import agrees
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.layers import attention_step
from moechat.models.decode.mamba2 import recognise_mamba2
from moechat.models.decode.native_delta import delta_mixer, native_delta
from moechat.models.decode.native_mamba2 import mamba_mixer, native_mamba2
from moechat.models.decode.native_mlp import native_mlp
from moechat.models.decode.norms import (
    Norm,
    native_bare_norm,
    native_norm,
    recognise_bare_norm,
    recognise_norm,
)
from moechat.models.decode.probe import inputs_dtype
from moechat.models.decode.products import native_rows
from moechat.models.decode.rotary import recognise_neighbours, recognise_rotary, with_rotary
from moechat.models.decode.routers import (
    Rule,
    given_corrections,
    native_router,
    recognise_router,
)
from moechat.models.decode.scaled_layers import scaled_step
from moechat.models.decode.scaled_router import native_scaled_router, recognise_scaled_router
from moechat.models.decode.shared_expert import SharedBlock, recognise_mlps, recognise_shared_blocks
from moechat.models.decode.short_conv import native_short_conv, recognise_short_convs, short_conv_mixer
from moechat.models.decode.state_steps import StateMixer, state_step
from moechat.models.decode.together import TogetherPass
from moechat.models.decode.whole import recognise_model
from moechat.models.decode.wiring import ATTENTION, LINEAR_ATTENTION, MAMBA, SHORT_CONV

_MISSING = object()

Forward = Callable[..., Any]


@dataclass
class NativeModules:
    """Names of the modules that compute natively.

    Attributes:
        norms: Norms.
        angles: Modules that compute rotary cosines and sines.
        rotary: Attention modules with native rotary embedding.
        latent: Attention modules whose latent cache is not expanded.
        deltas: Linear attention by the gated delta rule, with a decay for each head or each channel.
        mambas: Mamba-2 mixers.
        convolutions: Gated short convolutions.
        mixings: Hyper-connections of several residual streams.
        mlps: Gated feed-forward parts.
        routers: Routers.
        layers: Decoder layers whose step, up to their experts or feed-forward part, is one native call.
        whole: Whether a pass of one token skips transformers' code between the layers too.
        attention: Whether native attention is installed.
        together: Passes of a token for each of several attention caches, where ``whole``.
    """

    norms: list[str] = field(default_factory=list)
    angles: list[str] = field(default_factory=list)
    rotary: list[str] = field(default_factory=list)
    latent: list[str] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    mambas: list[str] = field(default_factory=list)
    convolutions: list[str] = field(default_factory=list)
    mixings: list[str] = field(default_factory=list)
    mlps: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    attention: bool = False
    whole: bool = False
    together: TogetherPass | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore transformers' own computation."""
        self.together = None
        while self._undo:
            self._undo.pop()()

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the ``forward`` of ``module`` until :meth:`undo`."""
        before = module.__dict__.get("forward", _MISSING)

        def restore() -> None:
            if before is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

        self._undo.append(restore)
        module.__dict__["forward"] = forward


def install_native_modules(model: Any) -> NativeModules:
    """Recognise modules of ``model`` and replace their computation by native code.

    Args:
        model: A transformers model with its dense weights on the CPU. They must stay what and where they are
            until :meth:`NativeModules.undo`.
    """
    done = NativeModules()
    norms: dict[nn.Module, Norm] = {}
    bare_norms: dict[nn.Module, Norm] = {}
    rules: dict[nn.Module, Rule] = {}
    rotary: dict[nn.Module, Any] = {}
    tables: dict[nn.Module, Forward] = {}
    names = {module: name for name, module in model.named_modules()}
    given, inputs = given_corrections(model), inputs_dtype(model)
    for module, name in names.items():
        if (norm := recognise_norm(module)) is not None:
            norms[module] = norm
            done.norms.append(name)
        elif (rule := recognise_router(module, given.get(module), inputs)) is not None:
            rules[module] = rule
            done.routers.append(name)
        elif (angles := recognise_angles(module)) is not None:
            tables[module] = angles
            done.angles.append(name)
        elif (rotate := recognise_rotary(module)) is not None:
            rotary[module] = rotate
            done.rotary.append(name)
        elif (norm := recognise_bare_norm(module)) is not None:
            bare_norms[module] = norm
            done.norms.append(name)
    neighbours = {module for module in names if recognise_neighbours(module) is not None}
    # What has several parts is recognised before any of these is replaced.
    deltas = recognise_gated_deltas(model)
    channel_deltas = recognise_channel_deltas(model)
    mixings = recognise_hyper_connections(model, bare_norms)
    activations = (Activation.SILU, Activation.GELU_TANH, Activation.RELU2)
    mlps = recognise_mlps(model, activations, joined=True)
    mambas, convolutions = recognise_mamba2(model), recognise_short_convs(model)
    scaled = [found for module in names if (found := recognise_scaled_router(module, bare_norms)) is not None]
    blocks = recognise_shared_blocks(model, mlps, rules, scaled=True)
    counts = angles_of_layers(model)
    known = recognise_known_layers(model, norms, rules, rotary, deltas)
    for module, forward in tables.items():
        done.replace(module, forward)
    for module, norm in norms.items():
        done.replace(module, native_norm(module, norm))
    for module, norm in bare_norms.items():
        done.replace(module, native_bare_norm(module, norm))
    for module, rule in rules.items():
        done.replace(module, native_router(module, rule))
    for router in scaled:
        done.replace(router.module, native_scaled_router(router))
        done.routers.append(names[router.module])
    for module, rotate in rotary.items():
        done.replace(module, with_rotary(module, rotate))
    for module, delta in deltas.items():
        if (native := native_delta(delta)) is not None:
            done.replace(module, native)
            done.deltas.append(names[module])
    for module, mixing in mixings.items():
        if (native := native_hyper_connection(mixing)) is not None:
            done.replace(module, native)
            done.mixings.append(names[module])
    for module, by_channel in channel_deltas.items():
        if (native := native_channel_delta(by_channel)) is not None:
            done.replace(module, native)
            done.deltas.append(names[module])
    for module, mamba in mambas.items():
        if (native := native_mamba2(mamba)) is not None:
            done.replace(module, native)
            done.mambas.append(names[module])
    for module, short in convolutions.items():
        if (native := native_short_conv(short)) is not None:
            done.replace(module, native)
            done.convolutions.append(names[module])
    for module, mlp in mlps.items():
        if (native := native_mlp(mlp)) is not None:
            done.replace(module, native)
            done.mlps.append(names[module])
    kept = latent_projections(model)
    for module in names:
        if type(module) is nn.Linear and module not in kept and (native := native_rows(module)) is not None:
            done.replace(module, native)
    attention.register()
    config = model.config
    before = config._attn_implementation
    ours = attention.registered(before)
    if ours is not None and not compares_attention_name(model):
        config._attn_implementation = ours
        done._undo.append(lambda: setattr(config, "_attn_implementation", before))
        done.attention = True
        for name, module in model.named_modules():
            latent = recognise_latent(module)
            if latent is not None:
                _disable_expansion(done, module, latent)
                done.latent.append(name)
    mixers = {
        LINEAR_ATTENTION: {module: delta_mixer(delta) for module, delta in deltas.items()},
        SHORT_CONV: {module: short_conv_mixer(short) for module, short in convolutions.items()},
        MAMBA: {module: mamba_mixer(mamba) for module, mamba in mambas.items()},
    }
    _install_layers(done, model, names, known, mixers, blocks, neighbours, counts)
    return done


def _install_layers(
    done: NativeModules,
    model: Any,
    names: Mapping[nn.Module, str],
    known: Collection[nn.Module],
    mixers: Mapping[str, Mapping[nn.Module, StateMixer]],
    blocks: Mapping[nn.Module, SharedBlock],
    neighbours: Collection[nn.Module],
    counts: Mapping[nn.Module, int],
) -> None:
    tried: dict[Any, bool] = {}
    for module, name in names.items():
        step = None
        stateful = next((name for name in mixers if name in module._modules), None)
        if stateful is not None:
            step = state_step(module, stateful, mixers[stateful], blocks)
        elif hasattr(module, ATTENTION) and done.attention:
            angles = counts.get(module, 0)
            if angles:
                step = attention_step(module, angles, blocks)
                step = step or latent_step(module, angles, blocks, neighbours)
            step = step or gemma4_step(module)
        elif done.attention:
            step = half_step(module, mixers[MAMBA], blocks)
        if step is None and done.attention:
            step = scaled_step(module, counts.get(module, 0), mixers[MAMBA])
        if step is None:
            continue
        forward = step.forward(module)
        kind = layer_kind(module)
        if kind not in tried:
            tried[kind] = (step.exact or module in known) and agrees(module, forward)
        if tried[kind]:
            done.replace(module, forward)
            done.layers.append(name)
    whole = recognise_model(model)
    if whole is not None:
        forward, done.together = whole
        done.replace(model, forward)
        done.whole = True


def compares_attention_name(model: Any) -> bool:
    """Whether a family compares the name of its attention function, as for sparse attention; with another
    name it would compute something else.

    Comparisons that only decide which positions of a prompt are left out do not count (Gemma 4): what is left
    has the same results, and a decoded token is the only position.
    """
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    methods = [
        method.__code__
        for kind in classes
        if kind.__module__.startswith("transformers.models.")
        for method in map(inspect.unwrap, filter(inspect.isfunction, vars(kind).values()))
    ]
    return any(_compares(code) for code in methods if "logits_to_keep" not in _parameters(code))


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _compares(code: CodeType) -> bool:
    named = "_attn_implementation" in code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and _compares(constant):
            return True
        among = constant if isinstance(constant, tuple | frozenset) else (constant,)
        if named and "sdpa" in among:
            return True
    return False


def _disable_expansion(done: NativeModules, module: nn.Module, latent: Latent) -> None:
    """Pass latents to the native attention unexpanded; it expands them if necessary."""
    module.__dict__[LATENT] = latent
    module.__dict__["expand_kv"] = lambda kept, rotated: (kept, rotated)

    def restore() -> None:
        del module.__dict__[LATENT]
        del module.__dict__["expand_kv"]

    done._undo.append(restore)
