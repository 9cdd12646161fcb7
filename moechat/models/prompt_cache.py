"""Keeps the attention cache of a conversation, so that the next turn computes only new tokens."""

from __future__ import annotations

from typing import Any

from moechat.models.attention_cache import can_crop


class PromptCache:
    """Keys and values of the tokens of the last prompt and answer.

    A prompt that continues that answer reuses them. A prompt that only shares a beginning does not: the same
    prompt with the same seed must give the same answer whatever came before, and a prefill in two parts
    rounds differently from a single pass.
    """

    # Invariant: a _cache that is not None holds exactly _tokens and has no other owner.
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._prompt = 0
        self._cache: Any = None

    def take(self, tokens: list[int]) -> tuple[Any, int]:
        """Take the cache out if it holds a usable prefix of ``tokens``.

        Returns:
            The cache, or ``None``, and the length of the prefix, which is shorter than ``tokens``. The caller
            owns the cache and returns it with :meth:`keep`.
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
        """Store a cache that holds ``tokens``, of which the first ``prompt`` were the prompt.

        Layers that hold more are cropped to that length. The cache is dropped if it cannot be cropped, or
        holds no token of an answer.
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
        """Discard the stored cache."""
        self._cache, self._tokens, self._prompt = None, [], 0
