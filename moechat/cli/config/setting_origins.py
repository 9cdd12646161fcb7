"""Tracks the source of each option value, and names it in errors: variables and the settings file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import typer
from typer.core import TyperCommand

from moechat.cli.config.own_names import OwnNames
from moechat.cli.config.settings_file import (
    FILE,
    Settings,
    for_parser,
    options_of,
    variable_of,
)
from moechat.cli.config.wrong_values import wrong_line, wrong_type, wrong_variable
from moechat.cli.lazy_group import LazyGroup
from moechat.errors import MoechatError, UsageError
from moechat.options import LoadOptions, as_flag
from moechat.validation import shown

_NAMED = re.compile(r"--([a-z][a-z-]*)")
# Recognises options in error messages that do not name them.
_MESSAGE_PATTERNS = {
    "ctx": re.compile("the context (is|of|needs)"),
    "ram": re.compile("memory budget|RAM"),
    "vram": re.compile("graphics memory|CUDA|GPU"),
    "device": re.compile("CUDA|GPU"),
    "system": re.compile("the system "),
    "system-prompt": re.compile("the system prompt"),
}
# Mutually exclusive parameters, besides device="cpu" with vram.
_EXCLUSIVE = (
    ("completion", "resume"),
    ("completion", "session"),
    ("completion", "system_prompt"),
    ("jsonl", "resume"),
    ("jsonl", "session"),
    ("jsonl", "json"),
    ("jsonl", "prompt"),
    ("quiet", "verbose"),
)
# Commands whose MODEL may be a preset.
_TAKES_OWN_NAMES = frozenset(("run", "serve", "plan", "count", "bench", "compare", "trace"))
_OWN, _ORIGINS, _PRESET = "moechat.own names", "moechat.origins of a preset", "moechat.preset"


class ExplainingCommand(TyperCommand):
    """A command whose errors name the source of values from variables and the settings file."""

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments; returns an action to call."""
        _require_shared_settings(ctx)
        with _named_sources(ctx):
            _apply_own_names(ctx)
        _drop_overridden(ctx)
        with _named_sources(ctx):
            action = super().invoke(ctx)
        if not callable(action):
            return action

        def with_named_sources() -> Any:
            with _named_sources(ctx):
                return action()

        return with_named_sources


def _require_shared_settings(context: Any) -> None:
    """Check what other commands' tables of the settings file set of the options that this command has too.

    So a plan does not succeed with a file that `run` refuses.

    Raises:
        UsageError: A value has a wrong type, or is out of range.
    """
    root, settings = context.find_root().command, context.obj
    if not isinstance(settings, Settings) or not isinstance(root, LazyGroup):
        return
    shared = options_of(context.command).keys()
    load_names = {as_flag(entry.name)[2:]: entry.name for entry in fields(LoadOptions)}
    for name, values in settings.of.items():
        if name == context.command.name:
            continue  # those are parsed anyway, and the command line may override them
        command = root.built()[name]
        parameters = options_of(command)
        for option in values.keys() & shared & parameters.keys():
            try:
                value = parameters[option].process_value(
                    typer.Context(command, info_name=name), for_parser(values[option], parameters[option])
                )
                if option in load_names:
                    LoadOptions.parse({load_names[option]: value}, as_flag)
            except typer.BadParameter as error:
                raise wrong_line(name, option, settings, error) from None
            except UsageError as error:
                raise UsageError(
                    f"{error} (--{option} is from [{name}] in {settings.path})", hint=error.hint
                ) from None


