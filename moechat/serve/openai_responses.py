"""``POST /v1/responses``: OpenAI's newer protocol, without state: requests have the whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from moechat.reply_formats import validated_tools
from moechat.serve import sse
from moechat.serve.api_errors import api_error
from moechat.serve.blocks import Block, Blocks, Change
from moechat.serve.conversation import Choice, Conversation
from moechat.serve.fields import Fields
from moechat.serve.identifiers import new_id
from moechat.serve.openai_chat import ANY_OBJECT, EFFORTS, effort_options
from moechat.serve.replies import Reply, Waiting
from moechat.serve.responses_input import chat_messages
from moechat.serve.responses_tools import GivenTool, GivenTools
from moechat.serve.sampling_fields import max_tokens, sampling_options

_NO_LOGPROBS = "probabilities of tokens are given by /v1/chat/completions"
_REFUSED = {
    "previous_response_id": "answers are not stored; send the whole conversation as input",
    "conversation": "conversations are not stored; send the whole conversation as input",
    "background": "answers are not stored",
    "prompt": "prompts are not stored",
    "max_tool_calls": "the server calls no tools",
    "context_management": "send the input that counts",
    "top_logprobs": _NO_LOGPROBS,
}
_LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED = "unsupported_parameter"


@dataclass(frozen=True)
class ResponseRequest:
    """A parsed request.

    Attributes:
        conversation: What is asked.
        stream: Answer in pieces.
        tools: The tools as the client knows them.
        echoed: Fields of the request that stand in the answer.
    """

    conversation: Conversation
    stream: bool
    tools: GivenTools
    echoed: dict[str, Any]

    @classmethod
    def parse(cls, fields: Fields) -> ResponseRequest:
        """Read the body.

        Raises:
            ApiError, UsageError: A field is missing or wrong.
        """
        fields.refuse(_REFUSED)
        _refuse_values(fields)
        options = sampling_options(fields)
        options["max_new_tokens"] = max_tokens(fields, "max_output_tokens")
        given = GivenTools.parse(fields)
        tools = validated_tools(given.functions)
        choice, named = _tool_choice(fields, given)
        reasoning = fields.inner("reasoning")
        effort = None if reasoning is None else reasoning.choice("effort", EFFORTS)
        parallel = fields.flag("parallel_tool_calls", True)
        conversation = Conversation(
            fields.text("model"),
            chat_messages(fields),
            options,
            tools,
            choice,
            named,
            parallel,
            _schema(fields),
            effort_options(effort, {}),
        )
        echoed = {
            "instructions": fields.values.get("instructions"),
            "max_output_tokens": options["max_new_tokens"],
            "metadata": fields.values.get("metadata") or {},
            "parallel_tool_calls": parallel,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": options.get("temperature"),
            "text": fields.values.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.values.get("tool_choice") or "auto",
            "tools": fields.values.get("tools") or [],
            "top_p": options.get("top_p"),
            "truncation": "disabled",
        }
        return cls(conversation, fields.flag("stream"), given, echoed)


class ResponseAnswer:
    """Writes one reply in the form of responses.

    Args:
        request: What was asked.
        reply: The reply.
    """

    def __init__(self, request: ResponseRequest, reply: Reply) -> None:
        self._request = request
        self._reply = reply
        self._id = new_id("resp")
        self._created = int(time.time())
        self._blocks = Blocks()
        self._ids: dict[int, str] = {}
        self._sent = 0

    async def whole(self) -> dict[str, Any]:
        """The body of an answer in one piece.

        Raises:
            Exception: The computation failed.
        """
        await self._blocks.follow(self._reply)
        return self._response(self._status)

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of an answer in pieces; an error is the last of them."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        try:
            async for piece in self._reply.pieces():
                if isinstance(piece, Waiting):
                    yield sse.comment(f"{piece.done} of {piece.total} tokens of the prompt are computed")
                    continue
                for change in self._blocks.feed(piece.events):
                    for event in self._changed(change):
                        yield event
        except Exception as error:
            found = api_error(error)
            failed = {**self._response("failed"), "error": {"code": "server_error", "message": found.message}}
            yield self._event("response.failed", response=failed)
            return
        for change in self._blocks.end():
            for event in self._changed(change):
                yield event
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def _changed(self, change: Change) -> Iterator[bytes]:
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        inner = {**place, "content_index": 0}
        if block.kind == "call":
            yield from self._call_changed(change, place)
            return
        name = "reasoning_text" if block.kind == "thinking" else "output_text"
        more: dict[str, Any] = {} if block.kind == "thinking" else {"logprobs": []}
        if change.what == "begin":
            item, part = {**self._item(block, "in_progress"), "content": []}, {**_part(block), "text": ""}
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            yield self._event("response.content_part.added", **inner, part=part)
        elif change.what == "add":
            yield self._event(f"response.{name}.delta", **inner, delta=change.text, **more)
        else:
            yield self._event(f"response.{name}.done", **inner, text=block.text, **more)
            yield self._event("response.content_part.done", **inner, part=_part(block))
            yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _call_changed(self, change: Change, place: dict[str, Any]) -> Iterator[bytes]:
        block = change.block
        tool = self._tool(block)
        if change.what == "begin":
            item = {**self._item(block, "in_progress"), "input" if tool.custom else "arguments": ""}
            yield self._event("response.output_item.added", output_index=block.index, item=item)
        elif change.what == "add":
            # The input of a custom tool is a text in arguments that are not complete yet.
            if not tool.custom:
                yield self._event("response.function_call_arguments.delta", **place, delta=change.text)
        else:
            called = tool.called(block.text)
            if tool.custom:
                text = called["input"]
                yield self._event("response.custom_tool_call_input.delta", **place, delta=text)
                yield self._event("response.custom_tool_call_input.done", **place, input=text)
            else:
                done = {"name": tool.name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _tool(self, block: Block) -> GivenTool:
        return self._request.tools.of(block.name)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return sse.event({"type": kind, "sequence_number": number, **fields}, kind)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        stats = self._reply.stats
        usage = None
        if stats is not None:
            usage = {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.reused_tokens},
                "output_tokens": stats.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reply.thought_tokens},
                "total_tokens": stats.prompt_tokens + stats.output_tokens,
            }
        done = status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._reply.begun.model,
            "output": [self._item(block) for block in self._blocks.all] if done else [],
            "usage": usage,
            **self._request.echoed,
        }

    def _item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        identity = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            tool = self._tool(block)
            kind = "custom_tool_call" if tool.custom else "function_call"
            return {"type": kind, **identity, "call_id": block.call_id, **tool.called(block.text)}
        if block.kind == "thinking":
            return {"type": "reasoning", **identity, "summary": [], "content": [_part(block)]}
        return {"type": "message", **identity, "role": "assistant", "content": [_part(block)]}

    def _item_id(self, block: Block) -> str:
        kind = {"call": "fc", "thinking": "rs", "text": "msg"}[block.kind]
        if block.kind == "call" and self._tool(block).custom:
            kind = "ctc"
        return self._ids.setdefault(block.index, new_id(kind))


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _refuse_values(fields: Fields) -> None:
    """Refuse what cannot be done of fields that have other values too."""
    if _LOGPROBS in (fields.items("include") or []):
        message = f"include of {_LOGPROBS} is not supported: {_NO_LOGPROBS}"
        raise fields.error("include", message, code=_UNSUPPORTED)
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        reason = "input that is too long is refused; leave out what does not count"
        raise fields.error("truncation", f"truncation auto is not supported: {reason}", code=_UNSUPPORTED)


def _tool_choice(fields: Fields, tools: GivenTools) -> tuple[Choice, str]:
    value = fields.values.get("tool_choice")
    if value in (None, "auto"):
        return "auto", ""
    if value == "none":
        return "none", ""
    if value == "required":
        if not tools.functions:
            raise fields.error("tool_choice", "tool_choice is required, but there are no tools")
        return "required", ""
    for function, tool in tools.by_function.items() if isinstance(value, dict) else ():
        wanted = (value.get("type"), value.get("name"), value.get("namespace") or "")
        if wanted == ("custom" if tool.custom else "function", tool.name, tool.namespace):
            return "required", function
    raise fields.error(
        "tool_choice",
        'tool_choice must be auto, none, required, or {"type": "function", "name": …} of a tool',
    )


def _schema(fields: Fields) -> Any:
    text = fields.inner("text")
    wanted = None if text is None else text.inner("format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        return None
    schema = wanted.inner("schema")
    if schema is None:
        raise wanted.error("schema", "text.format.schema is missing")
    return schema.values
