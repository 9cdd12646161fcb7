"""Options of a chat, and the settings of its answers, which ``/set`` changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moechat.chat.template_options import TemplateOptions
from moechat.errors import UsageError
from moechat.safe_text import one_line
from moechat.sampling_ranges import MOST_SEED, MOST_TOKENS, MOST_TOP_K, RANGES
from moechat.validation import require_number, require_whole

MODELS_OWN = "the model's own"
_RESET = ("default", "auto", "none", "")
_WHOLE = {"top_k": (0, MOST_TOP_K), "seed": (0, MOST_SEED), "max_tokens": (1, MOST_TOKENS)}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")


@dataclass(frozen=True)
class Generation:
    """Settings of answers; the model's own apply for names in neither table.

    Attributes:
        given: From the command line, environment variables or the settings file.
        origins: Their sources, in words; the command line where missing.
        changed: Changed by ``/set``; ``None`` restores the model's own.
        fixed: Further arguments of the engine's ``generate``, which ``/set`` cannot change.
        template: Values for the chat template.
    """

    given: dict[str, float] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    changed: dict[str, float | None] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    template: TemplateOptions = field(default_factory=TemplateOptions)

    def value(self, name: str) -> float | None:
        """The value of a setting; ``None`` for the model's own."""
        return self.changed[name] if name in self.changed else self.given.get(name)

    def origin(self, name: str) -> str:
        """The source of a setting's value, in words."""
        if name in self.changed:
            return MODELS_OWN if self.changed[name] is None else "set here"
        return self.origins.get(name, "from the command line") if name in self.given else MODELS_OWN

    def with_text(self, name: str, text: str) -> Generation:
        """These settings with one changed.

        Args:
            name: One of ``NAMES``, also with hyphens.
            text: A number, or ``default`` for the model's own.

        Raises:
            UsageError: The name is unknown, or the value is out of range.
        """
        name = setting_of(name)
        value = None if text.strip().lower() in _RESET else _number(name, text)
        return replace(self, changed={**self.changed, name: value})

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the engine's ``generate``."""
        return dict(self.fixed) | {
            "max_new_tokens" if name == "max_tokens" else name: self.value(name)
            for name in NAMES
            if self.value(name) is not None
        }


def setting_of(name: str, others: Sequence[str] = ()) -> str:
    """Find a name in ``NAMES``, ignoring case, also with hyphens.

    Args:
        name: The name.
        others: Further settings, to be named in the hint.

    Raises:
        UsageError: The name is unknown.
    """
    known = name.lower().replace("-", "_")
    if known not in NAMES:
        raise UsageError(
            f"there is no setting {one_line(name)[:40]}", hint=f"choose one of {', '.join((*NAMES, *others))}"
        )
    return known


def require_setting(name: str, value: object, label: Callable[[str], str] = str) -> Any:
    """A value of a setting, in range; ``None`` stays.

    Args:
        name: One of ``NAMES``.
        value: For it.
        label: The name of the setting in messages.

    Raises:
        UsageError: It is out of range, or no whole number where one is needed.
    """
    if value is None:
        return None
    if name in _WHOLE:
        return require_whole(label(name), value, *_WHOLE[name])
    allowed = RANGES[name]
    return require_number(label(name), value, allowed.least, allowed.most, above=allowed.above)


def _number(name: str, text: str) -> float:
    try:
        value = int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise UsageError(
            f"{name} is {text}; it must be {kind}", hint=f"/set {name} default resets it"
        ) from None
    number: float = require_setting(name, value)
    return number


@dataclass(frozen=True)
class ChatOptions:
    """How a chat behaves.

    Attributes:
        generation: Settings of answers at the start.
        system: The system prompt; ``None`` for none.
        raw: Answers as the model writes them, without markdown rendered.
        hide_thinking: Thinking is not shown.
        save: Save conversations and typed lines.
        resume: The conversation to continue: its number, or ``True`` for the last one.
        stats: Statistics after each answer.
        watch: A map of the experts below each answer while it is written.
        quiet: Only answers and errors.
        verbose: Report progress and details.
        loading: How the model was loaded, as far as somebody said: option, value, and who said it.
    """

    generation: Generation = field(default_factory=Generation)
    system: str | None = None
    raw: bool = False
    hide_thinking: bool = False
    save: bool = True
    resume: int | bool = False
    stats: bool = False
    watch: bool = False
    quiet: bool = False
    verbose: bool = False
    loading: tuple[tuple[str, str, str], ...] = ()
