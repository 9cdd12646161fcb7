"""Rolls an attention cache back from draft tokens that were rejected.

Keys and values are cut, also those of a sliding window, whose memory still has what left it. States of linear
attention and convolutions are overwritten by every token; they go back to copies, which are made before each
token of a short draft, or before the pass of a longer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.state_layer import STATES, CopiedStates, StateLayer

_KEYS = (ReservedLayer, WindowLayer)
_KNOWN = (*_KEYS, StateLayer, *EMPTY)

_State = tuple[int, str, int]  # number of the layer, kind, and number of the state


def make_room(cache: Any, count: int) -> bool:
    """Make room for so many tokens; returns whether they fit and can be rolled back."""
    if type(cache) is not DynamicCache or not all(type(layer) in _KNOWN for layer in cache.layers):
        return False
    return all(layer.make_room(count) for layer in cache.layers if isinstance(layer, _KEYS))


def has_states(cache: Any) -> bool:
    """Whether a cache has states, so that it goes back to copies."""
    return any(type(layer) is StateLayer for layer in getattr(cache, "layers", ()))


class CacheRollback:
    """Draft tokens at the end of one attention cache at a time. Keeps the memory of copies between passes.

    Args:
        kept: Most tokens of a draft before each of which states are copied; it takes memory for so many. Of a
            longer draft there is one copy, from before the pass.
    """

    # Invariant: _cache is None while no cache has such tokens; else it had _known tokens without them.
    # _copies[i], by layer, kind and number, are the states before the i-th of them; or, if _all, _copies[0]
    # are those before the pass, when the cache had _before tokens. _cache is set last, and only its owner's
    # calls change it.
    def __init__(self, kept: int = 1) -> None:
        self.kept = kept
        self._cache: Any = None
        self._before = self._known = 0
        self._all = False
        self._copies: list[dict[_State, torch.Tensor]] = []
        self._used = 0

    @property
    def in_use(self) -> bool:
        """Whether a cache has such tokens."""
        return self._cache is not None

    @torch.inference_mode()
    def begin(self, cache: Any, known: int, guesses: int) -> bool:
        """Make room for a pass of known tokens and of guesses behind them, which may be rejected.

        REQUIRES: no other cache has such tokens.

        Returns:
            Whether they fit and can be rolled back.
        """
        assert not self.in_use
        if not make_room(cache, known + guesses):
            return False
        states = dict(_states_of(cache))
        self._all = guesses > self.kept
        self._used = (1 if self._all else guesses) if states else 0
        for number in range(self._used):
            self._take_memory(number, states)
        if self._all:
            for place, state in states.items():
                self._copies[0][place].copy_(state)
        self._before = cache.get_seq_length()
        self._known = self._before + known
        self._cache = cache
        return True

    def copies(self, cache: Any) -> list[dict[int, CopiedStates]]:
        """Where the pass of :meth:`begin` has to copy states before each of its last tokens; by layer."""
        if self._cache is not cache or self._all:
            return []
        found: list[dict[int, CopiedStates]] = []
        for copies in self._copies[: self._used]:
            layers: dict[int, dict[tuple[str, int], torch.Tensor]] = {}
            for (number, kind, place), copy in copies.items():
                layers.setdefault(number, {})[kind, place] = copy
            found.append(
                {number: CopiedStates(cache.layers[number], each) for number, each in layers.items()}
            )
        return found

    @torch.inference_mode()
    def keep(self, cache: Any, tokens: int) -> int:
        """Keep some of the tokens of a cache, and roll it back from the others.

        Args:
            cache: Of :meth:`begin`; nothing happens to another one.
            tokens: Those that the cache should hold, at least the known ones.

        Returns:
            Tokens that it holds now: those; or those before the pass, if the draft was longer than
            :attr:`kept`, the cache has states and not all stay.
        """
        if self._cache is not cache:
            return tokens
        if cache.get_seq_length() > tokens:
            if self._used:
                right = 0 if self._all else tokens - self._known
                tokens = self._before if self._all else tokens
                for (number, kind, place), state in self._copies[right].items():
                    getattr(cache.layers[number], kind)[place].copy_(state)
            excess = cache.get_seq_length() - tokens
            for layer in cache.layers:
                if isinstance(layer, _KEYS):
                    layer.roll_back(excess)
        self._cache = None
        return tokens

    def forget(self, cache: Any) -> None:
        """A cache has no such tokens, or is not to be used any more; nothing happens to another one."""
        if self._cache is cache:
            self._cache = None

    def release(self) -> None:
        """Free the memory of the copies, unless a cache has such tokens."""
        if not self.in_use:
            self._copies = []

    def _take_memory(self, number: int, states: dict[_State, torch.Tensor]) -> None:
        if number == len(self._copies):
            self._copies.append({})
        held = self._copies[number]
        for gone in held.keys() - states.keys():
            del held[gone]
        for place, state in states.items():
            copy = held.get(place)
            if copy is None or copy.shape != state.shape or copy.dtype is not state.dtype:
                held[place] = torch.empty_like(state)


def _states_of(cache: Any) -> Iterator[tuple[_State, torch.Tensor]]:
    for number, layer in enumerate(cache.layers):
        for kind in STATES if type(layer) is StateLayer else ():
            for place, state in getattr(layer, kind).items():
                if state is not None:
                    yield (number, kind, place), state
