"""Reads the text at a URL, for a message: within limits of size and time."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import httpx

from moechat.errors import OfflineError, UsageError, one_line

_MOST_BYTES = 16 << 20
_MOST_S = 60.0
_CONNECT_S, _READ_S = 10.0, 20.0
_MOST_REDIRECTS = 5
_TEXT_TYPES = re.compile(
    r"text/|application/(.*[+./-])?(json|xml|yaml|toml|javascript|x-sh|sql)\b", re.IGNORECASE
)
_SKIPPED = ("script", "style", "noscript", "template", "svg", "iframe", "object")
_CODE_LINE = "\0"  # begins a line of code while a page is read
# Elements that begin and end a line.
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote br dd div dl dt fieldset figcaption figure footer form h1 h2 h3 h4"
        " h5 h6 header hr li main nav ol p pre section table td th title tr ul",
    )
)


def read_url(url: str) -> tuple[str, str]:
    """Name and text of what is at a URL; of an HTML page, its text.

    Args:
        url: ``http`` or ``https``.

    Raises:
        UsageError: It is no URL, is not text, has more than 16 MiB, or the server refuses it.
        OfflineError: The server cannot be reached, or takes more than a minute.
    """
    shown, end = one_line(url), time.monotonic() + _MOST_S
    limits = httpx.Timeout(_READ_S, connect=_CONNECT_S)
    # Compressed, a few bytes could become gigabytes.
    headers = {"Accept": "text/*, application/json;q=0.9, */*;q=0.1", "Accept-Encoding": "identity"}
    try:
        with (
            httpx.Client(follow_redirects=True, max_redirects=_MOST_REDIRECTS, timeout=limits) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise UsageError(f"{shown}: the server answers with status {response.status_code}")
            kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip()
            if not _TEXT_TYPES.match(kind):
                raise UsageError(f"{shown} is not text: its type is {one_line(kind)}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise UsageError(f"{shown} is compressed, though that was not asked for")
            data, charset = _body(response, shown, end), response.charset_encoding or "utf-8"
            place = urlsplit(str(response.url))
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(f"{shown} is no URL: {one_line(error)}") from None
    except httpx.HTTPError as error:
        raise OfflineError(
            f"{shown} cannot be read: {one_line(error) or type(error).__name__}",
            hint="check the URL and the connection, or save it to a file and give that",
        ) from None
    try:
        text = data.decode("utf-8-sig" if charset.lower() == "utf-8" else charset)
    except (UnicodeDecodeError, LookupError) as error:
        raise UsageError(
            f"{shown} is not {one_line(charset)}, as its server says: {one_line(error)}"
        ) from None
    name = unquote(place.path).rstrip("/").rpartition("/")[2] or place.netloc
    return one_line(name), text_of_html(text) if "html" in kind.lower() else text


def _body(response: httpx.Response, shown: str, end: float) -> bytes:
    data = bytearray()
    for piece in response.iter_raw():
        data += piece
        if len(data) > _MOST_BYTES:
            raise UsageError(f"{shown} has more than {_MOST_BYTES >> 20} MiB, more than any context holds")
        if time.monotonic() > end:
            raise OfflineError(
                f"{shown} takes more than {_MOST_S:.0f} s", hint="save it to a file and give that"
            )
    return bytes(data)


def text_of_html(page: str) -> str:
    """The text of an HTML page, a line for each block, without scripts and styles; code keeps its lines."""
    reader = _Words()
    reader.feed(page)
    reader.close()
    lines = "".join(reader.parts).split("\n")
    words = (
        line[len(_CODE_LINE) :].rstrip() if line.startswith(_CODE_LINE) else " ".join(line.split())
        for line in lines
    )
    return "\n".join(line for line in words if line)


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped = self._code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in _SKIPPED
        self._code += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(0, self._skipped - (tag in _SKIPPED))
        self._code = max(0, self._code - (tag == "pre"))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._skipped:
            return
        text = data.replace(_CODE_LINE, "")
        self.parts.append(text.replace("\n", "\n" + _CODE_LINE if self._code else " "))

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS and not self._skipped:
            self.parts.append("\n" + _CODE_LINE if self._code else "\n")
