"""``POST /v1/messages``: Anthropic's protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from moechat.reply_formats import validated_tools
from moechat.serve import sse
from moechat.serve.anthropic_input import chat_messages, chat_tools
from moechat.serve.api_errors import api_error
from moechat.serve.blocks import Block, Blocks, Change
from moechat.serve.conversation import Choice, Conversation
from moechat.serve.fields import Fields
from moechat.serve.identifiers import new_id
from moechat.serve.replies import Reply, Waiting
from moechat.serve.sampling_fields import max_tokens, sampling_options, stops

_REFUSED = {
    "container": "models run no code here",
    "mcp_servers": "the server connects to no others",
}
_REFUSED_OUTPUT = {"task_budget": "max_tokens limits an answer"}


@dataclass(frozen=True)
class MessageRequest:
    """A parsed request.

    Attributes:
        conversation: What is asked.
        stream: Answer in pieces.
    """

    conversation: Conversation
    stream: bool

    @classmethod
    def parse(cls, fields: Fields, *, counts_only: bool = False) -> MessageRequest:
        """Read the body.

        Args:
            fields: The body.
            counts_only: Only the tokens of the prompt are asked for; then ``max_tokens`` may be missing.

        Raises:
            ApiError, UsageError: A field is missing or wrong.
        """
        fields.refuse(_REFUSED)
        options = sampling_options(Fields({k: v for k, v in fields.values.items() if k != "stop"}))
        limit = max_tokens(fields, "max_tokens")
        if limit is None and not counts_only:
            raise fields.error("max_tokens", "max_tokens is missing")
        options["max_new_tokens"] = limit
        texts = stops(fields, "stop_sequences")
        if texts is not None:
            options["stop"] = texts
        tools = validated_tools(chat_tools(fields))
        choice, named, parallel = _tool_choice(fields, {tool.name for tool in tools})
        conversation = Conversation(
            fields.text("model"),
            chat_messages(fields),
            options,
            tools,
            choice,
            named,
            parallel,
            _schema(fields),
            _thinking(fields),
        )
        return cls(conversation, fields.flag("stream"))


class MessageAnswer:
    """Writes one reply in Anthropic's form.

    Args:
        request: What was asked.
        reply: The reply.
    """

    def __init__(self, request: MessageRequest, reply: Reply) -> None:
        self._reply = reply
        self._id = new_id("msg")
        self._blocks = Blocks()

    async def whole(self) -> dict[str, Any]:
        """The body of an answer in one piece.

        Raises:
            Exception: The computation failed.
        """
        await self._blocks.follow(self._reply)
        return {
            **self._message(),
            "content": [_content(block) for block in self._blocks.all],
            "stop_reason": self._reason,
            "stop_sequence": self._reply.stop,
            "usage": self._usage(),
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of an answer in pieces; an error is the last of them."""
        start = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._reply.begun.prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message={**start, "usage": usage})
        try:
            async for piece in self._reply.pieces():
                if isinstance(piece, Waiting):
                    yield _event("ping")
                    continue
                for change in self._blocks.feed(piece.events):
                    yield _change(change)
        except Exception as error:
            found = api_error(error)
            yield sse.event(found.anthropic_body, "error")
            return
        for change in self._blocks.end():
            yield _change(change)
        delta = {"stop_reason": self._reason, "stop_sequence": self._reply.stop}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._reply.begun.model}

    @property
    def _reason(self) -> str:
        if self._reply.finish_reason == "length":
            return "max_tokens"
        if self._reply.stop is not None:
            return "stop_sequence"
        return "tool_use" if any(block.kind == "call" for block in self._blocks.all) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        stats = self._reply.stats
        assert stats is not None
        return {
            "input_tokens": stats.prompt_tokens - stats.reused_tokens,
            "cache_read_input_tokens": stats.reused_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.output_tokens,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event({"type": kind, **fields}, kind)


def _change(change: Change) -> bytes:
    block, index = change.block, change.block.index
    if change.what == "end":
        return _event("content_block_stop", index=index)
    if change.what == "begin":
        return _event("content_block_start", index=index, content_block=_empty(block))
    delta = {
        "thinking": {"type": "thinking_delta", "thinking": change.text},
        "text": {"type": "text_delta", "text": change.text},
        "call": {"type": "input_json_delta", "partial_json": change.text},
    }[block.kind]
    return _event("content_block_delta", index=index, delta=delta)


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _content(block: Block) -> dict[str, Any]:
    content = _empty(block)
    if block.kind == "call":
        return {**content, "input": _input(block.text)}
    return {**content, block.kind: block.text}


def _input(arguments: str) -> Any:
    """The arguments of a call; those of a call that a limit has cut are no JSON."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _tool_choice(fields: Fields, names: set[str]) -> tuple[Choice, str, bool]:
    wanted = fields.inner("tool_choice")
    if wanted is None:
        return "auto", "", True
    parallel = not wanted.flag("disable_parallel_tool_use")
    kind = wanted.choice("type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        name = wanted.text("name")
        if name not in names:
            raise wanted.error("name", f"tool_choice names {name or 'no tool'}, which is none of the tools")
        return "required", name, parallel
    if kind == "any" and not names:
        raise wanted.error("type", "tool_choice is any, but there are no tools")
    return ("required" if kind == "any" else "none" if kind == "none" else "auto"), "", parallel


def _thinking(fields: Fields) -> dict[str, Any]:
    wanted = fields.inner("thinking")
    kind = None if wanted is None else wanted.choice("type", ("enabled", "disabled", "adaptive"))
    return {} if kind is None else {"enable_thinking": kind != "disabled"}


def _schema(fields: Fields) -> Mapping[str, Any] | None:
    """The schema of ``output_config.format``, or of the older ``output_format``; ``None`` for text."""
    config = fields.inner("output_config")
    if config is not None:
        config.refuse(_REFUSED_OUTPUT)
    newer = None if config is None else config.inner("format")
    older = fields.inner("output_format")
    if newer is not None and older is not None:
        raise fields.error("output_format", "output_format and output_config.format exclude each other")
    wanted, place = (older, "output_format") if newer is None else (newer, "output_config.format")
    if wanted is None:
        return None
    if wanted.choice("type", ("json_schema",)) is None:
        raise wanted.error("type", f"{place}.type is missing")
    schema = wanted.inner("schema")
    if schema is None:
        raise wanted.error("schema", f"{place}.schema is missing")
    return schema.values
