"""What an answer consists of while it is generated: steps of one token each. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]
# The token of a step whose server does not tell it.
NO_TOKEN = -1
# Likeliest tokens that a step may have; as many as OpenAI's API allows to ask for.
MOST_LOGPROBS = 20
# Most tokens that are guessed at a time, see :mod:`moechat.engine.drafts`.
MOST_DRAFT = 15


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability.

    The probability is that of the model's logits, before temperature, penalties, bias and grammar.

    Attributes:
        token_id: The token.
        logprob: At most 0.
    """

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Step:
    """One generated token.

    Attributes:
        text: Text that became complete; may be empty while a multi-byte character is not, or while the text
            may begin one of ``stop``.
        token_id: The token; :data:`NO_TOKEN` where another engine does not tell it.
        finish_reason: ``None`` except for the last step: ``stop`` (the model ended, a text of ``stop``
            appeared, or the grammar is complete) or ``length`` (a limit was reached).
        stop: The text of ``stop`` that ended the answer.
        logprob: Of the token, as in :class:`TokenLogprob`; ``None`` unless ``logprobs`` were asked for.
        top_logprobs: The likeliest tokens, the likeliest first.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None
    stop: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
