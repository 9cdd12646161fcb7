"""``POST /v1/chat/completions``: OpenAI's protocol for chats."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from moechat.engine import Step
from moechat.reply_formats import CallArguments, CallBegin, CallBroken, Text, validated_tools
from moechat.serve import sse
from moechat.serve.api_errors import ApiError, api_error
from moechat.serve.conversation import Choice, Conversation
from moechat.serve.fields import Fields
from moechat.serve.identifiers import FINGERPRINT, new_id
from moechat.serve.replies import Piece, Reply, Waiting
from moechat.serve.sampling_fields import max_tokens, sampling_options
from moechat.steps import MOST_LOGPROBS
from moechat.validation import shown

# Known to clients, and impossible here.
_REFUSED = {
    "audio": "answers are text",
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "web_search_options": "models have no access to the network",
}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request.

    Attributes:
        conversation: What is asked.
        stream: Answer in pieces.
        include_usage: End the stream with the numbers of tokens.
        logprobs: Give probabilities.
    """

    conversation: Conversation
    stream: bool
    include_usage: bool
    logprobs: bool

    @classmethod
    def parse(cls, fields: Fields) -> ChatRequest:
        """Read the body.

        Raises:
            ApiError, UsageError: A field is missing or wrong.
        """
        fields.refuse(_REFUSED)
        require_one(fields)
        modalities = fields.items("modalities")
        if modalities is not None and modalities != ["text"]:
            raise fields.error("modalities", 'modalities must be ["text"]: answers are text')
        messages = fields.items("messages")
        if not messages:
            raise fields.error("messages", "messages must be a list of at least one message")
        options = sampling_options(fields)
        options["max_new_tokens"] = max_tokens(fields, "max_completion_tokens", "max_tokens")
        logprobs = fields.flag("logprobs")
        top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
        if top is not None and not logprobs:
            raise fields.error("top_logprobs", "top_logprobs needs logprobs: true")
        if logprobs:
            options["logprobs"] = top or 0
        options["expected"] = _prediction(fields)
        tools = validated_tools(fields.values.get("tools") or [])
        choice, named = _tool_choice(fields, {tool.name for tool in tools})
        stream_options = fields.inner("stream_options")
        conversation = Conversation(
            fields.text("model"),
            messages,
            options,
            tools,
            choice,
            named,
            fields.flag("parallel_tool_calls", True),
            response_schema(fields),
            template_options(fields),
        )
        return cls(
            conversation,
            fields.flag("stream"),
            stream_options is not None and stream_options.flag("include_usage"),
            logprobs,
        )


class ChatAnswer:
    """Writes one reply in OpenAI's form.

    Args:
        request: What was asked.
        reply: The reply.
    """

    def __init__(self, request: ChatRequest, reply: Reply) -> None:
        self._request = request
        self._reply = reply
        self._id = new_id("chatcmpl")
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """The body of an answer in one piece.

        Raises:
            Exception: The computation failed.
        """
        found, steps = await self._reply.whole()
        message: dict[str, Any] = {"role": "assistant", "content": found.text or None, "refusal": None}
        if found.thinking.strip():
            message["reasoning_content"] = found.thinking.strip()
        if found.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id or new_id("call"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in found.calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._logprobs(steps), "refusal": None}
            if self._request.logprobs
            else None,
            "finish_reason": self._reason(bool(found.calls)),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage(self._reply)}

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of an answer in pieces; an error is the last of them."""
        calls = 0
        yield self._chunk({"role": "assistant", "content": ""})
        try:
            async for piece in self._reply.pieces():
                if isinstance(piece, Waiting):
                    yield sse.comment(f"{piece.done} of {piece.total} tokens of the prompt are computed")
                    continue
                logprobs = self._logprobs([piece.step]) if self._request.logprobs else None
                for delta in _deltas(piece):
                    calls += "tool_calls" in delta and "id" in delta["tool_calls"][0]
                    yield self._chunk(delta, logprobs=logprobs)
                    logprobs = None
                if logprobs:
                    yield self._chunk({}, logprobs=logprobs)
        except Exception as error:
            yield sse.event(api_error(error).body)
            return
        yield self._chunk({}, finish_reason=self._reason(calls > 0))
        if self._request.include_usage:
            yield sse.event(
                {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(self._reply)}
            )
        yield sse.DONE

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        choice["logprobs"] = None if logprobs is None else {"content": logprobs, "refusal": None}
        body: dict[str, Any] = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._request.include_usage:
            body["usage"] = None
        return sse.event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._reply.begun.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _reason(self, called: bool) -> str:
        if called and self._reply.finish_reason == "stop":
            return "tool_calls"
        return self._reply.finish_reason or "stop"

    def _logprobs(self, steps: list[Step]) -> list[dict[str, Any]]:
        return logprobs_of(steps, self._reply)


def logprobs_of(steps: list[Step], reply: Reply) -> list[dict[str, Any]]:
    """Probabilities of tokens in the form of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": reply.begun.token_text(token),
            "logprob": logprob,
            "bytes": list(reply.begun.token_bytes(token)),
        }

    return [
        {
            **entry(step.token_id, step.logprob or 0.0),
            "top_logprobs": [entry(one.token_id, one.logprob) for one in step.top_logprobs],
        }
        for step in steps
    ]