def _apply_own_names(context: Any) -> None:
    """Replace the name of a preset or server by what it stands for.

    Raises:
        UsageError: It is malformed.
    """
    root, settings, params = context.find_root().command, context.obj, context.params
    if (
        context.command.name not in _TAKES_OWN_NAMES
        or not isinstance(settings, Settings)
        or not isinstance(root, LazyGroup)
    ):
        return
    options = options_of(context.command)
    sources = {parameter.name: _source(context, parameter) for parameter in options.values()}
    own = OwnNames(
        settings,
        root.built_one("run") if settings.presets else None,
        dict(params),
        origins_of(context),
        frozenset(name for name, source in sources.items() if source in ("COMMANDLINE", "ENVIRONMENT")),
    )
    context.meta[_OWN] = own
    name = params.get("model")
    if not isinstance(name, str) or not name:
        return
    changed, origins = own.applied(name, params, set(sources))
    params.update(changed)
    for parameter in origins:
        source = type(context.get_parameter_source(parameter))
        context.set_parameter_source(parameter, source["DEFAULT_MAP"])
    context.meta[_ORIGINS] = origins
    context.meta[_PRESET] = name if name in settings.presets else ""


def own_names_of(context: Any) -> dict[str, Any]:
    """The user's own names, and the preset that was applied, as fields of a command's arguments."""
    return {"own": context.meta.get(_OWN, OwnNames()), "preset": context.meta.get(_PRESET, "")}


def _drop_overridden(context: Any) -> None:
    """Drop values of variables and the settings file that conflict with command-line options, which win."""
    params = context.params
    pairs = [pair for pair in _EXCLUSIVE if all(params.get(name) for name in pair)]
    if params.get("device") == "cpu" and params.get("vram"):
        pairs.append(("device", "vram"))
    for pair in pairs:
        for typed, other in (pair, pair[::-1]):
            source = context.get_parameter_source(other)
            if context.get_parameter_source(typed).name == "COMMANDLINE" != source.name:
                params[other] = False if params[other] is True else None
                context.set_parameter_source(other, type(source)["DEFAULT"])


def origins_of(context: Any) -> dict[str, str]:
    """Sources, in words, of the values from variables and the settings file, by parameter."""
    found = {}
    for option, parameter in options_of(context.command).items():
        source = _source(context, parameter)
        if source == "ENVIRONMENT":
            found[parameter.name] = f"from {variable_of(option)}"
        elif source == "DEFAULT_MAP":
            found[parameter.name] = f"from {FILE}"
    found.update(context.meta.get(_ORIGINS, {}))
    return found


def wrong_value(error: Any, settings: Settings | None) -> Exception:
    """Translate a parser error about a value.

    Args:
        error: The parser's error.
        settings: The user's settings, if they could be read.

    Returns:
        A usage error that names the option, the variable or the setting; the unchanged error where it is
        about something else than a value, such as a missing argument.
    """
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return error  # type: ignore[no-any-return]
    for option, candidate in options_of(context.command).items():
        if candidate is parameter:
            source = _source(context, parameter)
            if source == "ENVIRONMENT":
                return wrong_variable(option, error)
            if source == "DEFAULT_MAP" and settings is not None:
                return wrong_line(context.command.name, option, settings, error)
    wrong = wrong_type(error)
    if wrong is None:
        return error  # type: ignore[no-any-return]
    value, wanted = wrong
    name = next(
        (name for name in parameter.opts if name.startswith("--")), parameter.metavar or parameter.name
    )
    return UsageError(
        f"{name} is {shown(value)}; it must be {wanted}",
        hint=f"{context.command_path} --help describes it",
    )


def _source(context: Any, parameter: Any) -> str:
    source = context.get_parameter_source(parameter.name)
    return "" if source is None else str(source.name)


@contextmanager
def _named_sources(context: Any) -> Iterator[None]:
    """Add to an error the sources of the options it is about, except those on the command line."""
    try:
        yield
    except MoechatError as error:
        text = str(error)
        named = set(_NAMED.findall(text))
        named |= {option for option, pattern in _MESSAGE_PATTERNS.items() if pattern.search(text)}
        origins = origins_of(context)
        sources = [
            f"--{option} is {origins[parameter.name]}"
            for option, parameter in options_of(context.command).items()
            if parameter.name in origins
            and (option in named or repr(context.params.get(parameter.name)) in text)
        ]
        if sources:
            error.args = (f"{text} ({', '.join(sources)})", *error.args[1:])
        raise
