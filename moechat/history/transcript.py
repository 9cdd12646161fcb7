"""Conversations as files: JSON, which can be loaded again, and Markdown for reading."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from moechat.errors import UsageError
from moechat.history.conversation import MARKS, Conversation, Mark, Turn, describe_mark, title_of, utc_time
from moechat.history.nested_markdown import embed_markdown
from moechat.safe_text import encodable, one_line

Format = Literal["md", "json"]
_KIND, _VERSION = "moechat conversation", 1
_FORMATS: dict[str, Format] = {".md": "md", ".markdown": "md", ".json": "json"}


def format_of(path: Path) -> Format:
    """Markdown for ``.md`` and ``.markdown``, JSON for ``.json``.

    Raises:
        UsageError: The name ends otherwise.
    """
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise UsageError(
            f"{one_line(path.name)} ends neither in .json nor in .md; it was not written",
            hint=f"{one_line(path.stem)}.json can be loaded again, {one_line(path.stem)}.md is for people",
        )
    return form


def write_as(conversation: Conversation, form: Format, *, undone: Collection[int | None] = ()) -> str:
    """Format a conversation as the content of a file.

    Args:
        conversation: All of its turns are written.
        form: The file format.
        undone: Keys of undone turns; Markdown marks them.
    """
    return _as_markdown(conversation, undone) if form == "md" else _as_json(conversation)


def _as_json(conversation: Conversation) -> str:
    messages: list[dict[str, Any]] = list(conversation.opening())
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.question})
        answer: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        for name in ("thinking", "mark", "model"):
            if value := getattr(turn, name):
                answer[name] = value
        if turn.created and (created := _iso_time(turn.created)):
            answer["created"] = created
        messages.append(answer)
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "title": conversation.title,
        "model": conversation.model,
        "created": _iso_time(conversation.created),
        "messages": messages,
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(conversation: Conversation, undone: Collection[int | None]) -> str:
    parts = [
        f"# {conversation.title or 'Conversation'}",
        ", ".join(filter(None, (conversation.model, _iso_time(conversation.created)))),
    ]
    if conversation.system is not None:
        parts += ["## System", embed_markdown(conversation.system)]
    for turn in conversation.turns:
        parts += ["## User", embed_markdown(turn.question), "## Assistant"]
        if turn.thinking.strip():
            quoted = "\n".join(f"> {line}".rstrip() for line in turn.thinking.strip().split("\n"))
            parts.append(quoted)
        parts.append(embed_markdown(turn.answer.strip("\n")))
        if notes := notes_on(turn, undone=turn.key in undone):
            parts.append(f"*({notes})*")
    return "\n\n".join(parts) + "\n"


def notes_on(turn: Turn, *, undone: bool) -> str:
    """The remarks below a turn: why its answer is incomplete, and whether it was undone."""
    return ", ".join([*([describe_mark(turn.mark)] if turn.mark else []), *(["undone"] if undone else [])])


def _iso_time(seconds: float) -> str:
    """The time in ISO format; empty if invalid."""
    then = utc_time(seconds)
    return "" if then is None else then.isoformat(timespec="seconds")


def _seconds(value: object) -> float | None:
    """A time from a file in seconds since 1970; ``None`` if missing or invalid."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def read_from(text: str, name: str) -> Conversation:
    """Parse a conversation from JSON: our format, or any list of chat messages.

    Args:
        text: The content of the file.
        name: Its name, for messages.

    Raises:
        UsageError: The content is invalid; the message names the place.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also for numbers with thousands of digits
        raise UsageError(
            f"{one_line(name)} is not JSON", hint="/save FILE.json writes what /load reads; .md is for people"
        ) from None
    messages = document.get("messages") if isinstance(document, dict) else document
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f"{one_line(name)} holds no list of messages")
    if (
        isinstance(document, dict)
        and isinstance(version := document.get("version"), int)
        and version > _VERSION
    ):
        raise UsageError(f"{one_line(name)} was written by a newer moechat (format version {version})")
    conversation = _empty(document) if isinstance(document, dict) else Conversation()
    question: str | None = None
    for place, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            raise UsageError(f"{one_line(name)}: message {place} has no text")
        if content != encodable(content):
            raise UsageError(f"{one_line(name)}: message {place} is not valid Unicode (a lone surrogate)")
        if role == "system" and place == 1:
            conversation.system = content
        elif role == "user" and question is None:
            question = content
        elif role == "assistant" and question is not None:
            conversation.add(_turn(question, content, message))
            question = None
        else:
            expected = "user" if question is None else "assistant"
            raise UsageError(
                f"{one_line(name)}: message {place} is of {one_line(str(role))[:40]}, expected {expected}"
            )
    if question is not None:
        raise UsageError(f"{one_line(name)}: the last question has no answer")
    return conversation


def _empty(document: dict[str, Any]) -> Conversation:
    """A conversation without turns; the first turn sets missing or invalid fields."""
    title, model = (_text(document.get(name)) for name in ("title", "model"))
    created = _seconds(document.get("created"))
    return Conversation(
        title=title_of(title),
        model=one_line(model),
        created=time.time() if created is None else created,
    )


def _turn(question: str, answer: str, message: dict[str, Any]) -> Turn:
    mark = _text(message.get("mark"))
    known: Mark = mark if mark in MARKS else ""  # type: ignore[assignment]
    return Turn(
        question,
        answer,
        _text(message.get("thinking")),
        known,
        _text(message.get("model")),
        _seconds(message.get("created")) or 0.0,
    )


def _text(value: object) -> str:
    return encodable(value) if isinstance(value, str) else ""
