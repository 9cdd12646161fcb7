"""Counts the memory of the activations of a pass, without memory or computation.

Layers with linear attention or convolutions make large tensors that no formula of a configuration gives. So
their code runs on the meta device, and the bytes of all tensors that are alive are followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moechat.models.cache_argument import CACHE, cache_of
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.light_meta import light_meta
from moechat.models.rotary_scaling import without_scaling
from moechat.models.skeleton import Skeleton, base_of

# Of the activations of a part, and the fewest tokens of one.
_MOST_BYTES = 1 << 30
_FEWEST_TOKENS = 64
# glibc gives larger blocks back when they are freed. Smaller ones stay in its heap, with gaps between them:
# up to 45 % of them in the passes that were measured.
_HEAP_BLOCK = 32 << 20
_GAPS = 0.5
# Operations that libraries compute.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linalg_solve_triangular")


class _Live(TorchDispatchMode):
    """Follows the bytes of tensors made inside.

    Attributes:
        peak: Most bytes alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {_storage(each) for each in _tensors((args, list(kwargs.values())))}
        out = func(*args, **kwargs)
        temporary = _temporary(func, args)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            # A view, or the result of an operation in place, has the storage of an argument.
            if storage._cdata not in before and storage not in self._known:
                self._known.add(storage)
                nbytes = _taken(storage.nbytes())
                self._now += nbytes
                weakref.finalize(storage, self._freed, nbytes)
        self.peak = max(self.peak, self._now + temporary)
        return out

    def _freed(self, nbytes: int) -> None:
        self._now -= nbytes


class _WithoutScores(TorchFunctionMode):
    """Leaves out the scores of torch's fused attention, which on real devices does not keep them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, _, value = args[:3]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))


def part_of_prompt(skeleton: Skeleton, most: int, *, in_parts: bool) -> tuple[int, int]:
    """Tokens of a part of a prompt, and its :func:`part_bytes`.

    The tokens depend only on the model, because the division of a prompt changes the rounding of its logits.

    Args:
        skeleton: As for :func:`part_bytes`.
        most: Most tokens, a power of two.
        in_parts: Prompts are computed in parts: take fewer tokens if their activations exceed 1 GiB.
    """
    tokens, nbytes = most, part_bytes(skeleton, most)
    while in_parts and nbytes > _MOST_BYTES and tokens > _FEWEST_TOKENS:
        tokens //= 2
        nbytes = part_bytes(skeleton, tokens)
    return tokens, nbytes


def part_bytes(skeleton: Skeleton, tokens: int) -> int:
    """Most bytes of activations that are alive at a time in one part of a prompt, behind another part.

    Keys, values and states of the first layers are among them; scores of fused attention are not.

    Args:
        skeleton: A model on the meta device, with experts that return tensors like their inputs.
        tokens: Tokens of the part.
    """
    model, place = skeleton.model, skeleton.layers_name.rpartition(".")
    layers = list(model.get_submodule(skeleton.layers_name).children())
    kinds = [layer_kind(layer) for layer in layers]
    count = max(kinds.index(kind) for kind in kinds) + 1
    holder = model.get_submodule(place[0])
    decoder = base_of(model)
    try:
        setattr(holder, place[2], nn.ModuleList(layers[:count]))
        ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
        with light_meta(), without_scaling(model), torch.no_grad():
            cache = cache_of(decoder(input_ids=ids, use_cache=True))
            with _WithoutScores(), _Live() as live:
                decoder(input_ids=ids, use_cache=True, **{CACHE: cache})
    finally:
        setattr(holder, place[2], nn.ModuleList(layers))
    return int(live.peak)


def _taken(nbytes: int) -> int:
    return nbytes if nbytes >= _HEAP_BLOCK else int((1 + _GAPS) * nbytes)


def _temporary(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the copies that the libraries make of the inputs of a product: in another order, or wider."""
    name = str(func).removeprefix("aten.").partition(".")[0]
    if name not in _PRODUCTS:
        return 0
    inputs = [tensor for tensor in _tensors(args) if tensor.is_floating_point()]
    copied = [
        each.numel() * max(each.itemsize, 4)
        for each in inputs
        if not each.is_contiguous() or each.itemsize < 4 or name == "convolution"
    ]
    return sum(copied)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for each in value for found in _tensors(each)] if isinstance(value, list | tuple) else []
