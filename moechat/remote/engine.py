"""A model on another server, with what a chat needs of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from moechat.errors import ModelNotFoundError, UsageError
from moechat.remote.client import RemoteClient, RemoteError
from moechat.steps import NO_TOKEN, FinishReason, Step

DEFAULT_MODEL = "default"
# Tokens of a context whose length the server does not tell: as good as none.
_UNKNOWN_CONTEXT = 1 << 24
_CHARACTERS_PER_TOKEN = 4
# Fields of a model's entry in which servers tell its context: vLLM and SGLang, moechat, others.
_CONTEXT_FIELDS = ("max_model_len", "context_length", "max_context_length")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class RemoteStats:
    """Measurements of the last answer; the fields that other engines tell.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Of these, those that were cached.
        output_tokens: Tokens of the answer; pieces where the server does not tell.
        ttft_s: Seconds to the first piece.
        tpot_s: Mean seconds for each token after the first.
        busy_s: Seconds from request to end.
        seed: That was sent; ``None``: none was.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    busy_s: float = 0.0
    seed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class RemoteDescription:
    """Facts about a remote model.

    Attributes:
        name: Of the model.
        url: Of the server.
        context: Tokens; 0: unknown.
    """

    name: str
    url: str
    context: int

    def rows(self, size: Callable[[float], str]) -> list[tuple[str, str]]:
        """Names and values for people."""
        return [("model", self.name), ("server", self.url)]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self)


class _ServersOwn:
    """Sampling settings that the server chooses."""

    def override(self, **_: float | None) -> _ServersOwn:
        return self

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return "the server's own"


class RemotePrompt(Sequence[int]):
    """Messages, or a text to continue; its length is an estimate of its tokens.

    Args:
        content: The messages or the text.
        template_options: Values for the server's chat template.
    """

    def __init__(
        self, content: str | Sequence[Mapping[str, Any]], template_options: Mapping[str, Any] | None = None
    ) -> None:
        self.content = content
        self.template_options = dict(template_options or {})
        texts = [content] if isinstance(content, str) else [str(one.get("content") or "") for one in content]
        self._tokens = max(1, sum(len(text) for text in texts) // _CHARACTERS_PER_TOKEN)

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, place: Any) -> Any:
        # The server has the tokens; the end of the prompt cannot be looked at.
        return [] if isinstance(place, slice) else NO_TOKEN


@dataclass
class _Running:
    first: float = 0.0
    pieces: int = 0
    thinking: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    stop: str | None = None


