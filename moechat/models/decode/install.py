"""Give a loaded model the native parts of a decoding step that its modules turn out to compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from moechat.models.decode import attention
from moechat.models.decode.angles import recognise_angles
from moechat.models.decode.elements import probing
from moechat.models.decode.latent import LATENT, Latent, recognise_latent
from moechat.models.decode.layers import recognise_layer
from moechat.models.decode.norms import native_norm, recognise_norm
from moechat.models.decode.rotary import recognise_rotary, with_rotary
from moechat.models.decode.routers import native_router, recognise_router
from moechat.models.decode.trial import agrees, layer_kind

_MISSING = object()


@dataclass
class Quickened:
    """What was recognised.

    Attributes:
        norms: Names of the modules.
        angles: Names of the modules that give cosines and sines.
        rotary: Names of the attention modules.
        latent: Names of the attention modules whose cache is not expanded.
        routers: Names of the modules.
        layers: Names of the decoder layers whose step, up to their experts, is one call.
        attention: Whether attention goes through the native code where it can.
    """

    norms: list[str] = field(default_factory=list)
    angles: list[str] = field(default_factory=list)
    rotary: list[str] = field(default_factory=list)
    latent: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    attention: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Let the model compute everything as transformers does again."""
        while self._undo:
            self._undo.pop()()

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let ``module`` compute ``forward`` until :meth:`undo`."""
        before = module.__dict__.get("forward", _MISSING)

        def back() -> None:
            if before is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

        self._undo.append(back)
        module.__dict__["forward"] = forward


def quicken(model: Any) -> Quickened:
    """Recognise modules of ``model`` and let them compute natively.

    Args:
        model: A transformers model with its dense weights on the CPU.
    """
    done = Quickened()
    for name, module in model.named_modules():
        norm = recognise_norm(module)
        if norm is not None:
            done.replace(module, native_norm(module, norm))
            done.norms.append(name)
            continue
        rule = recognise_router(module)
        if rule is not None:
            done.replace(module, native_router(module, rule))
            done.routers.append(name)
            continue
        angles = recognise_angles(module)
        if angles is not None:
            done.replace(module, angles)
            done.angles.append(name)
            continue
        rotate = recognise_rotary(module)
        if rotate is not None:
            done.replace(module, with_rotary(module, rotate))
            done.rotary.append(name)
    attention.register()
    config = model.config
    before = config._attn_implementation
    ours = attention.registered(before)
    if ours is not None and not _asks_for_a_name(model):
        config._attn_implementation = ours
        done._undo.append(lambda: setattr(config, "_attn_implementation", before))
        done.attention = True
        for name, module in model.named_modules():
            latent = recognise_latent(module)
            if latent is not None:
                _leave_latent(done, module, latent)
                done.latent.append(name)
        _join_layers(done, model)
    return done


def _join_layers(done: Quickened, model: Any) -> None:
    counts = {_angle_count(model.get_submodule(name)) for name in done.angles}
    if len(counts) != 1:
        return  # which of them a layer gets would show in its arguments only
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


def _angle_count(module: nn.Module) -> int:
    """Cosines that a module of angles gives for a token."""
    with probing():
        cos: torch.Tensor = module(torch.zeros(1, 1, 1), torch.tensor([[0]]))[0]
        return cos.shape[-1]


def _asks_for_a_name(model: Any) -> bool:
    """Whether a family compares the name of its attention, as those do that attend to chosen keys only: under
    another name they would leave something out.
    """
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    methods = [
        method.__code__
        for kind in classes
        if kind.__module__.startswith("transformers.models.")
        for method in map(inspect.unwrap, filter(inspect.isfunction, vars(kind).values()))
    ]
    return any(map(_compares, methods))


def _compares(code: CodeType) -> bool:
    named = "_attn_implementation" in code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and _compares(constant):
            return True
        among = constant if isinstance(constant, tuple | frozenset) else (constant,)
        if named and "sdpa" in among:
            return True
    return False


def _leave_latent(done: Quickened, module: nn.Module, latent: Latent) -> None:
    """Hand latents to our attention as they are; it expands them where it has to."""
    module.__dict__[LATENT] = latent
    module.__dict__["expand_kv"] = lambda kept, rotated: (kept, rotated)

    def back() -> None:
        del module.__dict__[LATENT]
        del module.__dict__["expand_kv"]

    done._undo.append(back)
