"""The plain chat on a terminal: a line in, an answer out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from moechat.cli.reply import Reply, opening, say_if_cut
from moechat.cli.stats import print_replanned, print_stats
from moechat.cli.terminal import Answer, print_error, print_notice
from moechat.errors import DeviceLostError, MoechatError, PromptTooLongError, StoreDamagedError

try:
    import readline  # gives input() line editing; Python may be built without it
except ImportError:
    readline = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moechat import Engine, Step
    from moechat.cli.options import RunOptions

_PROMPT = ">>> "
# What an answer needs to be worth reading; a long conversation loses its oldest turns before it gets less.
_ANSWER_TOKENS = 256
_HELP = """\
/help   this list
/clear  forget the conversation
/bye    leave (also Ctrl-D, or Ctrl-C twice)
Ctrl-C while the model writes stops the answer; what was written stays in the conversation."""


class Chat:
    """One conversation.

    Invariant: the messages are what :func:`opening` gives, then turns of user and assistant in pairs; while
    an answer is under way one message of the user follows. Chat templates may refuse anything else.
    """

    def __init__(self, engine: Engine, options: RunOptions) -> None:
        self._engine = engine
        self._options = options
        self._opening = opening(options)
        self._turns: list[dict[str, str]] = []

    def run(self) -> int:
        """Talk until the user leaves.

        Returns:
            The exit status: 0.
        """
        if not self._options.quiet:
            print_notice(f"{self._engine.name}: /help for help, Ctrl-D to leave")
        asked_to_leave = False
        while True:
            try:
                self._rest()
                line = _read_line()
                asked_to_leave = False
                if not self._handle(line):
                    return 0
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:
                if len(self._turns) % 2:  # it came just before or after an answer
                    self._turns.pop()
                print(file=sys.stderr)
                if _typed():
                    continue
                if asked_to_leave:
                    return 0
                asked_to_leave = True
                print_notice("Ctrl-C again or Ctrl-D leaves")

    def _rest(self) -> None:
        """Nobody waits for a token now."""
        replanned = self._engine.idle()
        if replanned is not None and (self._options.stats or self._options.verbose):
            print_replanned(replanned.to_json())
        if self._options.verbose:
            for notice in self._engine.notices():
                print_notice(notice)

    def _handle(self, line: str) -> bool:
        """Do what a line says; ``False`` when it says to leave."""
        command = line.strip()
        if command.startswith("/"):
            return self._command(command)
        if command:
            self._turn(line)
        return True

    def _command(self, command: str) -> bool:
        if command == "/bye":
            return False
        if command == "/clear":
            self._turns.clear()
            print_notice("the conversation is forgotten")
        elif command == "/help":
            print_notice(_HELP)
        else:
            print_error(
                f"there is no command {command.split()[0]}; it was not sent", "/help lists the commands"
            )
        return True

    def _turn(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        reply = Reply()
        answer = Answer(sys.stdout)
        try:
            reply.follow(self._start_answer(), answer)
        except (StoreDamagedError, DeviceLostError):
            raise  # no answer will come any more
        except MoechatError as error:  # the disk may have failed in the middle of the answer
            answer.end()
            print_error(str(error), error.hint)
            return
        except KeyboardInterrupt:
            reply.finish_reason = "interrupted"
        finally:
            # Without any answer the question goes too, to keep the turns in pairs.
            if reply.text:
                self._turns.append({"role": "assistant", "content": reply.text})
            else:
                self._turns.pop()
        answer.end()
        if reply.finish_reason == "interrupted":
            if not reply.text:
                print(file=sys.stderr)  # the terminal has echoed ^C
            print_notice(
                "(stopped; what was written is kept)" if reply.text else "(stopped; the question is not kept)"
            )
        elif not self._options.quiet:
            say_if_cut(reply)
        if self._options.stats:
            print_stats(self._engine.stats.to_json())

    def _start_answer(self) -> Iterator[Step]:
        """Start generating; without the oldest turns when the conversation leaves too little room to answer.

        The last message alone may take all but one token of the context.

        Raises:
            PromptTooLongError: The last message alone is too long.
        """
        wanted = min(self._options.max_tokens or _ANSWER_TOKENS, self._engine.context_length // 4)
        dropped = 0
        while True:
            alone = dropped + 1 == len(self._turns)
            try:
                steps = self._engine.generate(
                    self._opening + self._turns[dropped:],
                    reserve=1 if alone else max(1, wanted),
                    **self._options.generation,
                )
            except PromptTooLongError:
                if alone:
                    raise  # it is the message itself; the conversation stays as it is
                dropped += 2
                continue
            if dropped:
                del self._turns[:dropped]
                print_notice(
                    f"(the {dropped} oldest messages were left out: {self._engine.context_length} tokens no "
                    "longer hold them and an answer)"
                )
            return steps


def _typed() -> str:
    """What stood on the line when the user pressed Ctrl-C."""
    return "" if readline is None else readline.get_line_buffer()


def _read_line() -> str:
    """One line from the terminal.

    Raises:
        EOFError: Ctrl-D on an empty line.
    """
    while True:
        try:
            if sys.stdout.isatty():
                return input(_PROMPT)
            # input() would write its prompt into the file or pipe that collects the answers.
            sys.stderr.write(_PROMPT)
            sys.stderr.flush()
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            print_error("that line is not UTF-8; it was not sent")
            continue
        if not line:
            raise EOFError
        return line.removesuffix("\n")
