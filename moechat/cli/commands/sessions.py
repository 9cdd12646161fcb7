"""``moechat sessions``: lists, searches, shows, exports and deletes saved conversations."""

from __future__ import annotations

import json as json_form
import sys
from typing import Literal

from moechat.chat.terminal.output import PlainAnswer, Thoughts
from moechat.chat.text_files import path_of, write_text
from moechat.cli.terminal.consoles import is_animated, print_notice, write_output
from moechat.errors import SessionNotFoundError, UsageError
from moechat.history.conversation import Turn
from moechat.history.session_database import Sessions, Summary, sessions_path
from moechat.history.session_list import format_summary
from moechat.history.transcript import format_of, notes_on, write_as
from moechat.safe_text import one_line


def list_sessions(limit: int, *, json: bool) -> int:
    """Print the conversations, most recently used first; returns the exit status.

    Raises:
        SessionsUnavailableError: The database cannot be read.
    """
    with _open() as sessions:
        found = sessions.summaries(limit=limit or None)
    if not found and not json:
        print_notice("no conversation is kept yet")
    _print(found, json=json)
    return 0


def search_sessions(text: str, limit: int, *, json: bool) -> int:
    """Print the conversations that contain the words; returns the exit status.

    Raises:
        SessionsUnavailableError: The database cannot be read.
    """
    with _open() as sessions:
        found = sessions.search(text, limit=limit or None)
    if not found and not json:
        print_notice(f"no conversation contains {one_line(text)}")
    _print(found, json=json)
    return 0


def show_session(key: int, *, everything: bool, raw: bool) -> int:
    """Print a conversation; returns the exit status.

    Raises:
        SessionNotFoundError: No conversation has this number.
    """
    with _open() as sessions:
        conversation = sessions.get(key, all_turns=everything)
        now = {turn.key for turn in sessions.get(key).turns}
    undone = {turn.key for turn in conversation.turns} - now
    if not (sys.stdout.isatty() and is_animated()):
        write_output(sys.stdout, write_as(conversation, "md", undone=undone))
        return 0
    print_notice(f"{key}: {one_line(conversation.title)} ({one_line(conversation.model)})")
    if conversation.system is not None:
        print_notice(f"system prompt: {conversation.system}")
    for turn in conversation.turns:
        _show_turn(turn, raw=raw, undone=turn.key in undone)
    return 0


def _show_turn(turn: Turn, *, raw: bool, undone: bool) -> None:
    from moechat.chat.terminal.live_answer import MarkdownAnswer

    question = PlainAnswer(sys.stdout)
    question.write("\n>>> " + turn.question.replace("\n", "\n... ") + "\n")
    thoughts = Thoughts(sys.stderr, dim=True)
    thoughts.write(turn.thinking)
    thoughts.end()
    answer = PlainAnswer(sys.stdout) if raw else MarkdownAnswer(sys.stdout)
    answer.write(turn.answer)
    answer.end()
    if notes := notes_on(turn, undone=undone):
        print_notice(f"({notes})")


def export_session(key: int, form: str | None, out: str | None) -> int:
    """Write a conversation as Markdown or JSON; returns the exit status.

    Raises:
        SessionNotFoundError: No conversation has this number.
        UsageError: The format is unknown, the file exists, or its name is not valid or has no known suffix.
        MoechatError: The file cannot be written.
    """
    if form not in (None, "md", "json"):
        raise UsageError(f"--format is {one_line(form or '')}; this version knows md and json")
    wanted: Literal["md", "json"] = "json" if form == "json" else "md"
    path = None if out is None else path_of(out)
    if form is None and path is not None:
        wanted = format_of(path)
    with _open() as sessions:
        text = write_as(sessions.get(key), wanted)
    if path is None:
        if sys.stdout.isatty():
            PlainAnswer(sys.stdout).write(text)
        else:
            write_output(sys.stdout, text)
    else:
        write_text(path, text)
        print_notice(f"conversation {key}: {one_line(str(path))}")
    return 0


def remove_sessions(keys: list[int]) -> int:
    """Delete conversations permanently; returns the exit status.

    Raises:
        SessionNotFoundError: No conversation has one of these numbers; the others were deleted.
    """
    missing = []
    with _open() as sessions:
        for key in dict.fromkeys(keys):
            try:
                title = sessions.delete(key)
            except SessionNotFoundError:
                missing.append(key)
            else:
                print_notice(f"deleted {key}: {one_line(title)}")
    if missing:
        raise SessionNotFoundError(
            f"there is no conversation {', '.join(map(str, missing))}", hint="`moechat sessions` lists them"
        )
    return 0


def _open() -> Sessions:
    return Sessions(sessions_path(), existing=True)


def _print(found: list[Summary], *, json: bool) -> None:
    if json:
        rows = [
            {
                "id": summary.key,
                "title": summary.title,
                "model": summary.model,
                "created": summary.created,
                "updated": summary.updated,
                "turns": summary.turns,
                **({"found": summary.found} if summary.found else {}),
            }
            for summary in found
        ]
        write_output(sys.stdout, json_form.dumps(rows, ensure_ascii=sys.stdout.isatty()) + "\n")
        return
    width = max((len(str(summary.key)) for summary in found), default=1)
    for summary in found:
        write_output(sys.stdout, f"{summary.key:>{width}}  {format_summary(summary)}\n")
        if summary.found:
            write_output(sys.stdout, f"{'':{width}}  {one_line(' '.join(summary.found.split()))}\n")
