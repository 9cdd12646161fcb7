"""Multi-head latent attention without expanding the cache.

DeepSeek's families store one latent vector per token and, at every step, expand it to keys and values of
every head for the whole context. The result is the same if the query is projected into the latent space
instead: the latents are then keys and values of one head that all queries share, and nothing is expanded.
The weights are a torch tensor, or packed like those of other layers.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.probe import close, probing
from moechat.models.decode.wiring import own_forward
from moechat.models.element_types import ELEMENTS
from moechat.models.linear import TILE_ROWS, PackedLinear

LATENT = "_moechat_latent"
_PROBE_KEYS = 5
_HEAD_PARTS = ("qk_nope_head_dim", "v_head_dim")  # of the rows of kv_b_proj


class Latent:
    """Latent attention of one module.

    Args:
        module: An attention module with ``expand_kv``, as required by :func:`recognise_latent`. Its
            ``kv_b_proj`` is an ``nn.Linear`` or packed.
    """

    def __init__(self, module: Any) -> None:
        self.expand: Callable[..., tuple[torch.Tensor, torch.Tensor]] = module.expand_kv
        linear: nn.Linear | PackedLinear = module.kv_b_proj
        self._linear = linear
        self.plain, self.value_dim = module.qk_nope_head_dim, module.v_head_dim
        self.rotated, self.rank = module.qk_rope_head_dim, linear.in_features
        self.heads = linear.out_features // (self.plain + self.value_dim)
        self._runs: dict[float, _native.LatentAttention] = {}
        if isinstance(linear, PackedLinear):
            self.dtype, self.device = linear.dtype, torch.device("cpu")
        else:
            self.dtype, self.device = linear.weight.dtype, linear.weight.device
            self._weight = linear.weight.detach().contiguous()
            heads = self._weight.view(self.heads, -1, self.rank)
            self._to_latent = heads[:, : self.plain]  # [heads, plain, rank]
            self._to_values = heads[:, self.plain :].transpose(1, 2)  # [heads, rank, value_dim]

    def expanded(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference of ``expand_kv`` for ``[1, 1, context, rank]`` and ``[1, 1, context, rotated]``."""
        context = latent.shape[2]
        both = self._linear(latent[0, 0]).view(context, self.heads, -1).transpose(0, 1)
        keys = torch.cat([both[..., : self.plain], rotated[0].expand(self.heads, context, -1)], -1)
        return keys[None], both[None, ..., self.plain :]

    def attend(
        self, query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        """``[1, 1, heads, value_dim]`` for one query ``[1, heads, 1, plain + rotated]`` that attends to all
        keys; ``None`` for unsupported shapes or types.
        """
        dtype, context = query.dtype, latent.shape[2]
        if (
            query.shape != (1, self.heads, 1, self.plain + self.rotated)
            or latent.shape != (1, 1, context, self.rank)
            or rotated.shape != (1, 1, context, self.rotated)
            or not (latent.dtype is rotated.dtype is self.dtype is dtype)
            or not latent.stride(-1) == rotated.stride(-1) == query.stride(-1) == 1
            or not query.is_cpu
        ):
            return None
        run = self.native(dtype, scale)
        out = torch.empty((1, 1, self.heads, self.value_dim), dtype=dtype)
        run(
            *(query.data_ptr(), query.stride(1), latent.data_ptr(), latent.stride(2)),
            *(rotated.data_ptr(), rotated.stride(2), context, out.data_ptr()),
        )
        return out

    def native(self, dtype: torch.dtype, scale: float) -> _native.LatentAttention:
        """Attention of a token, natively.

        Args:
            dtype: Of the weights.
            scale: Factor of the query-key products.
        """
        run = self._runs.get(scale)
        if run is None:
            sizes = (self.heads, self.plain, self.rotated, self.rank, self.value_dim)
            linear = self._linear
            packed = isinstance(linear, PackedLinear)
            at = 0 if packed else self._weight.data_ptr()
            run = _native.LatentAttention(ELEMENTS[dtype], *sizes, at, scale)
            if isinstance(linear, PackedLinear):
                run = run.packed(linear.layout, linear.data, linear.activation_bits)
            self._runs[scale] = run
        return run

    def to_latents(self, query: torch.Tensor) -> torch.Tensor:
        """Queries for latents, ``[1, heads, tokens, rank + rotated]``, from those for keys,
        ``[1, heads, tokens, plain + rotated]``.
        """
        moved = torch.bmm(query[0, ..., : self.plain], self._to_latent)
        return torch.cat([moved, query[0, ..., self.plain :]], -1)[None]

    def to_values(self, sums: torch.Tensor) -> torch.Tensor:
        """``[1, tokens, heads, value_dim]`` of weighted sums of latents ``[1, tokens, heads, rank]``."""
        return torch.bmm(sums[0].transpose(0, 1), self._to_values).transpose(0, 1)[None]


def latent_projections(model: nn.Module) -> dict[nn.Module, bool]:
    """Layers whose weights :class:`Latent` uses per head, and whether it also takes them packed: if the rows
    for keys and for values of a head both are whole tiles. Else they must stay torch layers.
    """
    found: dict[nn.Module, bool] = {}
    for module in model.modules():
        linear = _projection(module)
        if linear is not None:
            parts = [getattr(module, name, None) for name in _HEAD_PARTS]
            found[linear] = linear.bias is None and all(
                isinstance(part, int) and part % TILE_ROWS == 0 for part in parts
            )
    return found


def _projection(module: Any) -> nn.Linear | PackedLinear | None:
    linear = getattr(module, "kv_b_proj", None)
    if not callable(getattr(module, "expand_kv", None)) or type(linear) not in (nn.Linear, PackedLinear):
        return None
    return linear if _passes_unchanged(own_forward(module)) else None


def recognise_latent(module: Any) -> Latent | None:
    """The latent attention of ``module``, if its ``expand_kv`` multiplies by ``kv_b_proj`` per head."""
    linear = _projection(module)
    if linear is None:
        return None
    if linear.bias is not None or any(parameter.is_meta for parameter in linear.parameters()):
        return None
    if any(type(getattr(module, name, None)) is not int for name in (*_HEAD_PARTS, "qk_rope_head_dim")):
        return None
    if linear.out_features % (module.qk_nope_head_dim + module.v_head_dim):
        return None
    latent = Latent(module)
    if latent.dtype not in ELEMENTS:
        return None
    with probing() as generator:
        kept, rotated = (
            torch.randn((1, 1, _PROBE_KEYS, width), generator=generator).to(latent.device, latent.dtype)
            for width in (latent.rank, latent.rotated)
        )
        try:
            wanted = latent.expand(kept, rotated)
        except Exception:  # it needs other inputs
            return None
        same = len(wanted) == 2 and all(map(close, latent.expanded(kept, rotated), wanted))
    return latent if same else None


def _passes_unchanged(forward: Any) -> bool:
    """Whether ``forward`` uses each result of ``expand_kv`` once, so that they reach attention unchanged."""
    if not isinstance(forward, FunctionType):
        return False
    stored: list[str] = []
    loaded: list[str] = []
    begun = False
    for step in dis.get_instructions(forward):
        begun = begun or step.argval == "expand_kv"
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        for kind, name in zip(re.findall("(STORE|LOAD)_FAST", step.opname), names, strict=False):
            if begun:
                (stored if kind == "STORE" else loaded).append(name)
    made = stored[:2]
    return len(set(made)) == 2 and all(stored.count(name) == loaded.count(name) == 1 for name in made)
