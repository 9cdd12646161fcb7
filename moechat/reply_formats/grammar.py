"""What an answer has to look like: JSON of a schema, a regular expression, or rules of one's own.

The engine turns it into masks (``moechat/engine/grammar.py``); a client of a server only sends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moechat.errors import UsageError, one_line
from moechat.reply_formats.lark import JSON_SPACE

_JSON_OPTIONS = {"whitespace_pattern": JSON_SPACE}


@dataclass(frozen=True)
class Grammar:
    """What an answer has to look like. Made by the methods below.

    Attributes:
        rules: In a form that llguidance reads.
        title: For messages: ``the JSON schema``.
        after: The grammar holds behind the first such text of the answer, special tokens included: the end of
            a thought, say. Empty: from the first token on.
    """

    rules: str
    title: str
    after: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, after: str = "") -> Grammar:
        """JSON of a schema.

        Args:
            schema: The schema, or its JSON text.
            after: See above.

        Raises:
            UsageError: It is not a JSON object.
        """
        library = guidance_library()
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(found, Mapping):
                raise ValueError("it is not an object")
            text = json.dumps(found, allow_nan=False)
            return cls(
                library.LLMatcher.grammar_from_json_schema(text, _JSON_OPTIONS), "the JSON schema", after
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                f"the JSON schema cannot be read: {one_line(error)}",
                hint='give an object: {"type": "object", …}',
            ) from None

    @classmethod
    def json_object(cls, *, after: str = "") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, after=after)

    @classmethod
    def lark(cls, text: str, *, after: str = "") -> Grammar:
        """Rules in llguidance's dialect of Lark, or in llama.cpp's GBNF, told by its ``::=``."""
        if "::=" in text:
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                text = gbnf_to_lark(text)
            except Exception as error:
                raise UsageError(f"the grammar cannot be read as GBNF: {one_line(error)}") from None
        return cls(guidance_library().LLMatcher.grammar_from_lark(text), "the grammar", after)

    @classmethod
    def regex(cls, pattern: str, *, after: str = "") -> Grammar:
        """A regular expression that the whole answer matches, in the syntax of Rust's ``regex``."""
        return cls(guidance_library().LLMatcher.grammar_from_regex(pattern), "the regular expression", after)


def guidance_library() -> Any:
    """``llguidance``, imported when it is needed: that takes a tenth of a second."""
    import llguidance

    return llguidance
