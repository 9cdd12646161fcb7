"""How models write: thinking, and calls of tools in their own formats.

- :func:`detect` finds a model's format from its chat template.
- :class:`ReplyParser` turns the text of a reply, while it arrives, into events: text, thinking, calls.
- :func:`call_grammar` makes a model call a tool, in its own format.
- :func:`validated_tools` and :func:`to_template_messages` check what a client of the chat API sends, and turn
  it into what chat templates take.

Pure Python, without torch. See the manual's page on adding a model family for how to add a format.
"""

from moechat.reply_formats.call_grammar import call_grammar
from moechat.reply_formats.events import (
    Call,
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Event,
    Text,
    WholeReply,
    merged,
    whole_reply,
)
from moechat.reply_formats.formats import FORMATS, detect
from moechat.reply_formats.lark import grammar_tokens
from moechat.reply_formats.messages import new_call_id, to_template_messages
from moechat.reply_formats.notations import ReplyFormat
from moechat.reply_formats.parser import ReplyParser
from moechat.reply_formats.thinking import opens_thought
from moechat.reply_formats.tools import Tool, validated_tools

__all__ = [
    "FORMATS",
    "Call",
    "CallArguments",
    "CallBegin",
    "CallBroken",
    "CallEnd",
    "Event",
    "ReplyFormat",
    "ReplyParser",
    "Text",
    "Tool",
    "WholeReply",
    "call_grammar",
    "detect",
    "grammar_tokens",
    "merged",
    "new_call_id",
    "opens_thought",
    "to_template_messages",
    "validated_tools",
    "whole_reply",
]
