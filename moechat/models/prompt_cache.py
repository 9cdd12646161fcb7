"""Keep the attention cache of a conversation, so that its next turn computes only what is new."""

from __future__ import annotations

from typing import Any

from moechat.models.attention_cache import can_crop


class PromptCache:
    """The keys and values of the last answer's tokens.

    A longer prompt that goes on from that answer takes them over. A prompt that merely begins alike does not:
    the same prompt with the same seed must give the same answer whatever was asked before, and a prefill in
    two parts rounds differently from one in a single pass.
    """

    # Invariant: when _cache is not None it holds exactly _tokens, and nobody else holds it.
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._prompt = 0
        self._cache: Any = None

    def take(self, tokens: list[int]) -> tuple[Any, int]:
        """Hand over what serves as the beginning of ``tokens``.

        Returns:
            The cache, or ``None``, and how many of the tokens it holds (always fewer than all of them). The
            caller owns the cache from now on; it comes back through :meth:`keep`.
        """
        cache, known, prompt = self._cache, self._tokens, self._prompt
        self.drop()
        if cache is None:
            return None, 0
        common = 0
        for ours, theirs in zip(known, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if common <= prompt:
            return None, 0
        if common < len(known):
            cache.crop(common - len(known))  # negative: how many to remove from the end
        return cache, common

    def keep(self, cache: Any, tokens: list[int], prompt: int) -> None:
        """Remember a cache that holds ``tokens``, of which the first ``prompt`` were the prompt.

        Layers may hold more, and are cut to that length; where that cannot be done nothing is remembered,
        nor where there is no more than the prompt or a part of it.
        """
        self.drop()
        if len(tokens) <= prompt or not can_crop(cache):
            return
        excess = [layer.get_seq_length() - len(tokens) for layer in cache.layers]
        if not excess or min(excess) < 0:
            return
        for layer, tail in zip(cache.layers, excess, strict=True):
            layer.crop(-tail)
        self._cache, self._tokens, self._prompt = cache, tokens, prompt

    def drop(self) -> None:
        """Forget everything."""
        self._cache, self._tokens, self._prompt = None, [], 0
