"""Computes a decoder layer for one token, up to its experts, in a single native call.

For one token, the overhead of torch and Python between the parts of a layer (modules, views, copies into the
cache, sums) exceeds the cost of some parts. The same call takes one token of each of several attention
caches, or successive tokens of one: weights are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.cache_argument import CACHE
from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.decode.attention import hides_nothing
from moechat.models.decode.probe import hooks_of
from moechat.models.decode.products import row_product
from moechat.models.decode.shared_expert import SharedBlock
from moechat.models.decode.wiring import Wiring, only_known_arguments
from moechat.models.skeleton import EXPERTS_RUNNER

Forward = Callable[..., Any]
_Step = (
    _native.LayerStep
    | _native.LatentStep
    | _native.DeltaStep
    | _native.ShortConvStep
    | _native.MambaStep
    | _native.FeedLayer
)
# Cosines and sines of a model without rotary angles.
NO_ANGLES = torch.empty(1, 1, 0), torch.empty(1, 1, 0)
# Types of the layers of caches with keys and values.
SLOTS = (ReservedLayer, WindowLayer)
# (hidden states [1, tokens, hidden], layer of each token's cache, cosines, sines) -> hidden states.
Decode = Callable[[torch.Tensor, Sequence[Any], torch.Tensor, torch.Tensor], torch.Tensor | None]
# (first arguments of the native step, residual [1, tokens, hidden]) -> hidden states.
Finish = Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]


def layer_angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the family's code of a layer gets for these cosines and sines: nothing for :data:`NO_ANGLES`."""
    return (cos, sin) if cos.numel() else None


def native_part(module: nn.Module | None) -> Any:
    """The native object behind the ``forward`` of a norm, router or feed-forward part; ``None`` if torch
    computes it.
    """
    forward = None if module is None else vars(module).get("forward")
    return None if forward is None else getattr(forward, "__dict__", {}).get("run")


def is_native_router(module: nn.Module | None) -> bool:
    """Whether native code computes a router."""
    return isinstance(native_part(module), _native.Routing)


def forwards_of(wiring: Wiring) -> tuple[Any, ...]:
    """What replaces the modules of a layer: it keeps memory alive that native parts read."""
    modules = [wiring.before, wiring.after, *wiring.attention.modules(), *wiring.mlp.modules()]
    return tuple(forward for module in modules if (forward := vars(module).get("forward")) is not None)


