"""``POST /v1/completions``: OpenAI's older protocol, which continues a text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moechat.engine import Grammar, Step
from moechat.serve import sse
from moechat.serve.api_errors import api_error
from moechat.serve.fields import Fields
from moechat.serve.identifiers import FINGERPRINT, new_id
from moechat.serve.jobs import Job
from moechat.serve.openai_chat import require_one, response_schema, usage
from moechat.serve.replies import Reply, Waiting
from moechat.serve.sampling_fields import max_tokens, sampling_options

if TYPE_CHECKING:
    from moechat import Engine

_REFUSED = {"suffix": "the models here continue texts at their end"}
_MOST_LOGPROBS = 5
_MOST_CHARACTERS = 1 << 26


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request.

    Attributes:
        model: As the client named it.
        prompt: A text, or token ids.
        options: Keyword arguments of ``Engine.generate``.
        stream: Answer in pieces.
        include_usage: End the stream with the numbers of tokens.
        echo: Begin with the prompt.
    """

    model: str
    prompt: str | list[int]
    options: dict[str, Any]
    stream: bool
    include_usage: bool
    echo: bool

    @classmethod
    def parse(cls, fields: Fields) -> CompletionRequest:
        """Read the body.

        Raises:
            ApiError, UsageError: A field is missing or wrong.
        """
        fields.refuse(_REFUSED)
        require_one(fields)
        best = fields.whole("best_of", 1, 1 << 20)
        if best not in (None, 1):
            raise fields.error(
                "best_of", f"best_of is {best}; only 1 is supported", code="unsupported_parameter"
            )
        options = sampling_options(fields)
        # OpenAI's own default is 16; no limit surprises less.
        options["max_new_tokens"] = max_tokens(fields, "max_tokens")
        logprobs = fields.whole("logprobs", 0, _MOST_LOGPROBS)
        if logprobs is not None:
            options["logprobs"] = logprobs
        schema = response_schema(fields)
        if schema is not None:
            options["grammar"] = Grammar.json_schema(schema)
        prompt = _prompt(fields)
        echo = fields.flag("echo")
        if echo and not isinstance(prompt, str):
            raise fields.error("echo", "echo needs a prompt that is a text", code="unsupported_parameter")
        if echo and logprobs is not None:
            raise fields.error("echo", "echo excludes logprobs", code="unsupported_parameter")
        stream_options = fields.inner("stream_options")
        return cls(
            fields.text("model"),
            prompt,
            options,
            fields.flag("stream"),
            stream_options is not None and stream_options.flag("include_usage"),
            echo,
        )

    def job(self) -> Job:
        """The job; made in the task that waits for it."""
        return Job(self.model, self._encode, dict(self.options))

    def _encode(self, engine: Engine) -> list[int]:
        if isinstance(self.prompt, str):
            return engine.encode(self.prompt)
        ids: list[int] = engine.prompts.check_ids(self.prompt, 1)[0].tolist()
        return ids


class CompletionAnswer:
    """Writes one reply in the form of completions.

    Args:
        request: What was asked.
        reply: The reply.
    """

    def __init__(self, request: CompletionRequest, reply: Reply) -> None:
        self._request = request
        self._reply = reply
        self._id = new_id("cmpl")
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """The body of an answer in one piece.

        Raises:
            Exception: The computation failed.
        """
        found, steps = await self._reply.whole()
        text = self._echoed + found.text
        logprobs = self._logprobs(steps, 0)
        return {**self._body(text, self._reply.finish_reason, logprobs), "usage": usage(self._reply)}

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of an answer in pieces; an error is the last of them."""
        written = 0
        if self._echoed:
            yield self._chunk(self._echoed)
        try:
            async for piece in self._reply.pieces():
                if isinstance(piece, Waiting):
                    yield sse.comment(f"{piece.done} of {piece.total} tokens of the prompt are computed")
                    continue
                text = piece.step.text
                logprobs = self._logprobs([piece.step], written)
                written += len(text)
                if text or logprobs or piece.step.finish_reason:
                    yield self._chunk(text, piece.step.finish_reason, logprobs)
        except Exception as error:
            yield sse.event(api_error(error).body)
            return
        if self._request.include_usage:
            yield sse.event({**self._body("", None, None), "choices": [], "usage": usage(self._reply)})
        yield sse.DONE

    @property
    def _echoed(self) -> str:
        prompt = self._request.prompt
        return prompt if self._request.echo and isinstance(prompt, str) else ""

    def _chunk(self, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        body = self._body(text, reason, logprobs)
        return sse.event({**body, "usage": None} if self._request.include_usage else body)

    def _body(self, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._reply.begun.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [choice],
        }

    def _logprobs(self, steps: list[Step], offset: int) -> dict[str, Any] | None:
        if "logprobs" not in self._request.options:
            return None
        text = self._reply.begun.token_text
        offsets = []
        for step in steps:
            offsets.append(offset)
            offset += len(step.text)
        return {
            "tokens": [text(step.token_id) for step in steps],
            "token_logprobs": [step.logprob for step in steps],
            "top_logprobs": [
                {text(one.token_id): one.logprob for one in step.top_logprobs} for step in steps
            ],
            "text_offset": offsets,
        }


def _prompt(fields: Fields) -> str | list[int]:
    value = fields.values.get("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and 0 < len(value) <= _MOST_CHARACTERS:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise fields.error("prompt", "prompt must be one text, or a list of token ids, and not empty")
