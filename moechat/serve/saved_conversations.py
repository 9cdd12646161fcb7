"""The conversations of the chat on the terminal, for the page: ``/moechat/conversations``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moechat.errors import SessionsUnavailableError
from moechat.history.conversation import Conversation
from moechat.history.session_database import Sessions, Summary
from moechat.serve.api_errors import ApiError, api_error
from moechat.serve.conversation_forms import (
    HIGHEST_KEY,
    keep,
    keys_in,
    summary_json,
    text_of,
    title_in,
    to_json,
    turns_in,
)
from moechat.serve.guard import log
from moechat.serve.handling import Handler, answering, read_body
from moechat.serve.peer_user import is_same_user

_ADDRESS = "/moechat/conversations"
_ONE = _ADDRESS + "/{key}"
# Requests that use the database at a time: one that waits for a lock must hold up nothing else.
_THREADS = 2
_LISTED, _MOST_LISTED = 100, 1000
_MOST_SEARCHED = 200
_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin"}
_R = TypeVar("_R")


class SavedConversations:
    """The handlers of these addresses.

    Every request opens the database anew: SQLite's own locks order them with each other and with the chats
    of other processes.

    Args:
        path: The database; ``None`` keeps none.
        has_key: Clients need a key. Else only programs of the same user may use the conversations: the file
            is private, and other people may work on the machine.
    """

    def __init__(self, path: Path | None, *, has_key: bool = False) -> None:
        self._path = path
        self._has_key = has_key
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="conversations")

    def routes(self) -> list[Route]:
        """All routes."""
        handlers: list[tuple[str, str, Handler]] = [
            (_ADDRESS, "GET", self.find),
            (_ADDRESS, "POST", self.create),
            (_ONE, "GET", self.read),
            (_ONE, "PATCH", self.change),
            (_ONE, "DELETE", self.delete),
            (f"{_ONE}/turns", "POST", self.append),
            (f"{_ONE}/fork", "POST", self.fork),
        ]
        # One route for each address: a second one for the same address would answer 405 for its methods.
        paths = dict.fromkeys(path for path, _, _ in handlers)
        return [
            self._route(path, {method: handler for at, method, handler in handlers if at == path})
            for path in paths
        ]

    def _route(self, path: str, handlers: dict[str, Handler]) -> Route:
        async def handle(request: Request) -> Response:
            _require_own_page(request)
            method = "GET" if request.method == "HEAD" else request.method
            handler = handlers[method]
            # The list says that there are none, so that the page keeps its own.
            if handler != self.find and not self._is_allowed(request):
                raise ApiError(
                    403, "only the user who started the server may use its conversations", code="other_user"
                )
            return await handler(request)

        return Route(path, answering(handle), methods=[*handlers])

    def _is_allowed(self, request: Request) -> bool:
        client, server = request.scope.get("client"), request.scope.get("server")
        if self._has_key or client is None or server is None:
            return self._has_key
        return is_same_user(client, server) is not False

    async def find(self, request: Request) -> Response:
        """``GET``: the one used last first; with ``search``, those with all its words in one turn."""
        text = request.query_params.get("search", "")
        if len(text) > _MOST_SEARCHED:
            raise ApiError(
                400,
                f"search has {len(text)} characters; {_MOST_SEARCHED} is the limit",
                param="search",
            )
        limit = _whole(request, "limit", _LISTED, _MOST_LISTED)
        if self._path is None or not self._is_allowed(request):
            return JSONResponse({"saved": False, "more": False, "conversations": []}, headers=_HEADERS)

        def look(sessions: Sessions) -> list[Summary]:
            if text.strip():
                return sessions.search(text, limit=limit + 1)
            return sessions.summaries(limit=limit + 1)

        found = await self._with(look, existing=True)
        rows = [summary_json(summary) for summary in found[:limit]]
        return JSONResponse(
            {"saved": True, "more": len(found) > limit, "conversations": rows}, headers=_HEADERS
        )

    async def read(self, request: Request) -> Response:
        """``GET``: one conversation with its turns."""
        key = _key(request)

        def get(sessions: Sessions) -> dict[str, Any]:
            return to_json(sessions, key)

        return JSONResponse(await self._with(get, existing=True), headers=_HEADERS)

    async def create(self, request: Request) -> Response:
        """``POST``: a new conversation of ``turns``, with ``system`` and ``title`` where they are given."""
        fields = await read_body(request)
        conversation = Conversation(system=text_of(fields, "system") or None, title=title_in(fields) or "")
        for turn in turns_in(fields):
            conversation.add(turn)
        if not conversation.turns:
            raise fields.error("turns", "turns is empty; a conversation begins with one")
        return JSONResponse(await self._with(lambda sessions: keep(sessions, conversation)), 201, _HEADERS)

    async def append(self, request: Request) -> Response:
        """``POST``: add ``turns``, after taking back those of ``undone``, in one transaction.

        Sets ``system`` too where it is given. A conversation that is deleted meanwhile goes on under a new
        ``id``, with the new turns.
        """
        key = _key(request)
        fields = await read_body(request)
        turns, undone = turns_in(fields), keys_in(fields, "undone")

        def add(sessions: Sessions) -> dict[str, Any]:
            conversation = sessions.get(key)
            for each in undone:
                conversation.roll_back(each)
            for turn in turns:
                conversation.add(turn)
            if fields.has("system"):
                conversation.system = text_of(fields, "system") or None
            return keep(sessions, conversation)

        return JSONResponse(await self._with(add), headers=_HEADERS)

    async def change(self, request: Request) -> Response:
        """``PATCH``: another ``title`` or ``system``."""
        key = _key(request)
        fields = await read_body(request)
        title = title_in(fields)
        if title is None and not fields.has("system"):
            raise fields.error("title", "neither title nor system is given")
        if title == "":
            raise fields.error("title", "title is empty")

        def change(sessions: Sessions) -> dict[str, Any]:
            conversation = sessions.get(key)
            conversation.title = title or conversation.title
            if fields.has("system"):
                conversation.system = text_of(fields, "system") or None
            return keep(sessions, conversation)

        return JSONResponse(await self._with(change), headers=_HEADERS)

    async def delete(self, request: Request) -> Response:
        """``DELETE``: for good, without a trace in the file."""
        key = _key(request)
        title = await self._with(lambda sessions: sessions.delete(key))
        return JSONResponse({"id": key, "title": title, "deleted": True}, headers=_HEADERS)

    async def fork(self, request: Request) -> Response:
        """``POST``: a copy, of the turns up to the one ``through`` where that is given."""
        key = _key(request)
        fields = await read_body(request)
        through = fields.whole("through", 1, HIGHEST_KEY)

        def copy(sessions: Sessions) -> dict[str, Any]:
            copied = sessions.get(key).copy(through)
            if not copied.turns:
                raise ApiError(404, "that conversation has no such turn", param="through")
            return keep(sessions, copied)

        return JSONResponse(await self._with(copy), 201, _HEADERS)

    async def _with(self, work: Callable[[Sessions], _R], *, existing: bool = False) -> _R:
        """Work on the database, in a thread.

        Raises:
            ApiError: There is none, or it cannot be used.
            SessionNotFoundError: It lacks the conversation.
        """
        path = self._path
        if path is None:
            raise ApiError(404, "this server keeps no conversations", code="no_history")

        def run() -> _R:
            with Sessions(path, existing=existing) as sessions:
                return work(sessions)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except SessionsUnavailableError as error:
            log.warning("%s", error)
            # Clients need not know where it is.
            found = api_error(error)
            found.message = found.message.replace(str(path), "the database of conversations")
            raise found from error


def _require_own_page(request: Request) -> None:
    """Refuse pages of other origins, even those that may ask the model: these conversations are private.

    Programs other than browsers send neither header.

    Raises:
        ApiError: A page of another origin asks.
    """
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "none")
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if foreign or site not in ("same-origin", "none"):
        raise ApiError(403, "only this server's own page may use its conversations", code="wrong_origin")


def _key(request: Request) -> int:
    text = request.path_params["key"]
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(HIGHEST_KEY))
    key = int(text) if digits else 0
    if not 1 <= key <= HIGHEST_KEY:
        raise ApiError(404, "there is no such conversation", code="conversation_not_found")
    return key


def _whole(request: Request, name: str, default: int, most: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= most):
        raise ApiError(400, f"{name} must be a whole number from 1 to {most}", param=name)
    return int(value)
