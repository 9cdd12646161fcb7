"""Feed-forward parts, alone and beside routed experts, recognised by their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moechat.geometry import Activation
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.probe import SIZES, close, hooks_of, normal_numbers, probing
from moechat.models.decode.routers import Rule
from moechat.models.decode.stand_ins import StandIn, chooses, random_projections
from moechat.models.element_types import ELEMENTS
from moechat.models.experts_interface import is_experts_module

_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"
# Of parts whose first projection gives first the gates, then what they multiply.
_JOINED = ("input_linear", "output_linear")
_ACTIVATIONS = ("act_fn", "act", "activation")
_SCALE = "routed_scaling_factor"
_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.RELU2: lambda x: functional.relu(x).square(),
}


@dataclass(frozen=True)
class Mlp:
    """``down(activation(gate(x)) * up(x))``; without a gate ``down(activation(up(x)))``.

    Attributes:
        module: The module.
        activation: Its activation.
    """

    module: Any
    activation: Activation = Activation.SILU

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return self.joined or _GATE in self.module._modules

    @property
    def joined(self) -> bool:
        """Whether one projection gives the gates and what they multiply, one after the other."""
        return _JOINED[0] in self.module._modules

    @property
    def inputs(self) -> list[Any]:
        """The projections whose results are multiplied: first the one that is activated."""
        return [self.module._modules[name] for name in self.names[:-1]]

    @property
    def names(self) -> list[str]:
        """Of all projections, the last one last."""
        return [name for name in (_GATE, _UP, _DOWN, *_JOINED) if name in self.module._modules]

    @property
    def output(self) -> Any:
        """The last projection."""
        return self.module._modules[self.names[-1]]

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if the part is computed in another way."""
        return hooks_of(module for module in self.module.modules() if module is not self.module)


