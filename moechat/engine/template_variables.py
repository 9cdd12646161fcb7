"""The variables that a chat template reads, from its syntax tree."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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
    from jinja2 import Environment, TemplateError, meta
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """Reads over transformers' marks around answers."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        environment = Environment(extensions=[loopcontrols, Generation])
        found = meta.find_undeclared_variables(environment.parse(template))
    except (TemplateError, RecursionError):
        return None
    return frozenset(
        name for name in found.difference(TEMPLATE_INPUTS, _FUNCTIONS) if not name.endswith("_token")
    )
