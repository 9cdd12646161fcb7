"""Installs native replacements for the recognised modules of a loaded model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from moechat.models.decode import attention, delta_layer
from moechat.models.decode.angles import angle_count, recognise_angles
from moechat.models.decode.delta_layer import find_delta_layer
from moechat.models.decode.gated_delta import GatedDelta, recognise_gated_deltas
from moechat.models.decode.latent import LATENT, Latent, recognise_latent
from moechat.models.decode.layer_check import agrees, layer_kind
from moechat.models.decode.layers import native_part, recognise_layer
from moechat.models.decode.native_delta import native_delta, native_delta_layer
from moechat.models.decode.native_mlp import native_mlp
from moechat.models.decode.norms import Norm, native_norm, recognise_norm
from moechat.models.decode.rotary import recognise_rotary, with_rotary
from moechat.models.decode.routers import native_router, recognise_router
from moechat.models.decode.shared_expert import recognise_mlps
from moechat.models.decode.together import TogetherPass
from moechat.models.decode.whole import recognise_model

_MISSING = object()


@dataclass
class NativeModules:
    """Names of the modules that compute natively.

    Attributes:
        norms: Norms.
        angles: Modules that compute rotary cosines and sines.
        rotary: Attention modules with native rotary embedding.
        latent: Attention modules whose latent cache is not expanded.
        deltas: Linear attention by the gated delta rule.
        mlps: Gated feed-forward parts.
        delta_layers: Decoder layers with such linear attention whose step, up to their feed-forward part, is
            one native call.
        routers: Routers.
        layers: Decoder layers whose step, up to their experts, is one native call.
        whole: Whether a pass of one token skips transformers' code between the layers too.
        attention: Whether native attention is installed.
        together: Passes of a token for each of several attention caches, where ``whole``.
    """

    norms: list[str] = field(default_factory=list)
    angles: list[str] = field(default_factory=list)
    rotary: list[str] = field(default_factory=list)
    latent: list[str] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    mlps: list[str] = field(default_factory=list)
    delta_layers: list[str] = field(default_factory=list)
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
        model: A transformers model with its dense weights on the CPU.
    """
    done = NativeModules()
    norms: dict[nn.Module, Norm] = {}
    for name, module in model.named_modules():
        if (norm := recognise_norm(module)) is not None:
            done.replace(module, native_norm(module, norm))
            done.norms.append(name)
            norms[module] = norm
        elif (rule := recognise_router(module)) is not None:
            done.replace(module, native_router(module, rule))
            done.routers.append(name)
        elif (angles := recognise_angles(module)) is not None:
            done.replace(module, angles)
            done.angles.append(name)
        elif (rotate := recognise_rotary(module)) is not None:
            done.replace(module, with_rotary(module, rotate))
            done.rotary.append(name)
    names = {module: name for name, module in model.named_modules()}
    deltas = recognise_gated_deltas(model)
    for module, delta in deltas.items():
        forward = native_delta(delta)
        if forward is not None:
            done.replace(module, forward)
            done.deltas.append(names[module])
    for module, mlp in recognise_mlps(model).items():
        forward = native_mlp(mlp)
        if forward is not None:
            done.replace(module, forward)
            done.mlps.append(names[module])
    if deltas:
        _install_delta_layers(done, names, norms, deltas)
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
        _install_layers(done, model)
    return done


def _install_delta_layers(
    done: NativeModules,
    names: Mapping[nn.Module, str],
    norms: Mapping[nn.Module, Norm],
    deltas: Mapping[nn.Module, GatedDelta],
) -> None:
    tried: dict[Any, bool] = {}
    for module, name in names.items():
        # Its feed-forward part stays a module, whatever it has.
        found = find_delta_layer(module, norms, (), deltas)
        if found is None:
            continue
        parts = [native_part(norm) for norm in (found.wiring.before, found.wiring.after)]
        forward = native_delta_layer(module, found, parts)
        if forward is None:
            continue
        kind = layer_kind(module)
        if kind not in tried:
            tried[kind] = delta_layer.agrees(module, found, None)
        if tried[kind]:
            done.replace(module, forward)
            done.delta_layers.append(name)


def _install_layers(done: NativeModules, model: Any) -> None:
    counts = {angle_count(model.get_submodule(name)) for name in done.angles}
    if len(counts) != 1:
        return  # the number of angles of a layer is only known from its arguments
    (angles,) = counts
    tried: dict[Any, bool] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "self_attn"):
            continue
        forward = recognise_layer(module, angles)
        if forward is None:
            continue
        kind = layer_kind(module)
        if kind not in tried:
            tried[kind] = agrees(module, forward)
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
