"""The engine of a server of the same user, over its private socket: the same answers as from one's own.

It uses httpcore, the part of httpx below its client, because importing all of httpx takes a fifth of a start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import httpcore

from moechat import errors
from moechat.errors import MoechatError, ServerEndedError, require_room
from moechat.steps import Step, TokenLogprob

# Seconds in which a server tells what it has loaded; one that computes a long pass takes longer.
_ASK_S = 2.0
_GOOD = 200
# How a server that has ended, or that ends in the middle, shows.
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
# The class of the error by which a server refuses while it shuts down.
_CLOSING = "ServerClosingError"
_HERE = "the next message or command loads the model here"
_SIZE = re.compile("\0([0-9.e+-]+)\0")


class _Stats(SimpleNamespace):
    """Measurements of the last answer; the fields of :class:`moechat.Stats`."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class ServerMap:
    """Where every expert is, as :class:`moechat.offload.expert_map.ExpertMap`."""

    layers: tuple[int, ...]
    places: tuple[str, ...]
    uses: tuple[str, ...]
    blocks: int
    numbers: Mapping[str, int]

    def counts(self) -> dict[str, int]:
        """Number of experts in each place."""
        return dict(self.numbers)


class _Sampling(SimpleNamespace):
    """The model's own sampling settings."""

    def override(self, **given: float | None) -> _Sampling:
        """These settings with some replaced."""
        changed = {name: value for name, value in given.items() if value is not None}
        return _Sampling(**{**vars(self), **changed})


@dataclass(frozen=True)
class _Description:
    """Facts about the model; as :class:`moechat.Description`."""

    facts: Mapping[str, Any]
    marked: Sequence[tuple[str, str]]

    def rows(self, size: Callable[[float], str]) -> list[tuple[str, str]]:
        """Names and values for people."""
        return [(name, _SIZE.sub(lambda found: size(float(found[1])), text)) for name, text in self.marked]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self.facts)


def ask_server(socket: str) -> dict[str, Any] | None:
    """What the server behind a socket has loaded; ``None`` if it does not tell in time, or has nothing.

    Args:
        socket: Path of its private socket.
    """
    with _Connection(socket, _ASK_S) as connection:
        try:
            status, content = connection.request("GET", "/engine")
            found = json.loads(content) if status == _GOOD else None
        except (*_FAILURES, ValueError):
            return None
    return found if isinstance(found, dict) and isinstance(found.get("model"), str) else None


