"""Checks the tables of the settings file that hold the user's own names: presets and servers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moechat.chat.chat_options import NAMES, require_setting
from moechat.cli.config.settings_file import checked_value, options_of
from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.hub.model_ref import DEMO, expand_alias
from moechat.options import LoadOptions, as_flag
from moechat.steps import MOST_DRAFT
from moechat.validation import require_whole

REMOTE_MARK = "@"
DEFAULT_MODEL = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_SECRET = re.compile(r"(?:api-?)?key|token|secret|password", re.ASCII)
_PROMPT_KEYS = ("system", "system-prompt")
# Options of `run` that a preset may hold beside those of loading.
_ANSWER_OPTIONS = (*NAMES, "draft-tokens", "stop", "template-option", "think", "remote")
REMOTE_KEYS = ("url", "model", "api-key-variable")


@dataclass(frozen=True)
class Preset:
    """A model with settings, under a name of the user's.

    Attributes:
        name: The user's name for it.
        model: Name of a model, as for ``run``.
        values: Values of options, by parameter of ``run``.
    """

    name: str
    model: str
    values: Mapping[str, Any]

    @property
    def system_prompt(self) -> str | None:
        """The system prompt; ``None`` without one."""
        return self.values.get("system_prompt")

    @property
    def load_options(self) -> dict[str, Any]:
        """Keyword arguments of ``moechat.load``."""
        known = {entry.name for entry in fields(LoadOptions)}
        return LoadOptions.parse({name: value for name, value in self.values.items() if name in known}).given


@dataclass(frozen=True)
class Remote:
    """A server that speaks OpenAI's protocol, under a name of the user's.

    Attributes:
        url: Its address.
        model: The model there that is taken if no other is named.
        key_variable: The environment variable with its key; empty: as for any server.
    """

    url: str
    model: str = DEFAULT_MODEL
    key_variable: str = ""


def parse_preset(name: str, values: Mapping[str, Any], run: Any, path: Path) -> Preset:
    """Check the table of a preset.

    Args:
        name: The user's name for it.
        values: Its values by key.
        run: The command ``run``.
        path: Of the settings file, for messages.

    Raises:
        UsageError: The name is one of a model, a key is unknown, or a value is wrong.
    """
    where = f"presets.{name} in {path}"
    require_name("preset", name)
    if name.lower() == DEMO or expand_alias(name) is not None:
        raise UsageError(
            f"{where} has the name of a model, {expand_alias(name) or DEMO}",
            hint="give the preset another name",
        )
    options = preset_options(run)
    prompts = [key for key in _PROMPT_KEYS if key in values]
    if len(prompts) > 1:
        raise UsageError(f"{where} has system and system-prompt, which are the same", hint="keep one of them")
    model = values.get("model")
    if not isinstance(model, str) or not model.strip() or model.startswith(REMOTE_MARK):
        raise UsageError(
            f"{where} names no model",
            hint=f"`moechat config set presets.{name} model=MODEL`, with a name as for `moechat run`; "
            "remote=NAME takes it from a server",
        )
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key == "model":
            continue
        if key not in options:
            raise unknown_key(f"presets.{name}.{key}", key, [*options, "model"])
        if key in _PROMPT_KEYS and isinstance(value, str) and value in SYSTEMS:
            raise UsageError(
                f"{where}: {key} is the system prompt, and {value} is a way to keep experts",
                hint=f"`moechat config set run.system {value}` sets that",
            )
        parameter = options[key]
        taken[parameter.name] = parsed(
            parameter, checked_value(key, value, parameter, path), run, f"{key} of {where}"
        )
    _check_ranges(taken, where)
    return Preset(name, model, taken)


def _check_ranges(values: Mapping[str, Any], where: str) -> None:
    known = {entry.name for entry in fields(LoadOptions)}
    try:
        LoadOptions.parse({name: value for name, value in values.items() if name in known}, as_flag)
        for name in NAMES:
            require_setting(name, values.get(name), as_flag)
        if values.get("draft_tokens") is not None:
            require_whole("--draft-tokens", values["draft_tokens"], 0, MOST_DRAFT)
    except UsageError as error:
        raise UsageError(f"{where}: {error}", hint=error.hint) from None


def parsed(parameter: Any, value: Any, command: Any, label: str) -> Any:
    """The value of an option, parsed as on the command line.

    Args:
        parameter: The option.
        value: A text or a value of the settings file.
        command: The option's command.
        label: Names the setting in messages.

    Raises:
        UsageError: The value has a wrong type.
    """
    import typer

    from moechat.cli.config.wrong_values import problem_of

    try:
        return parameter.process_value(typer.Context(command, info_name=command.name), value)
    except typer.BadParameter as error:
        raise UsageError(
            f"{label} is {value!r}{problem_of(error)}", hint=f"it sets --{parameter.opts[0].lstrip('-')}"
        ) from None


def parse_remote(name: str, values: Mapping[str, Any], path: Path) -> Remote:
    """Check the table of a server.

    Args:
        name: The user's name for it.
        values: Its values by key.
        path: Of the settings file, for messages.

    Raises:
        UsageError: A key is unknown, or a value is wrong.
    """
    where = f"remotes.{name} in {path}"
    require_name("remote", name)
    for key, value in values.items():
        refuse_secret(f"remotes.{name}.{key}", key)
        if key not in REMOTE_KEYS:
            raise unknown_key(f"remotes.{name}.{key}", key, REMOTE_KEYS)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where}: {key} is no text", hint='write it in quotes, as in url = "http://…"')
    url = values.get("url")
    if url is None:
        raise UsageError(f"{where} has no url", hint=f"`moechat config set remotes.{name}.url URL`")
    if "@" in url:
        raise UsageError(
            f"{where}: the URL holds a password or a name", hint="keys come from the environment or keyring"
        )
    variable = values.get("api-key-variable", "")
    if variable and not _VARIABLE.fullmatch(variable):
        raise UsageError(
            f"{where}: api-key-variable is no name of a variable",
            hint="it is the name of the environment variable with the key, not the key",
        )
    return Remote(url, values.get("model", DEFAULT_MODEL), variable)


def refuse_secret(key: str, name: str) -> None:
    """Refuse a setting that would hold a secret.

    Args:
        key: The whole key, for messages.
        name: The last part of it.

    Raises:
        UsageError: It would.
    """
    if is_secret_key(name):
        raise UsageError(
            f"{key} would be a secret, and secrets are not kept in the settings file",
            hint="set MOECHAT_API_KEY, or name another variable with api-key-variable, or use "
            "`keyring set moechat HOST`",
        )


def is_private(name: str) -> bool:
    """Whether a value of the user's own names, by key, does not belong in a report."""
    return name in _PROMPT_KEYS or is_secret_key(name)


def is_secret_key(name: str) -> bool:
    """Whether a key is one of a secret, which should not be in the file at all."""
    return _SECRET.fullmatch(name) is not None


def unknown_key(key: str, name: str, known: Any) -> UsageError:
    """The error about a key that does not exist, with a suggestion."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"do you mean {key.removesuffix(name)}{near[0]}?" if near else f"there are {', '.join(known)}"
    return UsageError(f"there is no setting {key}", hint=hint)


def require_name(kind: str, name: str) -> None:
    """Require that a preset's or server's name cannot be taken for a path, a repository or a URL.

    Raises:
        UsageError: It can.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:64]!r} is no name for a {kind}",
            hint="a name has letters, digits, hyphens and underscores, and begins with a letter or digit",
        )


def preset_options(run: Any) -> dict[str, Any]:
    """The options that presets may hold, by key."""
    options = options_of(run)
    names = [entry.name for entry in fields(LoadOptions)]
    allowed = {name.replace("_", "-") for name in (*names, *_ANSWER_OPTIONS)} - {"system"}
    found = {key: options[key] for key in options if key in allowed}
    return {**dict.fromkeys(_PROMPT_KEYS, options["system-prompt"]), **found}
