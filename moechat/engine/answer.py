"""How the tokens of an answer are chosen, how they become text, and where the answer ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moechat.engine.grammar import Constraint
from moechat.engine.stop_text import StopText
from moechat.errors import UsageError
from moechat.models.sampling import Sampler, SamplingSettings
from moechat.models.text import TextStream
from moechat.steps import MOST_DRAFT, FinishReason, Step, TokenLogprob
from moechat.validation import require_number, require_whole, shown

_MOST_STOPS, _LONGEST_STOP = 64, 4096
_MOST_BIAS = 100.0


@dataclass(frozen=True)
class AnswerSettings:
    """How one answer is generated.

    Attributes:
        limit: Most tokens to draw.
        sampling: How they are drawn.
        seed: Of the draws.
        stops: Texts that end the answer, see :func:`stop_texts`.
        logprobs: Number of likeliest tokens given with each token; ``None``: no probabilities at all.
        bias: Added to logits, see :func:`token_bias`.
        constraint: The grammar at its beginning; ``None`` for free text.
        draft_tokens: Most tokens that are guessed at a time.
        expected: Tokens that the answer may repeat.
    """

    limit: int
    sampling: SamplingSettings
    seed: int
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None
    draft_tokens: int = MOST_DRAFT
    expected: Sequence[int] = ()


def stop_texts(value: object, name: str = "stop") -> tuple[str, ...]:
    """Texts that end an answer.

    Args:
        value: A text, a list of texts, or ``None``.
        name: For messages.

    Raises:
        UsageError: One is empty, too long or no text, or there are too many.
    """
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise UsageError(f"{name} is {shown(value)}; it must be a text or a list of texts")
    if len(texts) > _MOST_STOPS:
        raise UsageError(f"{name} has {len(texts)} texts; there may be at most {_MOST_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_STOP:
            raise UsageError(
                f"{name} contains {shown(text)}; it must be a text of 1 to {_LONGEST_STOP} characters"
            )
    return tuple(texts)


def token_bias(value: Mapping[Any, float] | None, vocabulary: int) -> dict[int, float]:
    """Numbers added to the logits of tokens.

    Args:
        value: By token id, which may be a text of digits, as in JSON.
        vocabulary: Number of tokens.

    Raises:
        UsageError: An id is none of the vocabulary, or a number is not between -100 and 100.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias is {shown(value)}; it must be an object: a number for each token id")
    found = {}
    for key, number in value.items():
        token = (
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        )
        token = require_whole("a token id of logit_bias", token, 0, vocabulary - 1)
        found[token] = float(require_number(f"logit_bias of {token}", number, -_MOST_BIAS, _MOST_BIAS))
    return found


class TokenChooser:
    """Draws the tokens of one answer."""

    def __init__(self, settings: AnswerSettings) -> None:
        self._settings = settings
        self._sampler = Sampler(settings.sampling, settings.seed, settings.bias)
        self._memory: torch.Tensor | None = None

    def choose(self, history: torch.Tensor, logits: torch.Tensor) -> Step:
        """Choose the next token.

        Args:
            history: int64 ``[1, tokens]``, prompt and answer so far.
            logits: ``[vocab]`` after the last token.

        Returns:
            A step without text.

        Raises:
            MoechatError: The logits are not finite, or the grammar cannot go on.
        """
        logits = self._on_host(logits)
        constraint = self._settings.constraint
        token = self._sampler.draw(history, logits, None if constraint is None else constraint.forbidden())
        if constraint is not None:
            constraint.accept(token)
        if self._settings.logprobs is None:
            return Step("", token)
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(self._settings.logprobs, len(logprobs)))
        top = tuple(map(TokenLogprob, ids.tolist(), values.tolist()))
        return Step("", token, logprob=float(logprobs[token]), top_logprobs=top)

    def _on_host(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in float32, in memory that the next token's overwrite.

        New memory of this size would come from the system for every token, page by page, which takes longer
        than the rest. A GPU converts them, and copies them to pinned memory without staging.
        """
        logits = logits.detach()
        if logits.is_cpu and logits.dtype is torch.float32:
            return logits
        if self._memory is None or self._memory.shape != logits.shape:
            with torch.inference_mode(False):
                self._memory = _host_memory(logits.shape, pinned=not logits.is_cpu)
        # Conversions of a copy from a GPU would be made on the CPU.
        return self._memory.copy_(logits if logits.is_cpu else logits.float())

    @property
    def complete(self) -> bool:
        """The grammar allows no further token."""
        constraint = self._settings.constraint
        return constraint is not None and constraint.finished


def _host_memory(shape: torch.Size, *, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=torch.float32, pin_memory=pinned)
    except RuntimeError:  # the experts may have taken all that the system lets be pinned
        return torch.empty(shape, dtype=torch.float32)


class AnswerText:
    """Turns the tokens of one answer into text, and finds its end.

    Args:
        tokenizer: Of the model, or ``None``: then there is no text.
        stops: Texts that end the answer. One that is a special token as a whole ends it too, though special
            tokens are no part of the text.
        stop_tokens: Token ids that end it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], stop_tokens: frozenset[int]) -> None:
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._stops = StopText(stops)
        self._stop_tokens = stop_tokens
        self._marks: dict[int, str] = {}
        if tokenizer is not None and stops:
            special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
            self._marks = {token: text for text, token in special if text in stops}

    def step(self, chosen: Step, *, complete: bool, last: bool) -> Step:
        """The step with its text and, if it is the last one, its reason.

        Args:
            chosen: The token, from :meth:`TokenChooser.choose`.
            complete: Nothing may follow.
            last: The limit of tokens is reached.
        """
        token = chosen.token_id
        mark = self._marks.get(token)
        ended = token in self._stop_tokens or mark is not None
        reason: FinishReason | None = "stop" if ended or complete else "length" if last else None
        if self._stream is None:
            return _with(chosen, "", reason, mark)
        added = "" if ended else self._stream.push(token)
        if reason:
            added += self._stream.flush()
        text, stop = self._stops.push(added)
        if stop is not None:
            return _with(chosen, text, "stop", stop)
        return _with(chosen, text + self._stops.flush() if reason else text, reason, mark)


def _with(chosen: Step, text: str, reason: FinishReason | None, stop: str | None) -> Step:
    return Step(text, chosen.token_id, reason, stop, chosen.logprob, chosen.top_logprobs)
