"""The chat: reads what the user types, does what it says, shows the answers."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.chat.asking import OneInterrupt, ask
from moechat.chat.commands import understand
from moechat.chat.conversation import Conversation, Mark, Turn
from moechat.chat.doing import Commands
from moechat.chat.output import Answer, Nowhere, Sink, Thoughts
from moechat.chat.reader import PlainReader, Reader, new_reader
from moechat.chat.recorder import Recorder
from moechat.chat.reply import Reply
from moechat.chat.transcript import attach
from moechat.errors import DeviceLostError, MoechatError, StoreDamagedError

if TYPE_CHECKING:
    from moechat.chat.settings import ChatOptions
    from moechat.chat.voice import Models, Voice


class Chat:
    """One chat on a terminal.

    Args:
        models: The model that answers.
        options: How it behaves.
        voice: Says what is not a part of an answer.
        conversation: One to go on with; ``None`` begins one.
        sessions: Where conversations are kept; ``None``: nowhere.
        reader: Where lines come from; ``None`` takes the best for this terminal.
    """

    def __init__(
        self,
        models: Models,
        options: ChatOptions,
        voice: Voice,
        *,
        conversation: Conversation | None = None,
        sessions: Path | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.models = models
        self.options = options
        self.voice = voice
        self.generation = options.generation
        self.conversation = conversation or Conversation(system=options.system)
        # Files that go with the next message: name and text.
        self.files: list[tuple[str, str]] = []
        self._recorder = Recorder(sessions, self._tell)
        self._reader = reader or new_reader(
            keep_history=options.save, status=self.context_line, tell=voice.notice
        )
        self._used: int | None = None  # tokens of the conversation; None: to be counted

    def run(self) -> int:
        """Talk until the user leaves.

        Returns:
            The exit status: 0.

        Raises:
            MoechatError: No answer can come any more.
        """
        if not self.options.quiet:
            self.voice.notice(f"{self.models.engine.name}: /help for help, Ctrl-D to leave")
        commands = Commands(self)
        asked_to_leave = False
        try:
            with self._reader.working():
                while True:
                    try:
                        self._rest()
                        line = self._reader.read()
                        asked_to_leave = False
                        if not self._handle(line, commands):
                            return 0
                    except EOFError:
                        print(file=sys.stderr)
                        return 0
                    except UnicodeError:
                        self.voice.error("that line is not UTF-8; it was not sent")
                    except KeyboardInterrupt:
                        print(file=sys.stderr)
                        if self._reader.typed:
                            continue
                        if asked_to_leave:
                            return 0
                        asked_to_leave = True
                        self.voice.notice("Ctrl-C again or Ctrl-D leaves")
        finally:
            self._recorder.close()

    def _rest(self) -> None:
        """Nobody waits for a token now."""
        engine = self.models.engine
        replanned = engine.idle()
        if replanned is not None and (self.options.stats or self.options.verbose):
            self.voice.replanned(replanned.to_json())
        if self.options.verbose:
            for notice in engine.notices():
                self.voice.notice(notice)

    def _handle(self, line: str, commands: Commands) -> bool:
        """Do what a line says; ``False`` when it says to leave."""
        try:
            said = understand(line)
            if said.command is not None:
                return commands.do(said.command.name, said.text)
        except (StoreDamagedError, DeviceLostError):
            raise
        except MoechatError as error:
            self.voice.error(str(error), error.hint)
            return True
        if said.text:
            files, self.files = self.files, []
            if not self.turn(attach(files, said.text)):
                self.files = files
        return True

    def turn(self, question: str, *, instead: bool = False) -> bool:
        """Ask, show the answer, and keep both.

        Args:
            question: For the model.
            instead: The last turn is answered anew; it stays if no answer comes.

        Returns:
            Whether there was an answer, or a part of one.

        Raises:
            StoreDamagedError: No answer can come any more; nor with :class:`DeviceLostError`.
        """
        with OneInterrupt().watching() as interrupts:
            reply = Reply()
            mark: Mark = ""
            lost: BaseException | None = None
            asked_of = self.conversation
            if instead:
                asked_of = Conversation(asked_of.turns[:-1], asked_of.system, told_from=asked_of.told_from)
            answer, thoughts = self._sinks()
            try:
                self._follow(asked_of, question, reply, answer, thoughts)
                interrupts.over()
                mark = "cut" if reply.finish_reason == "length" else ""
            except (StoreDamagedError, DeviceLostError) as error:
                mark, lost = "failed", error
            except MoechatError as error:  # the disk may have failed in the middle of the answer
                mark = "failed"
                _end(answer)
                self.voice.error(str(error), error.hint)
            except KeyboardInterrupt:
                mark = "stopped"
            except BaseException as error:  # terminated, or nobody reads the answer any more: it is kept
                mark, lost = "stopped", error
            interrupts.over()
            _end(answer)
            self._keep(question, reply, mark, instead=instead, told_from=asked_of.told_from)
            if lost is not None:
                raise lost
            self._comment(reply, mark)
        return bool(reply.text)

    def _follow(
        self, conversation: Conversation, question: str, reply: Reply, answer: Sink, thoughts: Sink
    ) -> None:
        engine = self.models.engine
        asked = ask(engine, conversation, question, self.generation)
        if dropped := asked.told_from - conversation.told_from:
            conversation.told_from = asked.told_from
            self.voice.notice(
                f"(the {2 * dropped} oldest messages were left out: {engine.context_length} tokens no "
                "longer hold them and an answer)"
            )
        reply.follow_apart(
            asked.steps, answer, thoughts, thinking=asked.thinking, token_text=engine.token_text
        )

    def _keep(self, question: str, reply: Reply, mark: Mark, *, instead: bool, told_from: int) -> None:
        self._used = None
        if not reply.text:
            return  # without any answer the question goes too, to keep the turns in pairs
        if instead:
            self.conversation.take_back()
        self.conversation.told_from = told_from
        name = self.models.engine.name
        self.conversation.add(Turn(question, reply.text, reply.thinking, mark, name, time.time()))
        stats = self.models.engine.stats
        self._used = stats.prompt_tokens + stats.output_tokens
        self.record()

    def _comment(self, reply: Reply, mark: str) -> None:
        if mark == "stopped":
            kept = "what was written is kept" if reply.text else "the question is not kept"
            self.voice.notice(f"(stopped; {kept})")
        elif not self.options.quiet:
            if mark == "cut":
                self.voice.notice(f"(cut off after {len(reply.tokens)} tokens)")
            elif not reply.text and not mark:
                self.voice.notice("(the model said nothing; the question is not kept)")
        if self.options.stats and mark != "failed":
            self.voice.statistics(self.models.engine.stats.to_json())

    def _sinks(self) -> tuple[Sink, Sink]:
        """Where an answer and its thoughts go."""
        plain = isinstance(self._reader, PlainReader)
        thoughts: Sink = Nowhere()
        if not self.options.hide_thinking:
            thoughts = Thoughts(sys.stderr, dim=sys.stderr.isatty() and not plain)
        if plain or self.options.raw or not sys.stdout.isatty():
            return Answer(sys.stdout), thoughts
        from moechat.chat.live import MarkdownAnswer

        return MarkdownAnswer(sys.stdout), thoughts

    def record(self) -> None:
        """Keep what is new of the conversation."""
        self._recorder.keep(self.conversation)

    def use_conversation(self, conversation: Conversation) -> None:
        """Go on with another conversation; the one before stays where it is kept."""
        self.conversation = conversation
        self.files = []
        self.changed()

    def changed(self) -> None:
        """The conversation is no longer what the last answer counted."""
        self._used = None

    def context_used(self) -> int | None:
        """Tokens of the conversation as the model is told it; ``None`` where it cannot be said."""
        if self._used is None:
            messages = self.conversation.messages()
            try:
                self._used = len(self.models.engine.encode(messages)) if self.conversation.turns else 0
            except MoechatError:
                return None
        return self._used

    def context_line(self) -> str:
        """The use of the context, for the prompt."""
        engine = self.models.engine
        total = engine.context_length
        used = self.context_used()
        line = f"{engine.name}  "
        line += f"{total:,} tokens" if used is None else f"{used:,} of {total:,} tokens, {used / total:.0%}"
        return line + (f"  +{len(self.files)} file{'s'[: len(self.files) > 1]}" if self.files else "")

    def _tell(self, message: str, hint: str | None) -> None:
        self.voice.notice(message if hint is None else f"{message}\n{hint}")


def _end(answer: Sink) -> None:
    # What cannot be written has been told already, or nobody is there to be told.
    with suppress(MoechatError, OSError):
        answer.end()
