"""The table of formats, and which one a model uses."""

from __future__ import annotations

from collections.abc import Collection

from moechat.reply_formats.notations import JsonCalls, ReplyFormat, ThoughtMarks

THINK = ThoughtMarks("<think>", "</think>")

HERMES = ReplyFormat(
    "hermes", (THINK,), JsonCalls(begins=("<tool_call>",), closers=("</tool_call>",), lines=True)
)
PLAIN = ReplyFormat("plain", (THINK,))

# Formats by the marks that a chat template or the special tokens contain, all of a row; the first row counts.
_BY_MARKS: tuple[tuple[tuple[str, ...], ReplyFormat], ...] = ((("<tool_call>",), HERMES),)

FORMATS: dict[str, ReplyFormat] = {found.name: found for found in (*(row for _, row in _BY_MARKS), PLAIN)}


def detect(chat_template: str | None, special_tokens: Collection[str] = ()) -> ReplyFormat:
    """The format of a model's replies.

    Args:
        chat_template: The template's text, or ``None``.
        special_tokens: Texts of the tokenizer's added tokens. They decide where a template leaves marks out.

    Returns:
        The format whose marks the template contains; one without calls of tools if there are none.
    """
    template = chat_template or ""
    for marks, found in _BY_MARKS:
        if all(mark in template for mark in marks):
            return found
    return PLAIN
