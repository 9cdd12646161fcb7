"""The chat's input loop: reads messages and commands, and executes them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.chat.command_actions import Commands
from moechat.chat.commands import parse_line
from moechat.chat.session import ChatSession
from moechat.chat.signals import no_more_interrupts, uninterrupted
from moechat.chat.terminal.reader import PlainReader, Reader, new_reader
from moechat.errors import DeviceLostError, MoechatError, PromptTooLongError, StoreDamagedError
from moechat.history.attachments import attach
from moechat.safe_text import neutralise

if TYPE_CHECKING:
    from moechat.chat.chat_options import ChatOptions
    from moechat.chat.interfaces import Models, StatusOutput
    from moechat.history.conversation import Conversation


class Chat:
    """One chat on a terminal.

    Args:
        models: The model that answers.
        options: How the chat behaves.
        status: Output of everything that is not part of an answer.
        conversation: A conversation to continue; ``None`` starts one.
        sessions: Path of the database of conversations; ``None`` keeps none.
        reader: Source of lines; ``None`` takes the best for this terminal.
        files: Names and contents of files to send with the first message.
    """

    def __init__(
        self,
        models: Models,
        options: ChatOptions,
        status: StatusOutput,
        *,
        conversation: Conversation | None = None,
        sessions: Path | None = None,
        reader: Reader | None = None,
        files: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.session = ChatSession(models, options, status, conversation=conversation, sessions=sessions)
        self.session.files = list(files)
        self._commands = Commands(self.session)
        self._interrupted = False  # by the last line, which was a Ctrl-C
        self._reader = reader or new_reader(
            keep_history=options.save, status=self.session.context_line, warn=status.notice
        )
        self.session.choose_view(plain=isinstance(self._reader, PlainReader))

    def run(self) -> int:
        """Run until the user leaves.

        Returns:
            The exit status: 0.

        Raises:
            MoechatError: No further answer is possible.
        """
        session = self.session
        if not session.options.quiet:
            session.status.notice(f"{session.models.engine.name}: /help for help, Ctrl-D to leave")
        try:
            with self._reader.working():
                while True:
                    with suppress(KeyboardInterrupt):  # it came just before or after another was handled
                        return self._converse()
        finally:
            session.close()

    def _converse(self) -> int:
        """Read and execute lines until the user leaves; the exit status."""
        session = self.session
        while True:
            try:
                session.idle()
                try:
                    line = self._reader.read()
                except UnicodeError:
                    session.status.error("that line is not UTF-8; it was not sent")
                    continue
                self._interrupted = False
                if not self._handle(line):
                    return 0
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:
                # A further Ctrl-C must interrupt neither the message nor the way out.
                if self._interrupted and not self._reader.typed:
                    no_more_interrupts()
                    print(file=sys.stderr)
                    return 0
                with uninterrupted():
                    print(file=sys.stderr)
                    if not self._reader.typed:
                        self._interrupted = True
                        session.status.notice("Ctrl-C again or Ctrl-D leaves")

    def _handle(self, line: str) -> bool:
        """Execute a line and report its errors; ``False`` to leave."""
        try:
            return self._execute(line)
        except (StoreDamagedError, DeviceLostError, BrokenPipeError):
            raise
        except MoechatError as error:
            self.session.status.error(str(error), error.hint)
        except Exception as error:  # loading the model may have taken minutes: keep it
            if os.environ.get("MOECHAT_DEBUG") == "1":
                sys.stderr.write(neutralise(traceback.format_exc()))
            self.session.status.error(
                f"{type(error).__name__}: {error}".rstrip(": "),
                "the chat goes on; MOECHAT_DEBUG=1 shows where this happened",
            )
        return True

    def _execute(self, line: str) -> bool:
        parsed = parse_line(line)
        if parsed.command is not None:
            return self._commands.do(parsed.command.name, parsed.text)
        if parsed.text:
            session = self.session
            files, session.files = session.files, []
            try:
                answered = session.turn(attach(files, parsed.text))
            except PromptTooLongError:
                if files:  # attached again, they would make every later message too long
                    names = ", ".join(name for name, _ in files)
                    session.status.notice(f"(not sent, and no longer attached: {names})")
                raise
            if not answered:
                session.files = files
        return True
