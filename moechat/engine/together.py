"""Advances several answers at a time, with their next tokens computed in one pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moechat.engine.decoder import Decoder
from moechat.engine.running_answer import Answer
from moechat.steps import Step


class AnswerGivenUp(BaseException):
    """Raised by a ``progress`` function to end its answer in the middle of the prompt."""


@dataclass(frozen=True)
class Advanced:
    """What became of an answer in one round.

    Attributes:
        answer: The answer.
        step: Its next token; ``None`` after a part of its prompt, and with an error.
        error: Why it has ended without a last token: an error, or :class:`AnswerGivenUp`.
    """

    answer: Answer
    step: Step | None = None
    error: BaseException | None = None


def advance_all(decoder: Decoder, answers: Sequence[Answer]) -> Iterator[Advanced]:
    """Compute one token, or one part of the prompt, of each answer, one after the other.

    If you stop iterating, the answers that were not reached stay as they are.

    Args:
        decoder: Of all answers.
        answers: None twice; those that have ended are left out.

    Returns:
        What became of each, as soon as it is known; an error of one does not end the others.
    """
    running = [answer for answer in answers if not answer.ended]
    try:
        compute_together(decoder, running)
    except Exception as error:
        for answer in running:
            if answer.ended:
                yield Advanced(answer, error=error)
    for answer in running:
        if answer.ended:
            continue
        try:
            step = next(answer)
        except (Exception, AnswerGivenUp) as error:
            yield Advanced(answer, error=error)
        else:
            yield Advanced(answer, step)


def compute_together(decoder: Decoder, answers: Sequence[Answer]) -> None:
    """Compute the next tokens' passes of several answers in as few passes as possible.

    Advancing an answer then only draws its token, which is the one that it would draw alone. Answers whose
    next pass is one of a prompt are left alone; so are all where the model cannot do it.

    Args:
        decoder: Of all answers.
        answers: None twice.

    Raises:
        MoechatError: As :meth:`PassRunner.run`; all answers of the pass are closed then.
    """
    ready = [(answer, token) for answer in answers if (token := answer.next_token) is not None]
    most = decoder.passes.most_together
    for begin in range(0, len(ready) if most else 0, max(1, most)):
        group = ready[begin : begin + most]
        if len(group) < 2 or not _compute_group(decoder, group):
            return


def _compute_group(decoder: Decoder, group: list[tuple[Answer, int]]) -> bool:
    """Compute a pass for a token of each answer; returns whether that is possible."""
    answers = [answer for answer, _ in group]
    decoder.meter.start()
    begun = time.perf_counter()
    try:
        for answer in answers:
            answer.begin_pass()
        rows = decoder.passes.run_together(
            [token for _, token in group], [answer.cache for answer in answers]
        )
        if rows is None:
            for answer in answers:
                answer.give_back()
            return False
        seconds = (time.perf_counter() - begun) / len(group)
        shares = decoder.meter.add_shares([answer.stats for answer in answers])
        for answer, row, stats in zip(answers, rows, shares, strict=True):
            answer.take(row, stats, seconds)
    except BaseException:
        # Also between the pass and the last answer: a cache may hold a token unknown to its answer.
        for answer in answers:
            answer.close()
        raise
    return True
