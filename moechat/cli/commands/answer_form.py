"""The form of answers: ``--schema FILE`` and ``--grammar FILE``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moechat.errors import UsageError

if TYPE_CHECKING:
    from moechat.reply_formats.grammar import Grammar

_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class AnswerForm:
    """What every answer has to look like.

    Attributes:
        kind: A JSON schema, or a grammar.
        text: Its text.
    """

    kind: Literal["schema", "grammar"]
    text: str

    @classmethod
    def read(cls, kind: Literal["schema", "grammar"], path: str) -> AnswerForm:
        """Read a file.

        Raises:
            UsageError: It cannot be read, is too large or not UTF-8, or a schema is no JSON object.
        """
        option = f"--{kind}"
        try:
            with open(Path(path).expanduser(), "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            text = data.decode("utf-8-sig")
        except FileNotFoundError:
            raise UsageError(f"there is no file {path}", hint=f"{option} needs a file") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not UTF-8") from None
        if len(data) > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB")
        if kind == "schema":
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path} is not JSON: {error}") from None
            if not isinstance(found, dict):
                raise UsageError(f"{path} holds no JSON schema: it is not an object")
        elif not text.strip():
            raise UsageError(f"{path} is empty")
        return cls(kind, text)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    def grammar(self) -> Grammar:
        """The form for the engine.

        Raises:
            UsageError: It cannot be understood.
        """
        from moechat.reply_formats.grammar import Grammar

        return Grammar.json_schema(self.text) if self.kind == "schema" else Grammar.lark(self.text)