def _deltas(piece: Piece) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for event in piece.events:
        if isinstance(event, Text):
            deltas.append({"reasoning_content" if event.thought else "content": event.text})
        elif isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.call_id or new_id("call"), "type": "function"}
            deltas.append({"tool_calls": [{**call, "function": function}]})
        elif isinstance(event, CallBroken):
            deltas.append({"content": event.source})
        elif isinstance(event, CallArguments):
            deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
    return deltas


def usage(reply: Reply) -> dict[str, Any]:
    """Numbers of tokens of a complete answer."""
    stats = reply.stats
    assert stats is not None
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.output_tokens,
        "total_tokens": stats.prompt_tokens + stats.output_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reply.thought_tokens,
            "accepted_prediction_tokens": stats.accepted_tokens,
            "rejected_prediction_tokens": stats.drafted_tokens - stats.accepted_tokens,
        },
    }


def require_one(fields: Fields) -> None:
    """Refuse several answers to one prompt.

    Raises:
        ApiError: ``n`` is not 1.
    """
    count = fields.values.get("n")
    if isinstance(count, bool) or count not in (None, 1):
        raise fields.error("n", f"n is {shown(count)}; only 1 is supported", code="unsupported_parameter")


def _prediction(fields: Fields) -> str | None:
    """The text that a client expects in the answer.

    Raises:
        ApiError: It has another form.
    """
    found = fields.inner("prediction")
    if found is None:
        return None
    if found.values.get("type") != "content":
        raise fields.error("prediction", "the type of prediction must be content")
    content = found.values.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    ):
        raise fields.error("prediction", "the content of prediction must be a text, or a list of texts")
    return "".join(part["text"] for part in parts) or None


def _tool_choice(fields: Fields, names: set[str]) -> tuple[Choice, str]:
    value = fields.values.get("tool_choice")
    if value is None:
        return "auto", ""
    if value in ("auto", "none", "required"):
        if value == "required" and not names:
            raise fields.error("tool_choice", "tool_choice is required, but there are no tools")
        return value, ""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise fields.error(
            "tool_choice",
            'tool_choice must be auto, none, required or {"type": "function", "function": {"name": …}}',
        )
    if name not in names:
        raise fields.error("tool_choice", f"tool_choice names {name}, which is none of the tools")
    return "required", name


def response_schema(fields: Fields) -> Mapping[str, Any] | None:
    """The schema of ``response_format``; ``None`` for text.

    Raises:
        ApiError: It is malformed.
    """
    wanted = fields.inner("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise fields.error("response_format", "response_format.type is missing")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    inner = wanted.inner("json_schema")
    schema = None if inner is None else inner.inner("schema")
    if schema is None:
        raise ApiError(400, "response_format.json_schema.schema is missing", param="response_format")
    return schema.values


def template_options(fields: Fields) -> dict[str, Any]:
    """Values for the chat template: ``chat_template_kwargs``, and ``reasoning_effort``.

    Raises:
        ApiError: They are malformed.
    """
    given = fields.inner("chat_template_kwargs")
    options = {} if given is None else dict(given.values)
    return effort_options(fields.choice("reasoning_effort", EFFORTS), options)


def effort_options(effort: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Values for the chat template, with those for an effort of thinking added."""
    if effort is not None:
        # Templates know one or the other.
        options.setdefault("reasoning_effort", effort)
        options.setdefault("enable_thinking", effort != "none")
    return options
