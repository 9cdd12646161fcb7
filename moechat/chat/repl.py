"""The chat: reads what the user types, does what it says, shows the answers."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.chat.asking import ask
from moechat.chat.commands import understand
from moechat.chat.conversation import Conversation, Mark, Turn
from moechat.chat.doing import Commands
from moechat.chat.reader import PlainReader, Reader, new_reader
from moechat.chat.recorder import Recorder
from moechat.chat.reply import Reply
from moechat.chat.showing import Showing, View
from moechat.chat.signals import OneInterrupt, no_more_interrupts, uninterrupted, when_continued
from moechat.chat.transcript import attach
from moechat.errors import DeviceLostError, MoechatError, NoModelError, PromptTooLongError, StoreDamagedError

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
        self.sessions = sessions
        self._recorder = Recorder(sessions, self._tell)
        self._reader = reader or new_reader(
            keep_history=options.save, status=self.context_line, tell=voice.notice
        )
        # Tokens of the conversation, None where they cannot be said; only while _counted.
        self._used: int | None = None
        self._counted = False

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
                        try:
                            line = self._reader.read()
                        except UnicodeError:
                            self.voice.error("that line is not UTF-8; it was not sent")
                            continue
                        asked_to_leave = False
                        if not self._handle(line, commands):
                            return 0
                    except EOFError:
                        print(file=sys.stderr)
                        return 0
                    except KeyboardInterrupt:
                        # Impatience must break neither what is said nor the way out.
                        if asked_to_leave and not self._reader.typed:
                            no_more_interrupts()
                            print(file=sys.stderr)
                            return 0
                        with uninterrupted():
                            print(file=sys.stderr)
                            if not self._reader.typed:
                                asked_to_leave = True
                                self.voice.notice("Ctrl-C again or Ctrl-D leaves")
        finally:
            self._recorder.close()

    def _rest(self) -> None:
        """Nobody waits for a token now."""
        try:
            engine = self.models.engine
        except NoModelError:
            return
        replanned = engine.idle()
        if replanned is not None and (self.options.stats or self.options.verbose):
            self.voice.replanned(replanned.to_json())
        if self.options.verbose:
            for notice in engine.notices():
                self.voice.notice(notice)

    def _handle(self, line: str, commands: Commands) -> bool:
        """Do what a line says; ``False`` when it says to leave."""
        try:
            return self._do(line, commands)
        except (StoreDamagedError, DeviceLostError, BrokenPipeError):
            raise
        except MoechatError as error:
            self.voice.error(str(error), error.hint)
        except Exception as error:  # a model that took minutes to load is not lost for a command
            if os.environ.get("MOECHAT_DEBUG") == "1":
                traceback.print_exc()
            self.voice.error(
                f"{type(error).__name__}: {error}".rstrip(": "),
                "the chat goes on; MOECHAT_DEBUG=1 shows where this happened",
            )
        return True

    def _do(self, line: str, commands: Commands) -> bool:
        said = understand(line)
        if said.command is not None:
            return commands.do(said.command.name, said.text)
        if said.text:
            files, self.files = self.files, []
            try:
                answered = self.turn(attach(files, said.text))
            except PromptTooLongError:
                if files:  # else every later message would be refused too
                    names = ", ".join(name for name, _ in files)
                    self.voice.notice(f"(not sent, and no longer attached: {names})")
                raise
            if not answered:
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
            PromptTooLongError: The question alone is too long.
            StoreDamagedError: No answer can come any more; nor with :class:`DeviceLostError`.
        """
        shown = Showing(self._view())
        with OneInterrupt().watching() as interrupts, when_continued(shown.answer.moved):
            reply = Reply()
            mark: Mark = ""
            lost: BaseException | None = None
            asked_of = self.conversation
            if instead:
                asked_of = Conversation(asked_of.turns[:-1], asked_of.system, told_from=asked_of.told_from)
            try:
                self._follow(asked_of, question, reply, shown)
                interrupts.over()
                mark = "cut" if reply.finish_reason == "length" else ""
            except (StoreDamagedError, DeviceLostError, PromptTooLongError) as error:
                mark, lost = "failed", error
            except MoechatError as error:  # the disk may have failed in the middle of the answer
                mark = "failed"
                shown.end_somehow()
                self.voice.error(str(error), error.hint)
            except KeyboardInterrupt:
                mark = "stopped"
            except Exception as error:
                mark, lost = ("stopped" if isinstance(error, BrokenPipeError) else "failed"), error
            except BaseException as error:  # terminated: what there is is kept
                mark, lost = "stopped", error
            interrupts.over()
            shown.end_somehow()  # what cannot be written has been told already, or nobody is there
            self._keep(question, reply, mark, instead=instead, told_from=asked_of.told_from)
            if lost is not None:
                raise lost
            self._comment(reply, mark)
        return bool(reply.text)

    def _follow(self, conversation: Conversation, question: str, reply: Reply, shown: Showing) -> None:
        engine = self.models.engine
        shown.waiting.start()
        asked = ask(engine, conversation, question, self.generation, shown.waiting.progress)
        if dropped := asked.told_from - conversation.told_from:
            conversation.told_from = asked.told_from
            if not self.options.quiet:
                with shown.waiting.hidden():
                    self.voice.notice(
                        f"(the {2 * dropped} oldest messages were left out: {engine.context_length} tokens "
                        "no longer hold them and an answer)"
                    )
        reply.follow_apart(
            asked.steps, shown.answer, shown.thoughts, thinking=asked.thinking, token_text=engine.token_text
        )

    def _keep(self, question: str, reply: Reply, mark: Mark, *, instead: bool, told_from: int) -> None:
        self._counted = False
        if not reply.text:
            return  # without any answer the question goes too, to keep the turns in pairs
        if instead:
            self.conversation.take_back()
        self.conversation.told_from = told_from
        name = self.models.engine.name
        self.conversation.add(Turn(question, reply.text, reply.thinking, mark, name, time.time()))
        stats = self.models.engine.stats
        self._used, self._counted = stats.prompt_tokens + stats.output_tokens, True
        self.record()

    def _comment(self, reply: Reply, mark: str) -> None:
        if not self.options.quiet:
            if mark == "stopped":
                kept = "what was written is kept" if reply.text else "the question is not kept"
                self.voice.notice(f"(stopped; {kept})")
            elif mark == "cut":
                self.voice.notice(f"(cut off after {len(reply.tokens)} tokens)")
            elif not reply.text and not mark:
                self.voice.notice("(the model said nothing; the question is not kept)")
        if self.options.stats and mark != "failed":
            self.voice.statistics(self.models.engine.stats.to_json())

    def _view(self) -> View:
        """How answers are shown."""
        plain, options = isinstance(self._reader, PlainReader), self.options
        return View(
            rendered=not (plain or options.raw) and sys.stdout.isatty(),
            thoughts=not options.hide_thinking,
            animated=not plain and sys.stderr.isatty(),
            waits=not options.quiet,
        )

    def record(self) -> None:
        """Keep what is new of the conversation."""
        self._recorder.keep(self.conversation)

    def use_conversation(self, conversation: Conversation) -> None:
        """Go on with another conversation; the one before stays where it is kept."""
        self.conversation = conversation
        self.files = []
        self.changed()

    def changed(self) -> None:
        """The conversation, or what is to be left for an answer, is no longer what it was: it is counted
        again, and turns that were left out are told again where there is room now.
        """
        self._counted = False
        self.conversation.told_from = 0

    def context_used(self) -> int | None:
        """Tokens of the conversation as the model is told it; ``None`` where it cannot be said."""
        if not self._counted:
            self._used, self._counted = None, True
            messages = self.conversation.messages()
            with suppress(MoechatError):
                self._used = len(self.models.engine.encode(messages)) if self.conversation.turns else 0
        return self._used

    def context_line(self) -> str:
        """The use of the context, for the prompt."""
        try:
            engine = self.models.engine
        except NoModelError:
            return "no model"
        total = engine.context_length
        used = self.context_used()
        if used is None:
            line = f"{total:,} tokens"
        elif used > total:
            line = f"more than {total:,} tokens"  # the next answer leaves out what is too much
        else:
            line = f"{used:,} of {total:,} tokens, {used / total:.0%}"
        attached = f"  +{len(self.files)} file{'s'[: len(self.files) > 1]}" if self.files else ""
        return f"{engine.name}  {line}{attached}"

    def _tell(self, message: str, hint: str | None) -> None:
        self.voice.notice(message if hint is None else f"{message}\n{hint}")
