"""The chat's commands: names, help, and the parser of input lines."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from moechat.chat.terminal.multiline import is_quoted, without_quotes
from moechat.errors import UsageError


@dataclass(frozen=True)
class Command:
    """A command of the chat.

    Attributes:
        name: Without the slash.
        arguments: As shown in the help.
        help: One line.
        files: The argument is a file name.
    """

    name: str
    arguments: str
    help: str
    files: bool = False


COMMANDS = (
    Command("help", "", "this list"),
    Command("clear", "", "begin a new conversation"),
    Command("system", "[TEXT]", 'the system prompt; "" removes it'),
    Command("set", "[NAME VALUE]", "settings of answers; VALUE may be 'default'"),
    Command("show", "", "model, device, memory, context, settings"),
    Command("stats", "", "statistics of the last answer"),
    Command("map", "", "where every expert is: in memory, on its way, or not"),
    Command("watch", "[on|off]", "show that map below each answer while it is written, or no longer"),
    Command("regen", "", "answer the last question again"),
    Command("edit", "TEXT", "put TEXT in place of the last question, and answer it"),
    Command("copy", "[code]", "copy the last answer, or its last block of code, to the clipboard"),
    Command("undo", "", "take the last question and its answer back"),
    Command("save", "FILE", "write the conversation: .json, or .md for people", files=True),
    Command("load", "FILE", "go on with a conversation from a .json file", files=True),
    Command("read", "[FILE]", 'send a text file along with the next message; "" for none', files=True),
    Command("rename", "TITLE", "give the conversation another title"),
    Command("fork", "", "go on in a copy of the conversation; the original stays as it is"),
    Command("sessions", "[NUMBER]", "conversations that are kept; go on with one of them"),
    Command("model", "NAME", "go on with another model"),
    Command("bye", "", "leave (also Ctrl-D, or Ctrl-C twice)"),
)
_BY_NAME = {command.name: command for command in COMMANDS}
_OTHER_NAMES = {"?": "help", "exit": "bye", "quit": "bye"}

_KEYS = """\
Ctrl-C stops an answer; what was written stays in the conversation.
Alt-Enter or Ctrl-J begins a new line; so does Enter between \"\"\" and \"\"\".
Ctrl-R searches what you have typed before; Ctrl-X Ctrl-E opens your editor.
What stands between \"\"\" and \"\"\" is sent as it is.
// at the beginning sends a text that begins with /."""


class ParsedLine(NamedTuple):
    """A message or a command.

    Attributes:
        command: The command; ``None`` for a message.
        text: The message, or the command's arguments.
    """

    command: Command | None
    text: str


def help_text() -> str:
    """The list of commands and keys."""
    titles = {command: f"/{command.name} {command.arguments}".rstrip() for command in COMMANDS}
    width = max(map(len, titles.values()))
    lines = [f"{title:{width}}  {command.help}" for command, title in titles.items()]
    return "\n".join([*lines, _KEYS])


def parse_line(text: str) -> ParsedLine:
    """Parse one or several lines of input.

    Text in triple quotes is a message. So are several lines, and a slash before anything but a word (a path,
    a C comment), unless they begin with a command.

    Raises:
        UsageError: The command is unknown, or its arguments are wrong.
    """
    stripped = text.strip()
    if is_quoted(stripped):
        inner = without_quotes(stripped)
        return ParsedLine(None, inner if inner.strip() else "")
    if not stripped.startswith("/"):
        return ParsedLine(None, text if stripped else "")
    several = "\n" in stripped
    if stripped.startswith("//"):
        # Several lines lose the slash only if it was needed to escape a command.
        return ParsedLine(None, text if several and _name(stripped[1:]) is None else stripped[1:])
    name = _name(stripped)
    if name is None:
        if several or not re.fullmatch(r"/([\w?-]*)(\s.*)?", stripped):
            return ParsedLine(None, text)
        raise _unknown(stripped, stripped[1:].partition(" ")[0], None)
    rest = stripped[1 + len(name) :]
    command = _BY_NAME[_OTHER_NAMES.get(name.lower(), name.lower())]
    if rest and not rest[0].isspace():
        raise UsageError(
            f"/{command.name} is a command and needs a space after it; it was not sent",
            hint=f"// sends it: /{stripped}"[:200],
        )
    rest = rest.strip()
    if rest and not command.arguments:
        raise _unknown(stripped, name, command)
    if command.arguments and not command.arguments.startswith("[") and not rest:
        raise UsageError(f"/{command.name} needs {command.arguments}")
    return ParsedLine(command, rest)


def _name(text: str) -> str | None:
    """The command name that a text begins with, in its spelling; ``None`` if there is none."""
    found = re.match(r"/(\?|\w+)", text)
    return found[1] if found and found[1].lower() in {*_BY_NAME, *_OTHER_NAMES} else None


def _unknown(line: str, name: str, command: Command | None) -> UsageError:
    if command is not None:
        return UsageError(
            f"/{command.name} takes no arguments; it was not sent", hint=f"// sends it: /{line}"[:200]
        )
    near = difflib.get_close_matches(name.lower(), [*_BY_NAME, *_OTHER_NAMES], n=1, cutoff=0.5)
    near = near or [known for known in _BY_NAME if name and known.startswith(name.lower())][:1]
    suggestion = f"did you mean /{near[0]}? " if near else ""
    return UsageError(
        f"there is no command /{name[:40]}; it was not sent",
        hint=f"{suggestion}/help lists the commands; // sends a text that begins with a slash",
    )


def unquoted(text: str) -> str:
    """An argument without enclosing quotes."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
