"""Names of GGUF files that ``gguf-split`` cut into parts."""

from __future__ import annotations

import re

GGUF_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<end>\.gguf)", re.IGNORECASE)
_MAX_PARTS = 1000


def gguf_parts(name: str) -> list[str]:
    """All file names, in order, of the GGUF model that the named file belongs to.

    A name whose numbers make no sense (part 5 of 3, 1 of 0) is a model in a single file.
    """
    match = _match_part(name)
    return [name] if match is None else [_part_name(match, n) for n in range(1, int(match["count"]) + 1)]


def first_gguf_part(name: str) -> str:
    """The first of :func:`gguf_parts`: equal for all files of one model, to group them in one pass."""
    match = _match_part(name)
    return name if match is None else _part_name(match, 1)


def _match_part(name: str) -> re.Match[str] | None:
    match = _PART.fullmatch(name)
    return match if match and 1 <= int(match["number"]) <= int(match["count"]) <= _MAX_PARTS else None


def _part_name(match: re.Match[str], number: int) -> str:
    return f"{match['stem']}-{number:05d}-of-{match['count']}{match['end']}"
