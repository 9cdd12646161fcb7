"""The chat's ``/set``: settings of answers, and values for the chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moechat.chat.chat_options import MODELS_OWN, NAMES, setting_of
from moechat.chat.template_options import THINK, TemplateOptions, parse_switch, parse_value, require_name
from moechat.errors import UsageError

if TYPE_CHECKING:
    from moechat.chat.session import ChatSession

# The setting that takes any variable of the chat template.
TEMPLATE_OPTION = "template_option"


def change_setting(session: ChatSession, text: str) -> None:
    """Change one setting, and show it.

    Args:
        session: The chat.
        text: ``NAME VALUE`` or ``NAME=VALUE``; the name may be a variable of the chat template.

    Raises:
        UsageError: There is no such setting, or the value is wrong; nothing has changed.
    """
    name, _, value = text.replace("=", " ", 1).partition(" ")
    variable = _template_variable(session, name)
    if variable is not None:
        if variable == TEMPLATE_OPTION:
            variable, _, value = value.strip().replace("=", " ", 1).partition(" ")
            if not variable:
                raise UsageError(f"/set {TEMPLATE_OPTION} needs NAME VALUE")
            require_name(variable, "/set")
        _change_template_option(session, variable, value.strip())
        return
    name = setting_of(name, (THINK, TEMPLATE_OPTION))
    if not value.strip():
        raise UsageError(f"/set {name} needs a value", hint="'default' restores the model's own")
    session.generation = session.generation.with_text(name, value.strip())
    if name == "max_tokens":
        session.changed()  # the space for turns depends on it
    session.status.table([row for row in setting_rows(session) if row[0] == name])


def setting_rows(session: ChatSession) -> list[tuple[str, str]]:
    """All settings, with their values and sources."""
    generation, sampling = session.generation, session.models.engine.sampling
    shown = {
        name: value
        for name in NAMES
        if name not in ("seed", "max_tokens") and (value := generation.value(name)) is not None
    }
    in_effect = sampling.override(**shown)
    unset = {"seed": "a fresh one each time", "max_tokens": "what the context holds"}
    rows = []
    for name in NAMES:
        chosen = generation.value(name)
        shown_value = getattr(in_effect, name, unset.get(name)) if chosen is None else chosen
        origin = generation.origin(name)
        # Truncating the distribution turns sampling on.
        implied = origin == MODELS_OWN and getattr(in_effect, name, None) != getattr(sampling, name, None)
        rows.append((name, f"{shown_value}  ({'follows from the others' if implied else origin})"))
    return [*rows, *_template_rows(session)]


def _template_variable(session: ChatSession, name: str) -> str | None:
    """The variable that a name of a setting means, or :data:`TEMPLATE_OPTION`; ``None``: another setting."""
    name = name.replace("-", "_")
    if name.lower() in (THINK, TEMPLATE_OPTION):
        return name.lower()
    known = name.lower() not in NAMES and name in (session.models.engine.template_variables or ())
    return name if known else None


def _change_template_option(session: ChatSession, name: str, value: str) -> None:
    if not value:
        raise UsageError(f"/set {name} needs a value", hint="'default' restores the template's own")
    chosen: Any = None
    if value.lower() != "default":
        chosen = parse_switch(value) if name == THINK else parse_value(value)
    session.generation = replace(
        session.generation, template=session.generation.template.changing(name, chosen)
    )
    session.changed()  # the prompt may be longer or shorter
    rows = [row for row in _template_rows(session) if row[0] == name]
    session.status.table(rows or [(name, "the template's own")])
    engine = session.models.engine
    for text in TemplateOptions(changed={name: chosen}).unread(engine.name, engine.template_variables):
        session.status.notice(text)


def _template_rows(session: ChatSession) -> list[tuple[str, str]]:
    template = session.generation.template
    values = dict(template.named)
    if template.wants_thinking is not None:
        values[THINK] = "on" if template.wants_thinking else "off"
    return [
        (name, f"{value if isinstance(value, str) else json.dumps(value)}  ({template.origin(name)})")
        for name, value in values.items()
    ]