@dataclass(frozen=True)
class SharedBlock:
    """Routed experts, and a shared one whose result is added.

    Attributes:
        block: The module.
        router: Its router.
        experts: Its routed experts.
        shared: Its shared expert.
        gate: Projection to a number whose sigmoid multiplies the shared expert's result, or ``None``.
        scale: Factor of the routed experts' result.
    """

    block: nn.Module
    router: nn.Module
    experts: nn.Module
    shared: Mlp
    gate: nn.Module | None
    scale: float = 1.0

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed if the block is computed in another way."""
        bypassed = [self.router, self.experts, *self.shared.module.modules()]
        bypassed += [] if self.gate is None else [self.gate]
        return hooks_of(bypassed)


def recognise_mlps(
    model: nn.Module, activations: Collection[Activation] = (Activation.SILU,), *, joined: bool = False
) -> dict[nn.Module, Mlp]:
    """The feed-forward parts of a model. One of each kind is tried.

    Args:
        model: Its projections may keep their weights anywhere.
        activations: Of the parts that are wanted: of gated ones SiLU, or GELU's approximation by tanh; of
            others the square of ReLU.
        joined: Those whose gates come from the same projection are wanted too.
    """
    tried: dict[Any, Activation | None] = {}
    found: dict[nn.Module, Mlp] = {}
    for module in model.modules():
        if not _may_be_mlp(module) or (not joined and Mlp(module).joined):
            continue
        kind = layer_kind(module), _type_of(module)
        if kind not in tried:
            seeming = [Mlp(module, each) for each in activations]
            agreeing = (
                each.activation
                for each in seeming
                if each.gated != (each.activation is Activation.RELU2) and _mlp_agrees(each)
            )
            tried[kind] = next(agreeing, None)
        activation = tried[kind]
        if activation is not None:
            found[module] = Mlp(module, activation)
    return found


def _may_be_mlp(module: Any) -> bool:
    children = dict(module.named_children())
    names = set(children) - set(_ACTIVATIONS)
    if names not in ({_UP, _DOWN}, {_GATE, _UP, _DOWN}, set(_JOINED)) or "forward" in vars(module):
        return False
    projections = [children[name] for name in names]
    if not all(hasattr(each, "in_features") and hasattr(each, "out_features") for each in projections):
        return False
    return not any(parameter is not None for parameter in module._parameters.values())


def _type_of(module: nn.Module) -> torch.dtype:
    """Of the hidden states: projections that keep their weights in another form have it too."""
    for each in (*module.parameters(), *module.modules()):
        dtype = getattr(each, "dtype", None)
        if isinstance(dtype, torch.dtype) and dtype in ELEMENTS:
            return dtype
    return torch.bfloat16


def _mlp_agrees(mlp: Mlp) -> bool:
    # In float32 too: in 16 bits activations that are alike could not be told apart.
    return all(_mlp_agrees_in(dtype, mlp) for dtype in {_type_of(mlp.module), torch.float32})


def _mlp_agrees_in(dtype: torch.dtype, mlp: Mlp) -> bool:
    with probing() as generator:
        normal = normal_numbers(generator, dtype)
        with random_projections(mlp.module, mlp.names, normal):
            for size in SIZES:
                x = normal(1, mlp.inputs[0].in_features) * size
                try:
                    theirs = mlp.module.forward(x.clone())
                except Exception:  # the family's code needs more than the probe has
                    return False
                if not isinstance(theirs, torch.Tensor) or not close(theirs, fed(mlp, x)):
                    return False
    return True


def fed(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    """What a feed-forward part computes, by its projections."""
    first, *rest = (module(x) for module in mlp.inputs)
    if mlp.joined:
        first, *rest = first.chunk(2, dim=-1)
    active = _FUNCTIONS[mlp.activation](first)
    answer: torch.Tensor = mlp.output(active * rest[0] if rest else active)
    return answer


def recognise_shared_blocks(
    model: nn.Module,
    mlps: Mapping[nn.Module, Mlp],
    rules: Mapping[nn.Module, Rule],
    *,
    scaled: bool = False,
) -> dict[nn.Module, SharedBlock]:
    """Blocks of routed experts and a shared one. One of each kind is tried.

    Args:
        model: Its routers are on the CPU.
        mlps: Of the model.
        rules: Of its routers that are known.
        scaled: Those that multiply the routed experts' result by a factor are wanted too.
    """
    tried: dict[Any, SharedBlock | None] = {}
    found: dict[nn.Module, SharedBlock] = {}
    for module in model.modules():
        block = _described(module, mlps, rules)
        if block is None:
            continue
        kind = layer_kind(module)
        if kind not in tried:
            factor = getattr(module, _SCALE, None) if scaled else None
            # First the factor: in 16 bits one near 1 could not be told from 1.
            scales = (factor, 1.0) if type(factor) is float else (1.0,)
            agreeing = (
                each for each in scales if _block_agrees(replace(block, scale=each), rules[block.router])
            )
            tried[kind] = next((replace(block, scale=each) for each in agreeing), None)
        agreed = tried[kind]
        if agreed is not None:
            found[module] = replace(block, scale=agreed.scale)
    return found


def _described(
    module: nn.Module, mlps: Mapping[nn.Module, Mlp], rules: Mapping[nn.Module, Rule]
) -> SharedBlock | None:
    children = list(module.children())
    experts = [child for child in children if is_experts_module(child)]
    routers = [child for child in children if child in rules]
    shared = [child for child in children if child in mlps]
    known = (*experts, *routers, *shared)
    rest = [child for child in children if child not in known and type(child) is not nn.Identity]
    if len(experts) != 1 or len(routers) != 1 or len(shared) != 1 or len(rest) > 1:
        return None
    if any(parameter is not None for parameter in module._parameters.values()) or "forward" in vars(module):
        return None
    gate = rest[0] if rest else None
    if gate is not None and (
        getattr(gate, "out_features", 0) != 1 or getattr(gate, "bias", None) is not None
    ):
        return None
    return SharedBlock(module, routers[0], experts[0], mlps[shared[0]], gate)


def _block_agrees(block: SharedBlock, rule: Rule) -> bool:
    weight = block.router.get_parameter("weight")
    if not weight.is_cpu:
        return False
    width = weight.shape[-1]
    gates = [name for name, child in block.block.named_children() if child is block.gate]
    with probing() as generator:
        normal = normal_numbers(generator, _type_of(block.shared.module))
        experts = StandIn(normal(1, width))
        with (
            random_projections(block.shared.module, block.shared.names, normal),
            random_projections(block.block, gates, normal),
            experts.in_place_of(block.experts),
        ):
            for size in SIZES:
                x = normal(1, 1, width) * size
                row = x.view(1, width)
                try:
                    theirs = block.block.forward(x.clone())
                except Exception:  # the family's code needs more than the probe has
                    return False
                ours = fed(block.shared, row)
                if gates:
                    gate: Any = block.block._modules[gates[0]]
                    ours = gate(row).sigmoid() * ours
                ours = experts.answer * block.scale + ours
                if not isinstance(theirs, torch.Tensor) or not close(theirs.view_as(ours), ours):
                    return False
                seen, *choice = experts.seen
                if not torch.equal(seen.view_as(x), x) or not chooses(block.router, rule, row, choice):
                    return False
    return True
