"""``moechat help``: shows pages of the manual and searches them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import Annotated, Any

import typer

from moechat.chat.terminal.output import can_redraw, write_output
from moechat.cli.completion.completers import complete_topics
from moechat.cli.parameters import Action, argument, flag, option
from moechat.cli.terminal.consoles import print_notice
from moechat.errors import UsageError
from moechat.manual import page, search, topics

_HELP = """\
Show a page of the manual, or list its topics.

Pages are rendered on a terminal; long ones open in a pager (PAGER, else less). In a pipe a page is markdown.
"""
_EXAMPLES = """\
moechat help

moechat help memory-and-plans

moechat help --search context

moechat help --man > ~/.local/share/man/man1/moechat.1
"""
_WIDEST = 100  # columns; longer lines are hard to read


def register_help(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("help", help=_HELP, epilog=_EXAMPLES)(_help)


def _help(
    context: typer.Context,
    topic: Annotated[
        str | None, argument("TOPIC", "A page; without it, the list of pages.", complete_topics)
    ] = None,
    word: Annotated[
        str | None,
        option(
            "WORD",
            "Show the lines that contain a text, in all pages or in TOPIC.",
            None,
            "--search",
            show_default=False,
        ),
    ] = None,
    man: Annotated[bool, flag("Print all commands and options as a page for man.", "--man")] = False,
) -> Action:
    if man:
        if topic is not None or word is not None:
            raise UsageError("--man prints one page about all commands; it excludes TOPIC and --search")
        group = context.find_root().command
        return lambda: _print_man_page(group)
    if word is not None:
        return lambda: _print_matches(word, topic)
    return _print_topics if topic is None else lambda: _print_page(topic)


def _print_topics() -> int:
    found = topics()
    width = max(len(topic.name) for topic in found)
    lines = ["moechat help TOPIC shows a page, moechat help --search WORD searches all of them"]
    section = ""
    for topic in found:
        if topic.section != section:
            section = topic.section
            lines += ["", section]
        lines.append(f"  {topic.name:{width}}  {topic.summary}")
    write_output(sys.stdout, "\n".join(lines) + "\n")
    return 0


def _print_man_page(group: Any) -> int:
    from moechat.cli.commands.man_page import man_page

    write_output(sys.stdout, man_page(group))
    return 0


def _print_matches(word: str, topic: str | None) -> int:
    if not word.strip():
        raise UsageError("--search needs a text", hint="moechat help --search context")
    names = [known.name for known in topics()] if topic is None else [topic]
    lines = [f"{match.topic}: {match.heading}: {match.line}\n" for match in search(word, names)]
    write_output(sys.stdout, "".join(lines))
    if not lines:
        print_notice(f"the manual does not contain {word!r}")
    return 0


def _print_page(topic: str) -> int:
    source = page(topic)
    if not can_redraw(sys.stdout):
        write_output(sys.stdout, source)
        return 0
    from moechat.chat.terminal.markdown import render_page

    columns, rows = shutil.get_terminal_size()
    text = render_page(source, sys.stdout, min(columns, _WIDEST))
    if text.count("\n") < rows or not _page_through(text):
        write_output(sys.stdout, text)
    return 0


def _page_through(text: str) -> bool:
    """Show a text in the pager; returns whether there is one: ``cat`` and an empty ``PAGER`` are none."""
    command = shlex.split(os.environ.get("PAGER", "less"))
    if not command or command == ["cat"] or shutil.which(command[0]) is None:
        return False
    # F: no pager for a text that fits the window; R: colours; X: the text stays on the screen.
    environment = {"LESS": "FRX", "LESSCHARSET": "utf-8", **os.environ}
    subprocess.run(command, input=text.encode(), env=environment, check=False)
    return True
