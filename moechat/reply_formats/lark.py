"""Writes grammars in llguidance's dialect of Lark.

Marks of a format may be special tokens, which a grammar has to name by their ids, or text. Here they are
written either way, from the same table of formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# Any text; special tokens cannot occur in it.
ANY_TEXT = "(?s:.)*"

# White space within JSON: a space, or a line break and an indent. Small models write it without end where any
# amount is allowed.
JSON_SPACE = r"( |\r?\n[ \t]{0,20})?"


def grammar_tokens(added: Mapping[str, int], special: Sequence[str] = ()) -> dict[str, int]:
    """The tokens that a grammar has to name by their ids.

    Args:
        added: Ids of the tokenizer's added tokens by their text.
        special: Texts of those that the tokenizer marks as special.

    Returns:
        Those that are special for llguidance: the marked ones, and all of the form ``<…>``.
    """
    return {
        text: token
        for text, token in added.items()
        if text in special or (text.startswith("<") and text.endswith(">"))
    }


class LarkWriter:
    """Collects rules, and writes expressions for them.

    Args:
        tokens: Ids of special tokens by their text, see :func:`grammar_tokens`.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        texts = sorted(filter(None, tokens), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})" if texts else r"(?!)")
        self._rules: dict[str, str] = {}

    @property
    def size(self) -> int:
        """The number of rules."""
        return len(self._rules)

    def text(self) -> str:
        """The grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items()) + "\n"

    def rule(self, name: str, body: str) -> str:
        """Add a rule, if there is none of this name yet; returns its name.

        Names of terminals are upper case: their bodies are matched as one piece.
        """
        self._rules.setdefault(name, body)
        return name.partition("[")[0]

    def numbered(self, prefix: str, body: str, options: str = "") -> str:
        """Add a rule with a name of its own; returns the name."""
        name = f"{prefix}_{len(self._rules)}"
        self._rules[name + options] = body
        return name

    def literal(self, text: str) -> str:
        """An expression for a text that may contain special tokens; it must not be empty."""
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else quoted(part)
            for part in self._split.split(text)
            if part
        )

    def until(self, close: str) -> str:
        """An expression for any text up to the first ``close``, and for that."""
        before, found, behind = self._parts(close)
        if not found:
            return self.numbered("upto", f"/{ANY_TEXT}{regex(close)}/", "[lazy]")
        rest = f" {self.literal(behind)}" if behind else ""
        return f"/{ANY_TEXT}{regex(before)}/ {self.literal(found)}{rest}"

    def json(self, schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> str:
        """An expression for JSON that follows a schema.

        Keywords that llguidance does not know are ignored: a client's schema is no reason to refuse.

        Args:
            schema: The schema.
            definitions: Another one, whose definitions this one may refer to.
        """
        shared = {
            key: (definitions or {})[key] for key in ("$defs", "definitions") if key in (definitions or {})
        }
        options = {"x-guidance": {"lenient": True, "whitespace_pattern": JSON_SPACE}}
        return f"%json {json.dumps({**options, **shared, **schema})}"

    def _parts(self, text: str) -> tuple[str, str, str]:
        """The text before the first special token in it, the token, the rest."""
        parts = self._split.split(text, maxsplit=1)
        return (parts[0], parts[1], parts[2]) if len(parts) == 3 else (text, "", "")


def quoted(text: str) -> str:
    """A string of the grammar; it must not be empty."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """A regular expression, within slashes, for exactly this text."""
    return "".join(
        f"\\{character}" if character in _REGEX_SIGNS else _CONTROLS.get(character, character)
        for character in text
    )


def either(options: Sequence[str]) -> str:
    """An expression for one of several."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
