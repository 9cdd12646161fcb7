"""Values that the user gives for a chat template, such as ``enable_thinking`` or ``reasoning_effort``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moechat.errors import UsageError
from moechat.safe_text import one_line

# The setting that stands for the first of these variables that the template reads.
THINK = "think"
THINK_VARIABLES = ("enable_thinking", "thinking")
# Variables that other templates read in place of a switch.
_EFFORT = "reasoning_effort"
_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


@dataclass(frozen=True)
class TemplateOptions:
    """Values for the chat template.

    Attributes:
        given: From the command line, variables, the settings file or a preset, by name.
        think: Whether the model should think; ``None`` leaves it to the template.
        changed: Changed by ``/set``; ``None`` takes the template's own again. Also :data:`THINK`.
        origins: Sources of ``template_option`` and ``think``, in words; the command line where missing.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    think: bool | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def wants_thinking(self) -> bool | None:
        """Whether the model should think; ``None`` where nothing is said."""
        chosen: bool | None = self.changed.get(THINK, self.think)
        return chosen

    @property
    def named(self) -> dict[str, Any]:
        """The values by variable, without the switch for thinking."""
        values = {**self.given, **self.changed}
        return {name: value for name, value in values.items() if name != THINK and value is not None}

    def origin(self, name: str) -> str:
        """The source of a value, in words."""
        if name in self.changed:
            return "set here"
        source = THINK if name == THINK else "template_option"
        return self.origins.get(source, "from the command line")

    def changing(self, name: str, value: Any) -> TemplateOptions:
        """These values with one changed; ``None`` takes the template's own again."""
        return replace(self, changed={**self.changed, name: value})

    def values(self, variables: frozenset[str] | None) -> dict[str, Any]:
        """The values for a template.

        Args:
            variables: Those that the template reads; ``None``: not known, as on another server.
        """
        values = self.named
        wanted = self.wants_thinking
        if wanted is not None:
            known = THINK_VARIABLES[:1] if variables is None else THINK_VARIABLES
            name = next((one for one in known if variables is None or one in variables), None)
            if name is not None:
                values.setdefault(name, wanted)
        return values

    def unread(self, name: str, variables: frozenset[str] | None) -> list[str]:
        """Sentences about values that the template does not read.

        Args:
            name: Of the model.
            variables: Those that its template reads; ``None``: not known.
        """
        if variables is None:
            return []
        others = f"; it reads {', '.join(sorted(variables))}" if variables else ""
        found = [
            f"the chat template of {name} does not read {one_line(option)}: that changes nothing{others}"
            for option in self.named
            if option not in variables
        ]
        if self.wants_thinking is not None and not any(one in variables for one in THINK_VARIABLES):
            more = f"; set {_EFFORT} to low, medium or high instead" if _EFFORT in variables else ""
            found.append(
                f"the chat template of {name} has no switch for thinking: that changes nothing{more}"
            )
        return found


def parse_options(texts: Sequence[str], label: str = "--template-option") -> dict[str, Any]:
    """Values by name.

    Args:
        texts: Of the form ``NAME=VALUE``; a value is JSON, else it is a text.
        label: Names the option in messages.

    Raises:
        UsageError: One has another form.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(
                f"{label} {one_line(text)[:40]} has no value",
                hint=f"for example: {label} enable_thinking=false",
            )
        found[require_name(name.strip(), label)] = parse_value(value)
    return found


def require_name(name: str, label: str) -> str:
    """A name that a variable of a template can have.

    Raises:
        UsageError: It cannot, or the program itself sets that variable.
    """
    # Imported here: every command reads options, and the formats of replies take longer than the parser.
    from moechat.reply_formats.template_inputs import TEMPLATE_INPUTS

    if not name.isidentifier() or not name.isascii() or name in TEMPLATE_INPUTS:
        raise UsageError(
            f"{label}: {one_line(name)[:40]!r} is no variable that can be set",
            hint="a name is one of the template's variables, such as enable_thinking or reasoning_effort",
        )
    return name


def parse_value(text: str) -> Any:
    """A value: JSON, or Python's spelling of true and false, or a text as it is."""
    text = text.strip()
    if text in ("True", "False"):
        return text == "True"
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def parse_switch(text: str) -> bool:
    """A text for on or off.

    Raises:
        UsageError: It is neither.
    """
    word = text.strip().lower()
    if word not in (*_ON, *_OFF):
        raise UsageError(f"{THINK} is {one_line(text)[:40]}; it must be on or off")
    return word in _ON