class RemoteEngine:
    """A model on another server.

    Args:
        url: Of the server.
        model: Its name there; ``default`` takes the first one.
        key_variable: The environment variable with the server's key; empty: the one for any server.

    Raises:
        MoechatError: The server cannot be reached or refuses, or has no such model.

    Attributes:
        name: Of the model, as the server tells it.
        context_length: Tokens; a huge number where the server does not tell.
    """

    has_chat_template = True

    def __init__(self, url: str, model: str = DEFAULT_MODEL, *, key_variable: str = "") -> None:
        self.client = RemoteClient(url, key_variable=key_variable)
        self.stats = RemoteStats()
        try:
            entry = self._find(model)
        except BaseException:
            self.client.close()
            raise
        self.name = str(entry["id"])
        told = [entry.get(key) for key in _CONTEXT_FIELDS]
        meta = entry.get("meta")
        if isinstance(meta, dict):  # llama.cpp
            told += [meta.get("n_ctx"), meta.get("n_ctx_train")]
        known = [number for number in told if isinstance(number, int) and number > 1]
        self._context = known[0] if known else 0
        self.context_length = self._context or _UNKNOWN_CONTEXT

    def beside(self) -> RemoteEngine:
        """The same model over the same connections, with measurements of its own."""
        other = copy(self)
        other.stats = RemoteStats()
        return other

    @property
    def sampling(self) -> Any:
        """The server's own settings."""
        return _ServersOwn()

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def describe(self) -> RemoteDescription:
        """Facts about the model."""
        return RemoteDescription(self.name, self.client.base, self._context)

    def expert_map(self) -> None:
        """Nothing is known about the experts there."""

    def idle(self) -> None:
        """Nothing to do."""

    def notices(self) -> list[str]:
        """Nothing to tell."""
        return []

    def token_text(self, token: int) -> str:
        """Empty: the server has the tokens."""
        return ""

    @property
    def template_variables(self) -> None:
        """Not known: the server has the template."""
        return

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> RemotePrompt:
        """The prompt; the server encodes it, with the values for its chat template."""
        return RemotePrompt(prompt, template_options)

    def generate(
        self,
        prompt: RemotePrompt | str | Sequence[Mapping[str, Any]],
        *,
        reserve: int = 1,
        progress: Callable[[int, int], None] | None = None,
        grammar: Any = None,
        max_new_tokens: int | None = None,
        logprobs: int | None = None,
        stop: Sequence[str] | None = None,
        **settings: float | None,
    ) -> Iterator[Step]:
        """Generate an answer.

        Thinking, which servers send apart, stands in the text between ``<think>`` and ``</think>``.

        Args:
            prompt: Messages, or a text to continue.
            reserve: Not used: the server knows the length of the prompt.
            progress: Called before the request.
            grammar: A JSON schema, as an object.
            max_new_tokens: Most tokens of the answer.
            logprobs: Not available.
            stop: Texts that end the answer.
            settings: ``temperature`` and others, sent as they are.

        Raises:
            MoechatError: The server fails or refuses, also in the middle.
        """
        if logprobs is not None:
            raise UsageError("--logprobs are not available with --remote")
        asked = prompt if isinstance(prompt, RemotePrompt) else RemotePrompt(prompt)
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in settings.items() if value is not None}
        if max_new_tokens is not None:
            body["max_tokens"] = max_new_tokens
        if stop:
            body["stop"] = [stop] if isinstance(stop, str) else list(stop)
        if grammar is not None:
            schema = {"name": "answer", "schema": grammar, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if asked.template_options:
            body["chat_template_kwargs"] = asked.template_options
        if isinstance(asked.content, str):
            return self._steps("/completions", {**body, "prompt": asked.content}, progress)
        return self._steps("/chat/completions", {**body, "messages": list(asked.content)}, progress)

    def _steps(
        self, path: str, body: dict[str, Any], progress: Callable[[int, int], None] | None
    ) -> Iterator[Step]:
        started = time.perf_counter()
        running = _Running()
        self.stats = RemoteStats(seed=None if body.get("seed") is None else int(body["seed"]))
        if progress is not None:
            progress(0, 1)
        events = self.client.stream(path, body)
        try:
            for event in events:
                text = self._text(event, running)
                if text:
                    running.first = running.first or time.perf_counter()
                    running.pieces += 1
                    self._measure(running, started)
                    yield Step(text, NO_TOKEN)
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()
            self._measure(running, started)
        if running.reason is None:
            raise RemoteError(f"{self.client.host} ended the answer without a reason")
        reason: FinishReason = "length" if running.reason == "length" else "stop"
        yield Step(_CLOSE if running.thinking else "", NO_TOKEN, reason, running.stop)

    def _text(self, event: dict[str, Any], running: _Running) -> str:
        """The text of one event, with the marks of thinking."""
        if isinstance(event.get("usage"), dict):
            running.usage = event["usage"]
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return ""
        choice = choices[0]
        if isinstance(choice.get("finish_reason"), str):
            running.reason = choice["finish_reason"]
            if isinstance(choice.get("stop_reason"), str):  # vLLM's: the stop text
                running.stop = choice["stop_reason"]
        delta = choice.get("delta") or choice.get("message") or {}
        thought = _string(delta, "reasoning_content") or _string(delta, "reasoning")
        answer = _string(delta, "content") or _string(choice, "text")
        text = ""
        if thought:
            text = thought if running.thinking else _OPEN + thought
            running.thinking = True
        if answer:
            text += _CLOSE + answer if running.thinking else answer
            running.thinking = False
        return text

    def _measure(self, running: _Running, started: float) -> None:
        now = time.perf_counter()
        usage = running.usage
        output = _whole(usage, "completion_tokens") or running.pieces
        details = usage.get("prompt_tokens_details")
        self.stats = replace(
            self.stats,
            prompt_tokens=_whole(usage, "prompt_tokens"),
            reused_tokens=_whole(details, "cached_tokens") if isinstance(details, dict) else 0,
            output_tokens=output,
            ttft_s=running.first - started if running.first else 0.0,
            tpot_s=(now - running.first) / (output - 1) if running.first and output > 1 else 0.0,
            busy_s=now - started,
        )

    def _find(self, model: str) -> dict[str, Any]:
        listed = self.client.get("/models")
        data = listed.get("data") if isinstance(listed, dict) else None
        entries = [
            entry
            for entry in (data if isinstance(data, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        ]
        if not entries:
            raise RemoteError(f"{self.client.base} lists no models", hint="the URL mostly ends in /v1")
        if model == DEFAULT_MODEL:
            return entries[0]
        for entry in entries:
            if entry["id"] == model:
                return entry
        names = ", ".join(str(entry["id"]) for entry in entries[:8])
        raise ModelNotFoundError(
            f"{self.client.host} has no model {model}",
            hint=f"it has {names}; {DEFAULT_MODEL} takes the first",
        )


def _string(values: Any, name: str) -> str:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, str) else ""


def _whole(values: Any, name: str) -> int:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
