"""The line editor of the chat, with prompt_toolkit: history, several lines, completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.output.color_depth import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from moechat.chat.commands import COMMANDS
from moechat.chat.keys import held_keys
from moechat.chat.neutral import encodable, neutralise, one_line
from moechat.chat.reader import MORE, PROMPT, unfinished, without_quotes
from moechat.chat.settings import NAMES
from moechat.config import user_paths
from moechat.hub.library import names_here

_MENU_ROWS = 6


class PromptReader:
    """Reads messages on a terminal; see :class:`moechat.chat.reader.Reader`.

    Args:
        keep_history: What is typed goes to a file.
        status: Gives what stands at the right of the prompt.
        tell: Called with what goes wrong with that file.
    """

    def __init__(self, *, keep_history: bool, status: Callable[[], str], tell: Callable[[str], None]) -> None:
        self.typed = False
        stream = sys.stdout if sys.stdout.isatty() else sys.stderr
        output = Vt100_Output.from_pty(
            stream, term=os.environ.get("TERM"), default_color_depth=ColorDepth.from_env()
        )
        # The terminal is not asked where its cursor is: not every one answers, and keys would wait for it.
        output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:prompt", PROMPT)]),
            multiline=True,
            prompt_continuation=lambda width, row, wrapped: MORE if not wrapped else "",
            history=_history(keep_history, tell),
            completer=_ChatCompleter(),
            complete_while_typing=Condition(self._in_command),
            reserve_space_for_menu=_MENU_ROWS,
            key_bindings=_keys(),
            rprompt=lambda: FormattedText(
                [("class:context", "" if get_app().is_done else one_line(status()))]
            ),
            enable_suspend=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            style=Style.from_dict({"prompt": "bold", "context": "ansibrightblack"}),
            input=create_input(sys.stdin),
            output=output,
        )

    def read(self) -> str:
        """See :class:`moechat.chat.reader.Reader`."""
        self.typed = False
        try:
            text = self._session.prompt()
        except KeyboardInterrupt:
            self.typed = bool(self._session.default_buffer.text)
            raise
        text.encode("utf-8")  # bytes that are none come as lone surrogates
        return without_quotes(text)

    def working(self) -> AbstractContextManager[None]:
        """What is typed waits."""
        return held_keys()

    def _in_command(self) -> bool:
        text = self._session.default_buffer.text
        return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _ChatCompleter(Completer):
    """Names of commands, of settings, of models here, and of files where a command takes one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        name, blank, rest = text[1:].partition(" ")
        if not blank:
            for command in COMMANDS:
                if command.name.startswith(name.lower()):
                    yield Completion(
                        command.name + (" " if command.arguments else ""),
                        -len(name),
                        display=f"/{command.name} {command.arguments}",
                        display_meta=command.help,
                    )
        elif name == "set" and " " not in rest:
            yield from (Completion(f"{known} ", -len(rest)) for known in NAMES if known.startswith(rest))
        elif name == "model":
            here = names_here(user_paths())
            yield from (Completion(known, -len(rest)) for known in here if known.startswith(rest))
        elif any(command.name == name and command.files for command in COMMANDS):
            for found in self._paths.get_completions(Document(rest), complete_event):
                # A name with control characters cannot be typed, and must not reach the terminal.
                if found.text == one_line(found.text):
                    yield found


def _history(keep: bool, tell: Callable[[str], None]) -> History:
    try:
        path = user_paths().state / "history"
        if keep:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
        elif not path.exists():
            return InMemoryHistory()
    except OSError as error:
        tell(f"(what you type is not remembered: {one_line(str(error))})")
        return InMemoryHistory()
    return _PrivateHistory(path, keep=keep, tell=tell)


class _PrivateHistory(FileHistory):
    """A file of what was typed; where it cannot be read or written the chat goes on without."""

    def __init__(self, path: Path, *, keep: bool, tell: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._keep = keep
        self._tell = tell

    def load_history_strings(self) -> Iterable[str]:
        """Entries, the newest first; another program may have put anything there."""
        try:
            return [neutralise(entry) for entry in super().load_history_strings()]
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry; like a shell's, it forgets what begins with a blank."""
        if not self._keep or string.startswith(" "):
            return
        try:
            super().store_string(encodable(string))
        except OSError as error:
            self._keep = False
            self._tell(f"(what you type is not remembered: {one_line(str(error))})")
