"""The arguments of ``moechat count``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moechat.cli.completion.completers import complete_models
from moechat.cli.parameters import argument, flag

_HELP = """\
Count the tokens of a text for a model, without loading its weights.

Prints the number on stdout. The text is an argument, or piped stdin, or both, as for `moechat run`.

--json: model, tokens, characters, context (most tokens of prompt and answer together, as the model was made).
"""
_EXAMPLES = """\
moechat count demo "Once upon a time"

moechat count demo --chat <README.md

git diff | moechat count demo --json
"""


@dataclass(frozen=True, kw_only=True)
class CountCommand:
    """The arguments of ``moechat count``."""

    HELP: ClassVar[str] = _HELP
    EXAMPLES: ClassVar[str] = _EXAMPLES

    model: Annotated[str, argument("MODEL", "As for run; it has to be on this machine.", complete_models)]
    text: Annotated[str | None, argument("TEXT", "The text; '-' reads it from stdin.")] = None
    chat: Annotated[bool, flag("As one message of a chat, with what the chat template adds.", "--chat")] = (
        False
    )
    json: Annotated[bool, flag("Print one JSON object.", "--json")] = False
