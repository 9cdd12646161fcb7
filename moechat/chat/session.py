"""A chat in progress: the conversation, its model and settings, and one turn after the other."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.chat.pending_reply import encode_messages, follow_or_load_here, start_reply
from moechat.chat.reply import Reply
from moechat.chat.session_recorder import Recorder
from moechat.chat.signals import OneInterrupt, when_continued
from moechat.chat.terminal.answer_view import AnswerDisplay, View
from moechat.chat.terminal.live_map import LiveMap, live_map
from moechat.errors import (
    DeviceLostError,
    MoechatError,
    NoModelError,
    PromptTooLongError,
    ServerEndedError,
    StoreDamagedError,
    UsageError,
)
from moechat.history.conversation import Conversation, Mark, Turn

if TYPE_CHECKING:
    from moechat.chat.chat_options import ChatOptions
    from moechat.chat.interfaces import Models, StatusOutput


class ChatSession:
    """The state of a chat, and the turns that change it. Commands and the input loop work on it.

    Args:
        models: The model that answers.
        options: How the chat behaves.
        status: Output of everything that is not part of an answer.
        conversation: A conversation to continue; ``None`` starts one.
        sessions: Path of the database of conversations; ``None`` keeps none.
    """

    # Invariant: while _counted, _used is the number of tokens of the conversation as the model gets it, or
    # None where the chat template refuses it.
    def __init__(
        self,
        models: Models,
        options: ChatOptions,
        status: StatusOutput,
        *,
        conversation: Conversation | None = None,
        sessions: Path | None = None,
    ) -> None:
        self.models = models
        self.options = options
        self.status = status
        self.generation = options.generation
        self.conversation = conversation or Conversation(system=options.system)
        # Files attached to the next message: name and text.
        self.files: list[tuple[str, str]] = []
        self.sessions = sessions
        self.view = View()
        # A map of the experts is shown below answers while they are written.
        self.watching = options.watch
        self._recorder = Recorder(sessions, self._warn)
        self._used: int | None = None
        self._counted = False

    def close(self) -> None:
        """Close the database of conversations."""
        self._recorder.close()

    def turn(self, question: str, *, replace_last: bool = False) -> bool:
        """Send a question, show the answer, and record both.

        Args:
            question: The message.
            replace_last: Answer the last turn again; it stays if no answer comes.

        Returns:
            Whether there was an answer, or a part of one.

        Raises:
            PromptTooLongError: The question alone does not fit the context.
            StoreDamagedError: No further answer is possible; the same holds for :class:`DeviceLostError`.
        """
        display = AnswerDisplay(self.view, self._live_map())
        with OneInterrupt().watching() as interrupts, when_continued(display.moved):
            reply = Reply()
            mark: Mark = ""
            fatal: BaseException | None = None
            context = self.conversation
            if replace_last:
                context = Conversation(context.turns[:-1], context.system, first_sent=context.first_sent)
            try:
                follow_or_load_here(
                    self.models, reply, display, lambda: self._follow(context, question, reply, display)
                )
                interrupts.over()
                mark = "cut" if reply.finish_reason == "length" else ""
            except (StoreDamagedError, DeviceLostError, PromptTooLongError) as error:
                mark, fatal = "failed", error
            except MoechatError as error:  # such as a full disk in the middle of the answer
                mark = "failed"
                display.end_quietly()
                self.status.error(str(error), error.hint)
            except KeyboardInterrupt:
                mark = "stopped"
            except Exception as error:
                mark, fatal = ("stopped" if isinstance(error, BrokenPipeError) else "failed"), error
            except BaseException as error:  # terminated: the partial answer is still recorded
                mark, fatal = "stopped", error
            interrupts.over()
            display.end_quietly()
            self._keep(question, reply, mark, replace_last=replace_last, first_sent=context.first_sent)
            if fatal is not None:
                raise fatal
            self._comment(reply, mark)
        return bool(reply.text)

    def _follow(
        self, conversation: Conversation, question: str, reply: Reply, display: AnswerDisplay
    ) -> None:
        engine = self.models.engine
        pending = start_reply(engine, conversation, question, self.generation, display.waiting.progress)
        if dropped := pending.first_sent - conversation.first_sent:
            conversation.first_sent = pending.first_sent
            if not self.options.quiet:
                with display.waiting.hidden():
                    self.status.notice(
                        f"(the {2 * dropped} oldest messages were left out: {engine.context_length} tokens "
                        "no longer hold them and an answer)"
                    )
        reply.follow_split(
            display.following(pending.steps),
            display.answer,
            display.thoughts,
            thinking=pending.thinking,
            token_text=engine.token_text,
        )

    def require_map(self) -> Any:
        """Where every expert is, a :class:`moechat.offload.expert_map.ExpertMap`.

        Raises:
            UsageError: The model is on another server.
        """
        engine = self.models.engine
        found = engine.expert_map()
        if found is None:
            raise UsageError(f"{engine.name} is on another server, which does not tell where its experts are")
        return found

    def _live_map(self) -> LiveMap | None:
        if not (self.watching and self.view.animated):
            return None
        try:
            if self.models.engine.expert_map() is None:
                return None
        except ServerEndedError:  # the answer will load the model here
            pass
        return live_map(lambda: self.models.engine.expert_map(), self.status.map_lines, keep=False)

    def _keep(self, question: str, reply: Reply, mark: Mark, *, replace_last: bool, first_sent: int) -> None:
        self._counted = False
        if not reply.text:
            return  # the question goes too: turns are pairs
        if replace_last:
            self.conversation.undo()
        self.conversation.first_sent = first_sent
        name = self.models.engine.name
        self.conversation.add(Turn(question, reply.text, reply.thinking, mark, name, time.time()))
        stats = self.models.engine.stats
        self._used, self._counted = stats.prompt_tokens + stats.output_tokens, True
        self.record()

    def _comment(self, reply: Reply, mark: str) -> None:
        if not self.options.quiet:
            if mark == "stopped":
                kept = "what was written is kept" if reply.text else "the question is not kept"
                self.status.notice(f"(stopped; {kept})")
            elif mark == "cut":
                # Another server tells the number of tokens only.
                count = len(reply.tokens) or self.models.engine.stats.output_tokens
                self.status.notice(f"(cut off after {count} tokens)")
            elif not reply.text and not mark:
                self.status.notice("(the answer is empty; the question is not kept)")
        if self.options.stats and mark != "failed":
            self.status.statistics(self.models.engine.stats.to_json())

    def idle(self) -> None:
        """Let the engine use the time before the next message, and report what it did."""
        try:
            engine = self.models.engine
        except NoModelError:
            return
        replanned = engine.idle()
        if replanned is not None and (self.options.stats or self.options.verbose):
            self.status.replanned(replanned.to_json())
        if self.options.verbose:
            for notice in engine.notices():
                self.status.notice(notice)

    def record(self) -> None:
        """Write new turns of the conversation to the database."""
        self._recorder.keep(self.conversation)

    def use_conversation(self, conversation: Conversation) -> None:
        """Continue another conversation; the recorded one stays in the database."""
        self.conversation = conversation
        self.files = []
        self.changed()

    def adopt(self, options: ChatOptions) -> bool:
        """Take the settings and the system prompt that come with another model.

        What ``/set`` and ``/system`` have changed stays.

        Returns:
            Whether the system prompt changed.
        """
        changed = self.generation.changed
        template = replace(options.generation.template, changed=self.generation.template.changed)
        self.generation = replace(options.generation, changed=changed, template=template)
        own = self.conversation.system != self.options.system  # set by /system, or of a loaded conversation
        before = self.conversation.system
        if not own:
            self.conversation.system = options.system
        self.options = options
        self.changed()
        return self.conversation.system != before

    def changed(self) -> None:
        """Count the context again after a change, and send the oldest turns again where there is room."""
        self._counted = False
        self.conversation.first_sent = 0

    def context_used(self) -> int | None:
        """Tokens of the conversation as the model gets it; ``None`` if its chat template refuses it."""
        if not self._counted:
            self._used, self._counted = None if self.conversation.turns else 0, True
            if self.conversation.turns:
                messages = self.conversation.messages()
                with suppress(MoechatError):
                    tokens = encode_messages(self.models.engine, messages, self.generation.template)
                    self._used = len(tokens)
        return self._used

    def context_line(self) -> str:
        """Model and use of its context, for the prompt."""
        try:
            engine = self.models.engine
        except NoModelError:
            return "no model"
        total = engine.context_length
        used = self.context_used()
        if used is None:
            line = f"{total:,} tokens"
        elif used > total:
            line = f"more than {total:,} tokens"  # the next answer leaves out the oldest turns
        else:
            line = f"{used:,} of {total:,} tokens, {used / total:.0%}"
        attached = f"  +{len(self.files)} file{'s'[: len(self.files) > 1]}" if self.files else ""
        return f"{engine.name}  {line}{attached}"

    def choose_view(self, *, plain: bool) -> None:
        """Choose how answers are shown.

        Args:
            plain: The terminal cannot move its cursor, or its output is redirected.
        """
        self.view = View(
            rendered=not (plain or self.options.raw) and sys.stdout.isatty(),
            thoughts=not self.options.hide_thinking,
            animated=not plain and sys.stderr.isatty(),
            waits=not self.options.quiet,
        )

    def _warn(self, message: str, hint: str | None) -> None:
        self.status.notice(message if hint is None else f"{message}\n{hint}")
