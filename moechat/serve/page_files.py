"""The page that people see at ``/``: plain files of the package, which a browser may not leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_DIRECTORY = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
}
# Scripts and styles are files of this server alone, and the page talks to nothing else: if a model's answer
# ever got into it as HTML, it could neither run nor send anything.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def page_routes() -> list[Route]:
    """A route for each file; the paths need no key, as the page has to ask for it."""
    files = sorted(path for path in _DIRECTORY.iterdir() if path.suffix in _TYPES)
    return [
        Route("/" if path.name == "index.html" else f"/page/{path.name}", _sending(path)) for path in files
    ]


def _sending(path: Path) -> Callable[[Request], Awaitable[Response]]:
    body = path.read_bytes()

    async def send(request: Request) -> Response:
        return Response(body, media_type=_TYPES[path.suffix], headers=HEADERS)

    return send
