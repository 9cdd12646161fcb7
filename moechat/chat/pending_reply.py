"""Starts an answer: chooses how much of the conversation to send, so that the answer fits the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from moechat.chat.reply import thought_end
from moechat.errors import PromptTooLongError, ServerEndedError

if TYPE_CHECKING:
    from moechat.chat.chat_options import Generation
    from moechat.chat.interfaces import ChatEngine, Models
    from moechat.chat.reply import Reply
    from moechat.chat.template_options import TemplateOptions
    from moechat.chat.terminal.answer_view import AnswerDisplay
    from moechat.history.conversation import Conversation
    from moechat.steps import Step

# Least room for an answer, in tokens: a long conversation loses its oldest turns first.
ANSWER_TOKENS = 256
# Characters that a chat template adds around a question and its answer, approximately.
_TEMPLATE_CHARACTERS = 40


class PendingReply(NamedTuple):
    """An answer that is ready to be generated.

    Attributes:
        steps: The engine's steps.
        thinking: The prompt ends inside a thought.
        first_sent: Index of the first turn of the conversation that the prompt contains.
    """

    steps: Iterator[Step]
    thinking: bool
    first_sent: int


def follow_or_load_here(
    models: Models, reply: Reply, display: AnswerDisplay, follow: Callable[[], None]
) -> None:
    """Follow an answer; if its server ends before the first token, load the model here and follow again.

    Args:
        models: Has the engine that ``follow`` uses.
        reply: What has come of the answer.
        display: Shows that the answer is waited for.
        follow: Starts the answer and follows it to its end.

    Raises:
        ServerEndedError: The server ended after the first token: that is shown already.
        MoechatError: The model cannot be loaded here, or the answer failed.
    """
    display.waiting.start()
    try:
        follow()
    except ServerEndedError:
        if reply.tokens:
            raise
        with display.waiting.hidden():
            models.load_here()
        follow()


def start_reply(
    engine: ChatEngine,
    conversation: Conversation,
    question: str,
    generation: Generation,
    progress: Callable[[int, int], None] | None = None,
) -> PendingReply:
    """Start an answer, leaving out the oldest turns if the conversation leaves too little room for it.

    The question alone may take all but one token of the context.

    Args:
        engine: The model.
        conversation: The turns before the question.
        question: The message to answer.
        generation: Settings of the answer.
        progress: Receives the progress of reading the prompt, see ``Engine.generate``.

    Raises:
        PromptTooLongError: The question alone does not fit.
        UsageError: The chat template rejects the messages, or a setting is out of range.
    """
    wanted = int(generation.value("max_tokens") or ANSWER_TOKENS)
    reserve = max(1, min(wanted, engine.context_length // 4))
    end = len(conversation.turns)
    first = min(conversation.first_sent, end)
    tokens = 0

    def start(first_sent: int) -> PendingReply | None:
        nonlocal tokens
        tokens = 2 * engine.context_length  # a lower bound where encoding itself raises
        room = 1 if first_sent == end else reserve
        try:
            messages = [*conversation.messages(first_sent), {"role": "user", "content": question}]
            prompt = encode_messages(engine, messages, generation.template)
            tokens = len(prompt)
            thought = thought_end(engine, prompt)
            arguments = behind_thinking(generation.arguments, thought)
            steps = engine.generate(prompt, reserve=room, progress=progress, **arguments)
        except PromptTooLongError:
            if first_sent == end:
                raise  # the question itself is too long; the conversation stays
            return None
        return PendingReply(steps, bool(thought), first_sent)

    found = start(first)
    if found is not None:
        return found
    # Rendering and tokenising a long conversation is slow, so few attempts: an estimate, then steps that
    # double, then bisection. Sending from `low` is too long; sending from `found.first_sent` fits.
    excess = tokens + reserve - engine.context_length
    low, step, probe = first, 1, _estimate_first(conversation, first, question, tokens, excess)
    while found is None or found.first_sent - low > 1:
        tried = start(probe)
        if tried is None:
            low = probe
        else:
            found = tried
        if found is None:
            probe = min(low + step, end)
        else:
            probe = max(found.first_sent - step, (low + found.first_sent) // 2)
        step *= 2
    return found


def encode_messages(
    engine: ChatEngine, messages: Sequence[Mapping[str, Any]], options: TemplateOptions
) -> Sequence[int]:
    """The tokens of messages through the chat template, with the user's values for it.

    Args:
        engine: The model.
        messages: In OpenAI's form.
        options: The values.

    Raises:
        UsageError: The chat template refuses them.
    """
    values = options.values(engine.template_variables)
    return engine.encode(messages, template_options=values) if values else engine.encode(messages)


def behind_thinking(arguments: dict[str, Any], end: str) -> dict[str, Any]:
    """Arguments of ``generate`` whose grammar, if there is one, begins behind the thinking.

    Args:
        arguments: Of the answer.
        end: The mark that ends the thinking; empty if there is none.
    """
    grammar = arguments.get("grammar")
    if grammar is None or not end:  # other engines keep their grammars out of the thinking themselves
        return arguments
    return {**arguments, "grammar": replace(grammar, after=end)}


def _estimate_first(conversation: Conversation, first: int, question: str, tokens: int, excess: int) -> int:
    """The first turn to send, if tokens were spread evenly over the characters.

    Args:
        conversation: Sent from turn ``first`` on, it is too long.
        first: Index of that turn, less than the number of turns.
        question: Sent after the conversation.
        tokens: Tokens of conversation and question.
        excess: Tokens that must go.
    """
    turns = conversation.turns[first:]
    sizes = [len(turn.question) + len(turn.answer) + _TEMPLATE_CHARACTERS for turn in turns]
    characters = sum(sizes) + len(question) + len(conversation.system or "") + _TEMPLATE_CHARACTERS
    left = excess * characters / max(1, tokens)
    for place, size in enumerate(sizes, first + 1):
        left -= size
        if left <= 0:
            return place
    return len(conversation.turns)
