"""The chat's line editor, with prompt_toolkit: history, multiple lines, completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import islice

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.output.color_depth import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from moechat.chat.chat_options import NAMES
from moechat.chat.commands import COMMANDS
from moechat.chat.terminal.held_keys import held_keys
from moechat.chat.terminal.input_history import open_history
from moechat.chat.terminal.multiline import MORE, PROMPT, is_unfinished
from moechat.chat.terminal.prompt_signals import raising_after
from moechat.config import user_paths
from moechat.hub.library import names_here
from moechat.safe_text import one_line

_MENU_ROWS = 6


class PromptReader:
    """Reads messages on a terminal; see :class:`moechat.chat.terminal.reader.Reader`.

    Args:
        keep_history: Store typed lines in a file.
        status: Returns the text at the right of the prompt.
        warn: Receives messages about failures of that file.
    """

    def __init__(self, *, keep_history: bool, status: Callable[[], str], warn: Callable[[str], None]) -> None:
        self.typed = False
        completer = _ChatCompleter()
        stream = sys.stdout if sys.stdout.isatty() else sys.stderr
        output = Vt100_Output.from_pty(
            stream, term=os.environ.get("TERM"), default_color_depth=ColorDepth.from_env()
        )
        # No cursor position requests: some terminals never answer them, and keys would wait.
        output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:prompt", PROMPT)]),
            multiline=True,
            prompt_continuation=lambda width, row, wrapped: MORE if not wrapped else "",
            history=open_history(keep_history, warn),
            completer=completer,
            complete_while_typing=Condition(self._in_command),
            reserve_space_for_menu=_MENU_ROWS,
            key_bindings=_keys(completer),
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
        """See :class:`moechat.chat.terminal.reader.Reader`."""
        self.typed = False
        try:
            with raising_after(self._session.app), held_keys.editing():
                text = self._session.prompt()
        except KeyboardInterrupt:
            self.typed = bool(self._session.default_buffer.text)
            raise
        text.encode("utf-8")  # raises for lone surrogates, which stand for invalid bytes
        return text

    def working(self) -> AbstractContextManager[object]:
        """Holds typed keys for the next prompt."""
        return held_keys

    def _in_command(self) -> bool:
        text = self._session.default_buffer.text
        return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _keys(completer: Completer) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("tab")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        state = buffer.complete_state
        if state is None or state.current_completion is None:
            # The menu of completions while typing comes later, and ignores keys until then.
            requested = CompleteEvent(completion_requested=True)
            found = list(islice(completer.get_completions(buffer.document, requested), 2))
            if len(found) == 1:
                buffer.cancel_completion()
                buffer.apply_completion(found[0])
                return
        if state is None:
            buffer.start_completion(insert_common_part=True)
        else:
            buffer.complete_next()

    return keys


class _ChatCompleter(Completer):
    """Completes names of commands, settings, local models, and files."""

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
                # Names with control characters cannot be typed and must not reach the terminal.
                if found.text == one_line(found.text):
                    yield found
