"""Norms, rotary embedding and routers of recorded passes: one launch of ours in place of many of torch.

Modules are recognised by their results while the model is on the CPU (:mod:`moechat.models.decode`), and
layers made of them as a whole (:mod:`moechat.offload.fused_layers`). Only while a pass is recorded do they
compute by our kernels; the model's own passes, with which replays are compared, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.norms import Norm, recognise_norm
from moechat.models.decode.probe import FEW_TOKENS, inputs_dtype, probing
from moechat.models.decode.rotary import (
    WHOLE,
    Rotate,
    recognise_neighbours,
    recognise_rotary,
    rotated_width,
    with_rotary,
)
from moechat.models.decode.routers import Rule, recognise_router
from moechat.models.decode.shared_expert import Mlp, recognise_mlps, recognise_shared_blocks
from moechat.offload.fused_delta import delta_forward, recognise_deltas
from moechat.offload.fused_feed import FusedBlock, block_forward, mlp_forward
from moechat.offload.fused_layers import (
    FusedLayer,
    Sums,
    layer_forward,
    recognise_layers,
    serves_norm,
)
from moechat.offload.kernels import routing, steps
from moechat.offload.kernels.steps import served
from moechat.offload.known_router import KnownRouter

_FORWARD = "forward"


@dataclass
class FusedSteps:
    """The modules of a model that our kernels can compute."""

    norms: dict[nn.Module, Norm] = field(default_factory=dict)
    routers: dict[nn.Module, KnownRouter] = field(default_factory=dict)
    rotary: dict[nn.Module, Rotate] = field(default_factory=dict)
    neighbours: dict[nn.Module, Rotate] = field(default_factory=dict)
    layers: dict[nn.Module, FusedLayer] = field(default_factory=dict)
    deltas: dict[nn.Module, GatedDelta] = field(default_factory=dict)
    blocks: dict[nn.Module, FusedBlock] = field(default_factory=dict)
    mlps: dict[nn.Module, Mlp] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    @contextmanager
    def over(self) -> Iterator[None]:
        """Compute passes in the block by the kernels, where they serve the inputs.

        Modules whose ``forward`` somebody else has replaced are left alone.

        Raises:
            RuntimeError: None of these modules has read the output of a layer.
        """
        made: list[tuple[nn.Module, Callable[..., Any]]] = []
        sums = Sums()
        try:
            for module, forward in self._forwards(sums):
                made.append((module, forward))
                module.__dict__[_FORWARD] = forward
            yield
            if sums:
                raise RuntimeError("the output of a layer was not read by the next one")
        finally:
            for module, forward in made:
                if module.__dict__.get(_FORWARD) is forward:
                    del module.__dict__[_FORWARD]

    def fewer(self) -> FusedSteps:
        """The same without layers and their larger parts, or nothing if there are none."""
        if self.layers or self.deltas or self.blocks or self.mlps:
            return FusedSteps(self.norms, self.routers, self.rotary, self.neighbours)
        return FusedSteps()

    def _forwards(self, sums: Sums) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        made: list[tuple[Mapping[nn.Module, Any], Callable[[nn.Module, Any], Callable[..., Any]]]] = [
            (self.layers, partial(layer_forward, sums=sums)),
            (self.deltas, delta_forward),
            (self.blocks, block_forward),
            (self.mlps, mlp_forward),
            (self.norms, partial(_norm_forward, sums=sums)),
            (self.routers, _router_forward),
            ({**self.rotary, **self.neighbours}, self._rotating),
        ]
        for known, make in made:
            for module, what in known.items():
                if _FORWARD not in module.__dict__:
                    yield module, make(module, what)

    def _rotating(self, module: nn.Module, _: Rotate) -> Callable[..., Any]:
        """The ``forward`` of a module whose rotary functions are the kernels."""
        rotate, neighbours = self.rotary.get(module), self.neighbours.get(module)
        known = None if rotate is None else rotate.__dict__
        return with_rotary(
            module,
            None if known is None else _fused_rotary(known["own"], known["kinds"]),
            None if neighbours is None else _fused_rotary(neighbours, (WHOLE,), neighbours=True),
        )


def recognise_steps(model: nn.Module) -> FusedSteps:
    """The modules of ``model`` that the kernels can compute.

    Args:
        model: With its weights on the CPU; modules without are left out.
    """
    found, inputs = FusedSteps(), inputs_dtype(model)
    for module in model.modules():
        if _FORWARD in module.__dict__:
            continue
        if (norm := recognise_norm(module)) is not None:
            found.norms[module] = norm
        elif (rule := recognise_router(module, inputs=inputs)) is not None and not rule.rounds:
            router = _router_of(module, rule)
            if router is not None:
                found.routers[module] = router
        else:
            rotate, neighbours = recognise_rotary(module), recognise_neighbours(module)
            if rotate is not None:
                found.rotary[module] = rotate
            if neighbours is not None:
                found.neighbours[module] = neighbours
    found.deltas, found.mlps = recognise_deltas(model), recognise_mlps(model)
    rules = {module: router.rule for module, router in found.routers.items()}
    found.blocks = {
        module: FusedBlock(parts, found.routers[parts.router])
        for module, parts in recognise_shared_blocks(model, found.mlps, rules).items()
    }
    found.layers = recognise_layers(model, found.norms, found.routers, found.rotary, found.deltas)
    return found


def _router_of(module: nn.Module, rule: Rule) -> KnownRouter | None:
    """``None``: it is not clear how the router makes its logits, or which correction it adds."""
    weight = module.get_parameter("weight")
    if len(weight) > routing.MOST_EXPERTS or rule.chosen > routing.MOST_CHOSEN:
        return None
    name = None
    if rule.correction is not None:
        names = [
            name
            for name, tensor in (*module.named_buffers(), *module.named_parameters())
            if name != "bias" and tensor.shape == rule.correction.shape
            if torch.equal(tensor.detach().float(), rule.correction)
        ]
        if len(names) != 1:
            return None
        (name,) = names
    with probing() as generator:
        hidden = torch.randn((2, weight.shape[1]), generator=generator).to(rule.inputs)
        wanted = module(hidden.clone())[rule.order[0]]
        for widened in (False, True) if weight.dtype is rule.inputs else (True,):
            logits = _logits(module, hidden, widened=widened)
            if logits.dtype is wanted.dtype and torch.equal(logits, wanted):
                return KnownRouter(replace(rule, correction=None), name, widened)
    return None


def _logits(module: nn.Module, hidden: torch.Tensor, *, widened: bool) -> torch.Tensor:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    if not widened:
        return nn.functional.linear(hidden, weight, bias)
    return nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _norm_forward(module: nn.Module, norm: Norm, sums: Sums) -> Callable[..., Any]:
    own = module.forward

    def forward(x: torch.Tensor) -> Any:
        weight = module._parameters.get("weight")
        if weight is None or not serves_norm(x, weight):
            return own(sums.settled(x))
        return sums.normed(x, weight, norm)

    return forward


def _router_forward(module: nn.Module, router: KnownRouter) -> Callable[..., Any]:
    own, rule = module.forward, router.rule
    places = [rule.order.index(place) for place in range(3)]

    def forward(hidden: torch.Tensor) -> Any:
        if not router.serves(module, hidden):
            return own(hidden)
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        logits = _logits(module, hidden.view(-1, weight.shape[-1]), widened=router.widened)
        weights, index = routing.route(logits, rule, router.correction_of(module))
        made = (logits, weights, index)
        return made[places[0]], made[places[1]], made[places[2]]

    return forward


def _fused_rotary(own: Rotate, kinds: Collection[str], *, neighbours: bool = False) -> Rotate:
    """A function that rotates like ``own``; see :func:`moechat.models.decode.rotary.native_rotary`."""

    def rotate(*arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != 4 or not all(isinstance(each, torch.Tensor) for each in arguments):
            return own(*arguments, **named)
        q, k, cos, sin = arguments
        tokens, dim, angles = q.shape[-2], q.shape[-1], cos.shape[-1]
        width = rotated_width(kinds, dim, angles)
        if (
            tokens > FEW_TOKENS
            or width == 0
            or not all(served(each, q) for each in arguments)
            or not q.ndim == k.ndim == 4
            or not q.shape[0] == k.shape[0] == 1
            or k.shape[-2:] != q.shape[-2:]
            or cos.shape != (1, tokens, angles)
            or sin.shape != cos.shape
            or not (cos.is_contiguous() and sin.is_contiguous())
            or not q.stride(-1) == k.stride(-1) == 1
        ):
            return own(q, k, cos, sin)
        return steps.rotate(q, k, cos, sin, width, neighbours=neighbours)

    return rotate
