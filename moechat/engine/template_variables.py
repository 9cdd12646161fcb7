"""The variables that a chat template reads, from its syntax tree."""

from __future__ import annotations

from functools import lru_cache

from moechat.confined.process import RefusedError
from moechat.confined.templates import free_variables
from moechat.reply_formats.template_inputs import TEMPLATE_INPUTS

# Functions that transformers defines for templates.
_FUNCTIONS = ("raise_exception", "strftime_now")


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str] | None:
    """The variables of a template that a caller may set.

    Args:
        template: Its text, as transformers takes it.

    Returns:
        Their names, without those that every template gets and without special tokens; ``None`` if the
        template cannot be parsed.
    """
    try:
        found = free_variables(template)
    except RefusedError:
        return None
    return found and frozenset(
        name for name in found.difference(TEMPLATE_INPUTS, _FUNCTIONS) if not name.endswith("_token")
    )