class ServerEngine:
    """A model that a server of this user has loaded, with what a chat needs of an engine.

    Args:
        socket: Path of the server's private socket.
        facts: From :func:`ask_server`.

    Attributes:
        name: Of the model.
        context_length: Tokens.
        has_chat_template: Whether it takes messages.
        socket: Path of the server's private socket.
        stats: Of the last answer; of one that did not reach its end only the numbers of tokens.
        tuning: ``None``: the server tunes its plans.
    """

    tuning = None

    def __init__(self, socket: str, facts: Mapping[str, Any]) -> None:
        self.name = str(facts["name"])
        self.context_length = int(facts["context_length"])
        self.has_chat_template = bool(facts["has_chat_template"])
        self.socket = socket
        self.stats = _Stats(prompt_tokens=0, output_tokens=0, pages=0)
        self._facts = facts
        # No time-out for answers: the request may wait behind others.
        self._connection = _Connection(socket, None)
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    @property
    def template_variables(self) -> frozenset[str] | None:
        """Names that the chat template reads; see ``Engine.template_variables``."""
        found = self._facts["template_variables"]
        return None if found is None else frozenset(found)

    @property
    def sampling(self) -> Any:
        """The model's own settings."""
        return _Sampling(**self._facts["sampling"])

    def close(self) -> None:
        """Close the connections; the model stays loaded."""
        self._connection.close()

    def describe(self) -> _Description:
        """Facts about the model."""
        rows = [(str(name), str(text)) for name, text in self._facts["rows"]]
        return _Description(self._facts["description"], rows)

    def expert_map(self) -> ServerMap:
        """Where every expert is."""
        found = self._ask("/engine/map")
        layers, places, uses = (tuple(found[name]) for name in ("layers", "places", "uses"))
        return ServerMap(layers, places, uses, int(found["blocks"]), found["counts"])

    def idle(self) -> None:
        """Nothing to do: the server does it."""

    def notices(self) -> list[str]:
        """Nothing to tell: the server tells it."""
        return []

    def token_text(self, token: int) -> str:
        """One token as text; see ``Engine.token_text``."""
        self._learn([token])
        return self._texts[token]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; see ``Engine.token_bytes``."""
        self._learn([token])
        return self._bytes[token]

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a text or of messages; see ``Engine.encode``."""
        asked = prompt if isinstance(prompt, str) else list(prompt)
        found = self._ask("/engine/encode", prompt=asked, template_options=dict(template_options or {}))
        tokens: list[int] = found["tokens"]
        self._note(tokens[len(tokens) - len(found["texts"]) :], found)
        return tokens

    def generate(
        self,
        prompt: str | Sequence[Any],
        *,
        progress: Callable[[int, int], None] | None = None,
        grammar: Any = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Generate an answer; arguments, result and errors as for ``Engine.generate``.

        If the server has ended, :class:`moechat.errors.ServerEndedError` is raised; before the first step
        nothing is lost by starting again elsewhere.

        The server is asked when the first step is wanted, because a chat that tries how much of a
        conversation fits makes several of these iterators. So errors of settings come then. The request waits
        for its turn where the server answers others.
        """
        tokens = list(prompt)
        if isinstance(prompt, str) or not all(isinstance(token, int) for token in tokens):
            tokens = self.encode(prompt)
        require_room(len(tokens), self.context_length, options.get("reserve", 1))
        given = {name: value for name, value in options.items() if value is not None}
        if grammar is not None:
            given["grammar"] = asdict(grammar)
        body = {"model": self._facts["model"], "tokens": tokens, "options": given}
        return self._steps(self._events(body), len(tokens), progress or (lambda _done, _total: None))

    def _steps(
        self,
        events: Generator[dict[str, Any], None, None],
        prompt_tokens: int,
        progress: Callable[[int, int], None],
    ) -> Iterator[Step]:
        count = 0
        stats = None
        try:
            with closing(events):
                for event in events:
                    if "prefilled" in event:
                        progress(*event["prefilled"])
                    elif "step" in event:
                        count += 1
                        yield _step(event["step"])
                    elif "stats" in event:
                        stats = _Stats(**event["stats"])
            if stats is None:
                raise _ended()
        except ServerEndedError:
            if not count:
                raise
            raise ServerEndedError("the server ended in the middle of the answer", hint=_HERE) from None
        finally:
            # A chat counts its context by them, also after an answer that was stopped.
            self.stats = stats or _Stats(prompt_tokens=prompt_tokens, output_tokens=count, pages=0)

    def _events(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        try:
            with self._connection.stream("POST", "/engine/generate", body) as response:
                if response.status != _GOOD:
                    raise _refusal(response.status, response.read())
                for line in _split_lines(response.iter_stream()):
                    event = json.loads(line)
                    if "error" in event:
                        raise _error(event["error"])
                    yield event
        except _FAILURES:
            raise _ended() from None

    def _learn(self, tokens: Sequence[int]) -> None:
        """Ask for the texts of tokens that are not known yet."""
        new = sorted({token for token in tokens if token not in self._texts})
        if new:
            self._note(new, self._ask("/engine/texts", tokens=new))

    def _note(self, tokens: Sequence[int], found: Mapping[str, Any]) -> None:
        self._texts |= zip(tokens, found["texts"], strict=True)
        self._bytes |= zip(tokens, map(bytes.fromhex, found["bytes"]), strict=True)

    def _ask(self, path: str, **fields: Any) -> dict[str, Any]:
        try:
            status, content = self._connection.request(
                "POST", path, {"model": self._facts["model"], **fields}
            )
        except _FAILURES:
            raise _ended() from None
        if status != _GOOD:
            raise _refusal(status, content)
        found: dict[str, Any] = json.loads(content)
        return found


class _Connection:
    """Connections to a server's private socket; a context manager that closes them.

    Args:
        socket: Path of the socket.
        timeout_s: For each read and write; ``None``: none.
    """

    def __init__(self, socket: str, timeout_s: float | None) -> None:
        self._pool = httpcore.ConnectionPool(uds=socket)
        self._timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close them."""
        self._pool.close()

    def stream(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[httpcore.Response]:
        """Send a request; the answer is not read yet."""
        content = None if body is None else json.dumps(body).encode()
        return self._pool.stream(
            method,
            f"http://localhost{path}",
            headers={"Content-Type": "application/json", "Content-Length": str(len(content or b""))},
            content=content,
            extensions={"timeout": self._timeouts},
        )

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a request; returns the status and the content of the answer."""
        with self.stream(method, path, body) as response:
            return response.status, response.read()


def _split_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _step(found: Mapping[str, Any]) -> Step:
    top = tuple(TokenLogprob(int(token), float(value)) for token, value in found.get("top_logprobs", ()))
    return Step(
        found["text"],
        found["token_id"],
        found.get("finish_reason"),
        found.get("stop"),
        found.get("logprob"),
        top,
    )


def _ended() -> ServerEndedError:
    return ServerEndedError("the server that had the model in memory has ended", hint=_HERE)


def _refusal(status: int, content: bytes) -> MoechatError:
    try:
        return _error(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return MoechatError(f"the server answers with status {status}")


def _error(found: Mapping[str, Any]) -> MoechatError:
    """The error that the server's engine raised."""
    if found.get("class") == _CLOSING:
        return _ended()
    kind = getattr(errors, str(found.get("class")), MoechatError)
    if not (isinstance(kind, type) and issubclass(kind, MoechatError)):
        kind = MoechatError
    return kind(str(found.get("message")), hint=found.get("hint"))
