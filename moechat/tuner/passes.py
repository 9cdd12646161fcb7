"""Decodes texts of its own with a model, and measures the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_PROMPT_TOKENS = 32
_SEED = 1
# Different kinds of text use different experts.
_TEXTS = (
    "The harbour was quiet in the early morning. Two fishermen were mending a net on the quay, and one of "
    "them told the other what he had seen the night before, far out, where green water turns to black.",
    "Write a function in Python that reads a text file and counts how often each word occurs.\n\n"
    "def count_words(path):\n    counts = {}\n    with open(path, encoding='utf-8') as file:\n",
    "Question: Why does the sky look blue during the day and red in the evening?\n\nAnswer: Light from the "
    "sun is scattered by the molecules of the air, and short waves are scattered more than long ones.",
    "Here is what we agreed on in the meeting:\n1. The budget for the next quarter stays as it is.\n"
    "2. Travel has to be approved one week before.\n3. The new office opens in",
)

# One pass: token ids [1, n] and an attention cache in; logits [vocabulary] of the last token, on the device
# that computes, and the cache out.
Forward = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]


class Sequences:
    """Short texts, one after the other: the beginning is given, the model goes on by itself.

    The tokens are drawn with a fixed seed, so the text is the same with every plan.

    Args:
        forward: Computes a pass.
        new_cache: Makes an empty attention cache.
        encode: Tokens of a text; ``None`` where the model has no tokenizer: then tokens are drawn.
        vocabulary: Number of tokens.
        stop: Tokens that end a text.
        most_tokens: Most tokens of one text, prompt included; at least 2.

    Attributes:
        MOST_TOKENS: Most tokens of any text.
    """

    MOST_TOKENS = 160

    def __init__(
        self,
        forward: Forward,
        new_cache: Callable[[], Any],
        encode: Callable[[str], Sequence[int]] | None,
        *,
        vocabulary: int,
        stop: frozenset[int] = frozenset(),
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self._forward = forward
        self._new_cache = new_cache
        self._generator = torch.Generator().manual_seed(_SEED)
        self._vocabulary = vocabulary
        self._stop = stop
        self._most = min(most_tokens, self.MOST_TOKENS)
        length = max(1, min(_PROMPT_TOKENS, self._most // 2))
        texts = [self._random(length) if encode is None else list(encode(text)) for text in _TEXTS]
        self._prompts = [(tokens or self._random(length))[:length] for tokens in texts]
        self._number = -1
        self._given: list[int] = []
        self._cache: Any = None
        self._length = 0
        self._next = -1
        self._begin()

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a prompt."""
        return max(map(len, self._prompts))

    def prefill(self) -> float:
        """Begin the next text and compute its prompt in one pass; returns the seconds."""
        self._begin()
        given = self._given
        self._given = []
        return self._pass(given)

    def decode(self) -> float:
        """Compute one more token, of the prompt or of the continuation; returns the seconds."""
        if self._length >= self._most or (self._next in self._stop and not self._given):
            self._begin()
        return self._pass([self._given.pop(0)] if self._given else [self._next])

    def _random(self, count: int) -> list[int]:
        drawn: list[int] = torch.randint(self._vocabulary, (count,), generator=self._generator).tolist()
        return drawn

    def _begin(self) -> None:
        self._number += 1
        self._given = list(self._prompts[self._number % len(self._prompts)])
        self._cache = None
        self._length = 0
        self._next = -1

    def _pass(self, tokens: Sequence[int]) -> float:
        if self._cache is None:
            self._cache = self._new_cache()
        ids = torch.tensor([list(tokens)], dtype=torch.int64)
        started = time.perf_counter()
        logits, self._cache = self._forward(ids, self._cache)
        logits = logits.cpu()  # waits for a GPU: the token is computed when its logits are here
        seconds = time.perf_counter() - started
        self._length += len(tokens)
        likelihood = torch.softmax(logits.float(), 0)
        self._next = int(torch.multinomial(likelihood, 1, generator=self._generator))
        return max(seconds, 1e-9)
