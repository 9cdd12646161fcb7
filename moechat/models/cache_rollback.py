"""Rolls an attention cache back from draft tokens that were rejected.

Keys and values are cut, also those of a sliding window, whose memory still has what left it. States of linear
attention and convolutions are overwritten by every token; they go back to copies of what was there before.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.state_layer import STATES, StateLayer

_KEYS = (ReservedLayer, WindowLayer)
_KNOWN = (*_KEYS, StateLayer, *EMPTY)


def make_room(cache: Any, count: int) -> bool:
    """Make room for so many tokens; returns whether they fit and can be rolled back."""
    if type(cache) is not DynamicCache or not all(type(layer) in _KNOWN for layer in cache.layers):
        return False
    return all(layer.make_room(count) for layer in cache.layers if isinstance(layer, _KEYS))


def has_states(cache: Any) -> bool:
    """Whether a cache has states, so that it goes back to copies."""
    return any(type(layer) is StateLayer for layer in getattr(cache, "layers", ()))


class CacheRollback:
    """Draft tokens at the end of one attention cache at a time. Keeps the memory of copies between passes."""

    # Invariant: _cache is None while no cache has such tokens; else it had _before tokens without them, and
    # _copies are the states that it had then. It is set once they are, and only its owner's calls change it.
    def __init__(self) -> None:
        self._cache: Any = None
        self._before = 0
        self._copies: dict[tuple[int, str, int], torch.Tensor] = {}

    @property
    def in_use(self) -> bool:
        """Whether a cache has such tokens."""
        return self._cache is not None

    @torch.inference_mode()
    def begin(self, cache: Any, count: int) -> bool:
        """Make room for a pass of so many tokens, of which the last may be rejected.

        REQUIRES: no other cache has such tokens.

        Returns:
            Whether they fit and can be rolled back.
        """
        assert not self.in_use
        if not make_room(cache, count):
            return False
        held = set()
        for number, layer in enumerate(cache.layers):
            for kind in STATES if type(layer) is StateLayer else ():
                for place, state in getattr(layer, kind).items():
                    if state is not None:
                        held.add((number, kind, place))
                        self._copy((number, kind, place), state)
        for gone in self._copies.keys() - held:
            del self._copies[gone]
        self._cache, self._before = cache, cache.get_seq_length()
        return True

    @torch.inference_mode()
    def keep(self, cache: Any, tokens: int) -> int:
        """Keep some of the tokens of a cache, and roll it back from the others.

        Args:
            cache: Of :meth:`begin`; nothing happens to another one.
            tokens: Those that the cache should hold, at least as many as before the pass.

        Returns:
            Tokens that it holds now: those; or, with states, those before the pass unless all stay.
        """
        if self._cache is not cache:
            return tokens
        excess = cache.get_seq_length() - tokens
        if excess > 0:
            if self._copies:
                excess, tokens = cache.get_seq_length() - self._before, self._before
            for layer in cache.layers:
                if isinstance(layer, _KEYS):
                    layer.roll_back(excess)
            for (number, kind, place), state in self._copies.items():
                getattr(cache.layers[number], kind)[place].copy_(state)
        self._cache = None
        return tokens

    def forget(self, cache: Any) -> None:
        """A cache has no such tokens, or is not to be used any more; nothing happens to another one."""
        if self._cache is cache:
            self._cache = None

    def release(self) -> None:
        """Free the memory of the copies, unless a cache has such tokens."""
        if not self.in_use:
            self._copies = {}

    def _copy(self, place: tuple[int, str, int], state: torch.Tensor) -> None:
        held = self._copies.get(place)
        if held is None or held.shape != state.shape or held.dtype is not state.dtype:
            held = self._copies[place] = torch.empty_like(state)
        held.copy_(state)
