"""The manual page of the command for ``man``, from the help texts of all commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from moechat import __version__
from moechat.cli.config.settings_file import variable_of
from moechat.cli.lazy_group import LazyGroup
from moechat.config import HOME_VARIABLE
from moechat.manual import page, topics

_ABOUT = (
    "The same texts are shown by moechat COMMAND --help. Every option can also be set by a variable, or in "
    "the settings file; moechat help configuration describes that."
)
_FILES = {
    "~/.config/moechat/config.toml": "Your settings; moechat config path prints where they are.",
    "~/.local/share/moechat/models": "The library: converted models.",
    "~/.local/state/moechat/sessions.db": "Your conversations.",
}
_ROW = re.compile(r"\| (\d+) \| (.+) \|")


def man_page(group: LazyGroup) -> str:
    """The page in the form of ``man``, section 1.

    Args:
        group: All commands.
    """
    lines = [
        f'.TH MOECHAT 1 "" "moechat {__version__}" "User Commands"',
        ".nh",  # names of options must not be broken, nor lines stretched
        ".ad l",
        ".SH NAME",
        rf"moechat \- {_text(_lower(group.help or ''))}",
        ".SH SYNOPSIS",
        r".B moechat",
        r".I COMMAND",
        r"[\fIARGUMENTS\fR] [\fIOPTIONS\fR]",
        ".SH DESCRIPTION",
        *_paragraphs(group.help or ""),
        ".PP",
        _text(_ABOUT),
        ".SH OPTIONS",
        *_options(group),
        ".SH COMMANDS",
    ]
    for name, command in group.built().items():
        if not command.hidden:
            lines += _command(name, command)
    lines += [".SH EXIT STATUS", *_exit_status()]
    lines += [".SH ENVIRONMENT", *_environment(), ".SH FILES"]
    for path, content in _FILES.items():
        lines += [".TP", rf"\fI{_text(path)}\fR", _text(content)]
    lines += [".SH EXAMPLES", *_examples(group.epilog or "")]
    lines += [".SH SEE ALSO", _text("Pages of the manual, shown by moechat help TOPIC:")]
    lines.append(_text(", ".join(topic.name for topic in topics())) + ".")
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if not parameter.opts[0].startswith("-")]
    shown = " ".join(_argument(parameter) for parameter in arguments)
    yield f".SS moechat {_text(name)} {_text(shown)}".rstrip()
    yield from _paragraphs(command.help or "")
    for parameter in arguments:
        if getattr(parameter, "help", None):
            yield ".TP"
            yield rf"\fI{_text(parameter.metavar or parameter.name)}\fR"
            yield _text(parameter.help)
    yield from _options(command)
    if command.epilog:
        yield ".PP"
        yield "Examples:"
        yield from _examples(command.epilog)
    for inner, subcommand in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{name} {inner}", subcommand)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return str(name) if parameter.required else f"[{name}]"


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if not parameter.opts[0].startswith("-") or "--help" in parameter.opts:
            continue
        names = ", ".join(rf"\fB{_text(name)}\fR" for name in (*parameter.opts, *parameter.secondary_opts))
        value = rf" \fI{_text(parameter.metavar)}\fR" if parameter.metavar else ""
        yield ".TP"
        yield f"{names}{value}".rstrip()
        yield _text(parameter.help or "") or r"\&"


def _environment() -> Iterator[str]:
    yield ".TP"
    yield rf"\fB{_text(variable_of('some-name'))}\fR"
    yield _text("Sets the option --some-name of all commands that have it.")
    yield ".TP"
    yield rf"\fB{_text(HOME_VARIABLE)}\fR"
    yield _text("Moves all of moechat's files below one directory.")
    yield ".TP"
    yield rf"\fB{_text('MOECHAT_API_KEY')}\fR"
    yield _text("The key for other servers (run --remote).")


def _exit_status() -> Iterator[str]:
    for status, meaning in _ROW.findall(page("exit-codes")):
        yield ".TP"
        yield rf"\fB{status}\fR"
        yield _text(meaning.replace("`", "").replace("\\|", "|"))


def _examples(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("moechat ") or " | moechat " in line:
            yield ".RS 4"
            yield ".nf"
            yield _text(line)
            yield ".fi"
            yield ".RE"


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield ".PP"
        yield _text(" ".join(paragraph.split()).replace("`", ""))


def _lower(text: str) -> str:
    """The first line, without a capital and a full stop, as in lists of pages."""
    line = text.strip().partition("\n")[0].removesuffix(".")
    return line[:1].lower() + line[1:]


def _text(text: str) -> str:
    """A text on one line for roff: with its hyphens as they are typed, and nothing that is a request."""
    plain = " ".join(text.replace("\\[", "[").split())
    escaped = plain.replace("\\", r"\e").replace("-", r"\-").replace("^", r"\(ha").replace("~", r"\(ti")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
