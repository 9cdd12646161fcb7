"""Asks the model: what of the conversation it is told, and how one answer is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from moechat.chat.reply import opens_thought
from moechat.errors import PromptTooLongError

if TYPE_CHECKING:
    from moechat import Engine, Step
    from moechat.chat.conversation import Conversation
    from moechat.chat.settings import Generation

# What an answer needs to be worth reading; a long conversation loses its oldest turns before it gets less.
ANSWER_TOKENS = 256
# Characters that a chat template puts around a question and its answer, roughly.
_AROUND = 40


class Asked(NamedTuple):
    """An answer that can begin.

    Attributes:
        steps: The engine's.
        thinking: The prompt has opened a thought.
        told_from: The first turn of the conversation that the model is told.
    """

    steps: Iterator[Step]
    thinking: bool
    told_from: int


def ask(
    engine: Engine,
    conversation: Conversation,
    question: str,
    generation: Generation,
    progress: Callable[[int, int], None] | None = None,
) -> Asked:
    """Start an answer; without the oldest turns when the conversation leaves too little room for it.

    The question alone may take all but one token of the context.

    Args:
        engine: The model.
        conversation: What came before.
        question: For the model.
        generation: Settings of the answer.
        progress: Told how far the prompt is read, as by ``engine.generate``.

    Raises:
        PromptTooLongError: The question alone is too long.
        UsageError: The chat template refuses the messages, or a setting is out of range.
    """
    wanted = int(generation.value("max_tokens") or ANSWER_TOKENS)
    reserve = max(1, min(wanted, engine.context_length // 4))
    end = len(conversation.turns)
    first = min(conversation.told_from, end)
    tokens = 0

    def start(told_from: int) -> Asked | None:
        nonlocal tokens
        tokens = 2 * engine.context_length  # at least, where it is refused before it is counted
        room = 1 if told_from == end else reserve
        try:
            prompt = engine.encode([*conversation.messages(told_from), {"role": "user", "content": question}])
            tokens = len(prompt)
            steps = engine.generate(prompt, reserve=room, progress=progress, **generation.arguments)
        except PromptTooLongError:
            if told_from == end:
                raise  # it is the question itself; the conversation stays as it is
            return None
        return Asked(steps, opens_thought(engine, prompt), told_from)

    found = start(first)
    if found is not None:
        return found
    # Rendering a conversation and cutting it into tokens takes long where it is long: a guess, then steps
    # that double, then halves. What is told from `low` on is too long, from `found.told_from` on it fits.
    too_many = tokens + reserve - engine.context_length
    low, step, probe = first, 1, _guess(conversation, first, question, tokens, too_many)
    while found is None or found.told_from - low > 1:
        tried = start(probe)
        if tried is None:
            low = probe
        else:
            found = tried
        if found is None:
            probe = min(low + step, end)
        else:
            probe = max(found.told_from - step, (low + found.told_from) // 2)
        step *= 2
    return found


def _guess(conversation: Conversation, first: int, question: str, tokens: int, too_many: int) -> int:
    """The first turn that may be told, as if every character took the same share of a token.

    Args:
        conversation: From its turn ``first`` on it is too long.
        first: That turn; there is one.
        question: Comes after it.
        tokens: Of all of it.
        too_many: How many of these have to go.
    """
    sizes = [len(turn.question) + len(turn.answer) + _AROUND for turn in conversation.turns[first:]]
    characters = sum(sizes) + len(question) + len(conversation.system or "") + _AROUND
    left = too_many * characters / max(1, tokens)
    for place, size in enumerate(sizes, first + 1):
        left -= size
        if left <= 0:
            return place
    return len(conversation.turns)