@dataclass(frozen=True)
class Feed:
    """What follows the mixer of a layer, up to its routed experts.

    Attributes:
        run: Its native part.
        mlp: The feed-forward part; it is called if :attr:`experts` is ``None``.
        experts: The routed experts, if all that is beside them is native.
        chosen: Experts of a token.
        shared: It has a shared expert.
        exact: ``run`` gives the bits of the modules.
        bypassed: Modules that are not called, beside those of the wiring.
        ends: There is none: the layer ends with its mixer.
    """

    run: _native.FeedStep
    mlp: nn.Module
    experts: nn.Module | None
    chosen: int
    shared: bool
    exact: bool
    bypassed: tuple[nn.Module, ...] = ()
    ends: bool = False

    def finish(
        self,
        step: _Step,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> Finish:
        """A function that computes a layer with its native step, and then its experts."""
        if self.ends:
            assert not isinstance(step, _native.FeedLayer)
            mix: Callable[..., None] = step.mix

            def mixed(given: tuple[Any, ...], residual: torch.Tensor) -> torch.Tensor:
                mix(*given, residual.data_ptr())
                return residual

            return mixed
        # Called once per layer and decoded token; closure variables are faster than attributes.
        route: Callable[..., None] = step.route
        normalise: Callable[..., None] = step.normalise
        add, mlp, experts = self.run.add, self.mlp, self.experts
        most = _native.MOST_STEP_TOKENS
        # Inputs of the experts, overwritten for each token; the system assigns memory to the rows in use.
        # Inference tensors could not be used in other passes.
        with torch.inference_mode(False):
            x = torch.empty((most, hidden_size), dtype=torch.float32)
            index = torch.empty((most, self.chosen), dtype=torch.int64)
            weights = torch.empty((most, self.chosen), dtype=torch.float32)
            shared = torch.empty((most if self.shared else 0, hidden_size), dtype=dtype)
        at = x.data_ptr(), index.data_ptr(), weights.data_ptr(), shared.data_ptr()
        one = x[:1], index[:1], weights[:1]

        def routed(given: tuple[Any, ...], residual: torch.Tensor) -> torch.Tensor:
            tokens, place = residual.shape[1], residual.data_ptr()
            route(*given, place, *at)
            rows = one if tokens == 1 else (x[:tokens], index[:tokens], weights[:tokens])
            summed = vars(experts)[EXPERTS_RUNNER].forward(*rows)
            add(summed.data_ptr(), at[3], place, tokens)
            return residual

        def normed(given: tuple[Any, ...], residual: torch.Tensor) -> torch.Tensor:
            rows = torch.empty_like(residual)
            normalise(*given, residual.data_ptr(), rows.data_ptr())
            out = mlp(rows)
            added: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return residual + added

        routed.__dict__["shared"] = shared  # keeps its memory alive
        return normed if experts is None else routed


def native_feed(wiring: Wiring, block: SharedBlock | None) -> Feed | None:
    """The native part of a layer behind its mixer; ``None`` if its norm is not native.

    Args:
        wiring: Of the layer.
        block: What its feed-forward part is, if it is known to have a shared expert.

    Raises:
        ValueError: The parts do not fit together.
    """
    after = native_part(wiring.after)
    if not isinstance(after, _native.RmsNorm):
        return None
    if wiring.router is not None and wiring.experts is not None:
        run = _native.FeedStep(after, native_part(wiring.router), None, None)
        return Feed(run, wiring.mlp, wiring.experts, _chosen(wiring.router), shared=False, exact=True)
    if block is not None:
        router, shared = native_part(block.router), native_part(block.shared.module)
        gate = None if block.gate is None else row_product(block.gate)
        known = isinstance(router, _native.Routing) and isinstance(shared, _native.Mlp)
        if known and (gate is not None) == (block.gate is not None):
            run = _native.FeedStep(after, router, shared, gate, None, block.scale)
            # torch's sigmoid rounds in another way.
            exact, bypassed = gate is None, tuple(block.block.modules())
            chosen = _chosen(block.router)
            return Feed(run, block.block, block.experts, chosen, shared=True, exact=exact, bypassed=bypassed)
    run = _native.FeedStep(after, None, None, None)
    return Feed(run, wiring.mlp, None, 0, shared=False, exact=True)


def ended_feed(norm: _native.RmsNorm, mlp: nn.Module) -> Feed:
    """Of a layer that ends with its mixer.

    Args:
        norm: Of its inputs.
        mlp: Stands for what it does not have.
    """
    run = _native.FeedStep(norm, None, None, None, ends=True)
    return Feed(run, mlp, None, 0, shared=False, exact=True, ends=True)


def _chosen(router: nn.Module) -> int:
    found: int = vars(router)["forward"].chosen
    return found


@dataclass(frozen=True)
class Places:
    """How the layer of an attention cache takes a token: in two steps, so that none changes if another one
    does not take its own.

    Attributes:
        find: What :attr:`take` needs of such a layer; ``None``: it does not take a token.
        take: The place that the native step gets. A layer with keys and values has the token then.
    """

    find: Callable[[Any], Any]
    take: Callable[[Any], tuple[int, ...]]

    def find_all(self, layers: Sequence[Any]) -> list[Any] | None:
        """:attr:`find` for each of some layers; ``None`` if one of them does not take a token."""
        found = list(map(self.find, layers))
        return None if any(each is None for each in found) else found


@dataclass(frozen=True)
class NativeStep:
    """A decoder layer; ``forward.kept`` of a recognised one.

    Attributes:
        wiring: Its modules.
        feed: What follows its mixer.
        run: Its native part.
        dtype: Type of hidden states and cache.
        hidden_size: Hidden size of the model.
        angles: Rotary angles of a token; 0: the layer has none.
        index: Of the layer in the attention cache.
        slots: Types of the layers of a cache that may take its tokens.
        exact: ``run`` gives the bits of the modules: it has no gates, since torch's sigmoid rounds in another
            way.
        decode: Computes the layer. REQUIRES: :meth:`takes`, for each token; a token attends to all keys of
            its cache; at most :data:`moechat._native.MOST_STEP_TOKENS`. Its result is ``None``, without any
            change, if the layer of a cache does not take its token.
        places: How the layers of caches take tokens.
        first_slot: Makes a layer of a cache for a trial: of a number of tokens, with random numbers.
        keeps: What holds the memory that ``run`` reads.
    """

    wiring: Wiring
    feed: Feed
    run: _Step
    dtype: torch.dtype
    hidden_size: int
    angles: int
    index: int
    slots: tuple[type, ...]
    exact: bool
    decode: Decode
    places: Places
    first_slot: Callable[[int, torch.Generator], Any]
    keeps: tuple[Any, ...]

    def takes(self, hidden: torch.Tensor, angles: Any) -> bool:
        """Whether hidden states and (cosines, sines) are those of one token, as the step reads them."""
        if angles is None and not self.angles:
            angles = NO_ANGLES
        if type(angles) is not tuple or len(angles) != 2:
            return False
        cos, sin = angles
        return bool(
            hidden.dtype is self.dtype
            and hidden.shape == (1, 1, self.hidden_size)
            and hidden.is_contiguous()
            and hidden.is_cpu
            and (
                not self.angles
                or (
                    cos.dtype is sin.dtype is self.dtype
                    and cos.shape == sin.shape == (1, 1, self.angles)
                    and cos.is_contiguous()
                    and sin.is_contiguous()
                )
            )
        )

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed."""
        return (*self.wiring.hooks(), *hooks_of(self.feed.bypassed))

    def forward(self, layer: Any) -> Forward:
        """A ``forward`` for the layer: natively for a token behind a cache, else its own."""
        own, index, hooks, takes, decode = layer.forward, self.index, self.hooks(), self.takes, self.decode

        def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
            cache: Any = named.get(CACHE)
            angles: Any = named.get("position_embeddings")
            out = None
            if (
                hides_nothing(named.get("attention_mask"))
                and type(cache) is DynamicCache
                and index < len(cache.layers)
                and all(each is None for each in rest)
                and not any(hooks)
                and only_known_arguments(named)
                and takes(hidden_states, angles)
            ):
                out = decode(hidden_states, (cache.layers[index],), *(angles or NO_ANGLES))
            return own(hidden_states, *rest, **named) if out is None else out

        forward.__dict__["kept"] = self
        return forward


def first_keys(
    kv_heads: int, dim: int, dtype: torch.dtype
) -> Callable[[int, torch.Generator], ReservedLayer]:
    """:attr:`NativeStep.first_slot` of a step with such keys and values."""

    def first_slot(tokens: int, generator: torch.Generator) -> ReservedLayer:
        slot = ReservedLayer(2 * tokens)
        keys, values = torch.randn((2, 1, kv_heads, tokens, dim), generator=generator).to(dtype)
        slot.update(keys, values)
        return slot

    return first_slot


def key_places(slots: tuple[type, ...], shape: tuple[int, int, torch.dtype, int], *, packed: bool) -> Places:
    """:attr:`NativeStep.places` of a step that appends keys and values to layers of caches.

    Args:
        slots: Types of the layers that may take a token.
        shape: Arguments of :meth:`moechat.models.cache_layers.ReservedLayer.takes_token`.
        packed: Whether the step writes packed rows too.
    """

    def find(layer: Any) -> Any:
        fits = type(layer) in slots and (packed or not layer.packed)
        return layer if fits and layer.takes_token(*shape) else None

    return Places(find, lambda layer: layer.append_place())


def decode_with_states(finish: Finish, places: Places) -> Decode:
    """:attr:`NativeStep.decode` of a step that gets what its places are, without angles.

    Args:
        finish: Of :meth:`Feed.finish`.
        places: Of the step.
    """
    empty_like, find_all = torch.empty_like, places.find_all

    def decode(hidden: torch.Tensor, layers: Sequence[Any], *_: torch.Tensor) -> Any:
        found = find_all(layers)
        return None if found is None else finish((hidden.data_ptr(), found), empty_like(hidden))

    return decode


def decode_at_places(finish: Finish, places: Places) -> Decode:
    """:attr:`NativeStep.decode` of a step that appends keys and values to layers of caches.

    Args:
        finish: Of :meth:`Feed.finish`.
        places: Of :func:`key_places`.
    """
    empty_like, find_all, take = torch.empty_like, places.find_all, places.take

    def decode(hidden: torch.Tensor, layers: Sequence[Any], cos: torch.Tensor, sin: torch.Tensor) -> Any:
        found = find_all(layers)
        if found is None:
            return None
        taken = list(map(take, found))
        return finish((hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), taken), empty_like(hidden))

    return decode
