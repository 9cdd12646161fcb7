"""Gated feed-forward parts of recorded passes by our kernels, alone and beside routed experts.

A feed-forward part is two launches in place of five. A shared expert's first products are one launch with
those of the router, and its result is added in one more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moechat.models.decode.shared_expert import Mlp, SharedBlock
from moechat.offload.kernels import layer_steps
from moechat.offload.kernels.steps import served
from moechat.offload.known_router import KnownRouter


@dataclass(frozen=True)
class FusedBlock:
    """A block that the kernels compute.

    Attributes:
        parts: Its parts.
        router: What its router computes.
    """

    parts: SharedBlock
    router: KnownRouter


def mlp_forward(module: nn.Module, mlp: Mlp) -> Callable[[torch.Tensor], torch.Tensor]:
    """A ``forward`` for a gated feed-forward part: by the kernels, where they serve the inputs."""
    own, hooks = module.forward, mlp.hooks()

    def forward(x: torch.Tensor) -> torch.Tensor:
        row = _row(x)
        if row is None or any(hooks) or not _activates(mlp, row):
            answer: torch.Tensor = own(x)
            return answer
        return _down(mlp, layer_steps.projected(row, mlp.inputs)).view_as(x)

    return forward


def block_forward(module: nn.Module, fused: FusedBlock) -> Callable[[torch.Tensor], torch.Tensor]:
    """A ``forward`` for a block: by the kernels, where they serve the inputs."""
    own, hooks = module.forward, fused.parts.hooks()

    def forward(x: torch.Tensor) -> torch.Tensor:
        row = _row(x)
        if row is None or any(hooks) or not fused.router.serves(fused.parts.router, row):
            answer: torch.Tensor = own(x)
            return answer
        return _computed(fused, row).view_as(x)

    return forward


def _row(x: torch.Tensor) -> torch.Tensor | None:
    """Hidden states of one token, ``[1, hidden]``; ``None``: of more, or the kernels do not take them."""
    if x.numel() != x.shape[-1] or not x.is_contiguous() or not served(x, x):
        return None
    return x.view(1, -1)


def _activates(mlp: Mlp, row: torch.Tensor) -> bool:
    """Whether the kernels compute all of a part: first both products in one launch, then the last one, which
    activates what it reads.
    """
    inputs, output = mlp.inputs, mlp.output
    return (
        all(layer_steps.serves_product(module, row) for module in inputs)
        and type(output) is nn.Linear
        and layer_steps.serves_weights(output.weight, output.bias, row)
    )


def _down(mlp: Mlp, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of a part whose first products are there; REQUIRES: :func:`_activates`."""
    (gate, up), output = inputs, mlp.output
    (made,) = layer_steps.products(gate, [output.weight], [output.bias], gate.dtype, factors=up)
    return made


def _computed(fused: FusedBlock, row: torch.Tensor, *, experts: bool = True) -> torch.Tensor:
    """The block's result for a token; without ``experts`` it means nothing: the kernels are built."""
    parts, known = fused.parts, fused.router
    mlp, router = parts.shared, parts.router
    modules = mlp.inputs if parts.gate is None else [*mlp.inputs, parts.gate]
    if known.joins(router, modules, row):
        weights = [module.weight for module in (*modules, router)]
        *made, logits = layer_steps.products(row, weights, [None] * len(weights), row.dtype)
    else:
        made, logits = layer_steps.projected(row, modules), None
    if _activates(mlp, row):
        shared = _down(mlp, made[:2])
    else:
        shared = mlp.output(functional.silu(made[0]) * made[1]).view(1, -1).contiguous()
    if experts:
        total = known.routed(router, parts.experts, row, logits)
    else:
        known.launch_first(router, row, logits)
        total = torch.zeros_like(row)
    return layer_steps.add_shared(total, shared, None if parts.gate is None else made[2])


def first_launches(
    blocks: Collection[FusedBlock], mlps: Iterable[Mlp], dtype: torch.dtype, device: torch.device
) -> list[Callable[[], None]]:
    """Launches of every kernel of some parts, of a kind each, so that they are built; without the experts.

    Args:
        blocks: Of a model, on the GPU.
        mlps: Likewise.
        dtype: Of the hidden states.
        device: The GPU.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    inside = {block.parts.shared.module for block in blocks}
    kinds: dict[Any, Callable[[], None]] = {}
    for block in blocks:
        kinds[_kind(block.parts.shared), block.parts.gate is None] = partial(_launch_block, block, like)
    for mlp in mlps:
        if mlp.module not in inside:
            kinds[_kind(mlp)] = partial(_launch_mlp, mlp, like)
    return list(kinds.values())


def _kind(mlp: Mlp) -> tuple[Any, ...]:
    """Sizes and forms of its weights, which have kernels of their own."""
    gate, up = mlp.inputs
    return gate.in_features, gate.out_features, type(gate), type(up), type(mlp.output)


def _launch_mlp(mlp: Mlp, like: torch.Tensor) -> None:
    row = like.new_zeros((1, mlp.inputs[0].in_features))
    if served(row, row) and _activates(mlp, row):
        _down(mlp, layer_steps.projected(row, mlp.inputs))


def _launch_block(block: FusedBlock, like: torch.Tensor) -> None:
    row = like.new_zeros((1, block.parts.shared.inputs[0].in_features))
    if served(row, row) and block.router.serves(block.parts.router, row):
        _computed(block, row, experts=False)
