"""Conversations as files: JSON, which can be loaded again, and Markdown, for people."""

from __future__ import annotations

import json
import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from moechat.chat.conversation import MARKS, Conversation, Mark, Turn
from moechat.chat.neutral import one_line
from moechat.errors import MoechatError, UsageError

Format = Literal["md", "json"]
_KIND, _VERSION = "moechat conversation", 1
_MOST_BYTES = 64 << 20


def format_of(path: Path) -> Format:
    """Markdown for ``.md`` and ``.markdown``, else JSON."""
    return "md" if path.suffix.lower() in (".md", ".markdown") else "json"


def write_as(conversation: Conversation, form: Format) -> str:
    """The conversation as the text of a file."""
    return _as_markdown(conversation) if form == "md" else _as_json(conversation)


def _as_json(conversation: Conversation) -> str:
    messages: list[dict[str, Any]] = list(conversation.opening())
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.question})
        answer: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        for name in ("thinking", "mark", "model"):
            if value := getattr(turn, name):
                answer[name] = value
        if turn.created:
            answer["created"] = _moment(turn.created)
        messages.append(answer)
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "title": conversation.title,
        "model": conversation.model,
        "created": _moment(conversation.created),
        "messages": messages,
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(conversation: Conversation) -> str:
    parts = [
        f"# {conversation.title or 'Conversation'}",
        f"{conversation.model}, {_moment(conversation.created)}",
    ]
    if conversation.system is not None:
        parts += ["## System", conversation.system]
    for turn in conversation.turns:
        parts += ["## User", turn.question, "## Assistant"]
        if turn.thinking.strip():
            quoted = "\n".join(f"> {line}".rstrip() for line in turn.thinking.strip().split("\n"))
            parts.append(quoted)
        parts.append(turn.answer.strip("\n"))
        if turn.mark:
            parts.append(f"*({MARKS[turn.mark]})*")
    return "\n\n".join(parts) + "\n"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def read_from(text: str, name: str) -> Conversation:
    """The conversation in a JSON file: one of ours, or any list of chat messages.

    Raises:
        UsageError: It is not one; the message says where.
    """
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
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
        raise UsageError(f"{one_line(name)} was written by a newer moechat (version {version} of the form)")
    conversation = Conversation()
    question: str | None = None
    for place, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            raise UsageError(f"{one_line(name)}: message {place} has no text")
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


def _turn(question: str, answer: str, message: dict[str, Any]) -> Turn:
    thinking, model, mark = (message.get(name) for name in ("thinking", "model", "mark"))
    known: Mark = mark if mark in MARKS else ""
    return Turn(
        question,
        answer,
        thinking if isinstance(thinking, str) else "",
        known,
        model if isinstance(model, str) else "",
    )


def read_text(path: Path) -> str:
    """A file of text that a user named.

    Raises:
        UsageError: It is not there, no plain file, larger than 64 MiB, or not UTF-8 text.
    """
    shown = one_line(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{shown} is not a file")
        if status.st_size > _MOST_BYTES:
            raise UsageError(f"{shown} has {status.st_size >> 20} MiB, more than any context holds")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}") from None
    if b"\0" in data:
        raise UsageError(f"{shown} is not text: it holds a zero byte at offset {data.index(0)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{shown} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            hint="convert it first, for example with iconv",
        ) from None


def write_text(path: Path, text: str, *, replace_it: bool) -> None:
    """Write a file whole or not at all; what was there stays unless it is to be replaced.

    Raises:
        UsageError: It exists already.
        MoechatError: It cannot be written.
    """
    shown = one_line(str(path))
    if not replace_it and os.path.lexists(path):
        raise UsageError(f"{shown} exists already; it was not written", hint="choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Conversations are for their owner's eyes; the user may widen that.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MoechatError(f"{shown} cannot be written: {error.strerror}") from error


def attach(files: list[tuple[str, str]], question: str) -> str:
    """A message with files before it, each in a fence that its text does not end."""
    parts = []
    for name, text in files:
        longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        end = "" if text.endswith("\n") or not text else "\n"
        parts.append(f"{name}:\n{fence}\n{text}{end}{fence}")
    return "\n\n".join([*parts, question])
