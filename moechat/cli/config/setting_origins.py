"""Tracks the source of each option value, and names it in errors: variables and the settings file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import typer
from typer.core import TyperCommand

from moechat.cli.config.settings_file import (
    FILE,
    OWN_VARIABLES,
    PREFIX,
    Settings,
    options_of,
    values_of,
    variable_of,
)
from moechat.cli.lazy_group import LazyGroup
from moechat.errors import MoechatError, UsageError
from moechat.options import LoadOptions, as_flag
from moechat.validation import shown

# The parser's kinds of errors begin with the type that a value should have had.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
}
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


class ExplainingCommand(TyperCommand):
    """A command whose errors name the source of values from variables and the settings file."""

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments; returns an action to call."""
        _require_shared_settings(ctx)
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
                    typer.Context(command, info_name=name), values[option]
                )
                if option in load_names:
                    LoadOptions.parse({load_names[option]: value}, as_flag)
            except typer.BadParameter as error:
                raise _wrong_line(name, option, settings, error) from None
            except UsageError as error:
                raise UsageError(
                    f"{error} (--{option} is from [{name}] in {settings.path})", hint=error.hint
                ) from None


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
                return _wrong_variable(option, error)
            if source == "DEFAULT_MAP" and settings is not None:
                return _wrong_line(context.command.name, option, settings, error)
    wrong = _wrong(error)
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


def _wrong(error: Any) -> tuple[object, str] | None:
    """The value that a parser error is about and what it should have been, if the value has a wrong type."""
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return None
    first = details()[0]
    wanted = _WANTED.get(first["type"].partition("_")[0])
    return None if wanted is None else (first["input"], wanted)


def _problem(error: Any) -> str:
    """The end of a sentence "NAME is VALUE"."""
    wrong = _wrong(error)
    return f": {error.message}" if wrong is None else f"; it must be {wrong[1]}"


def check_settings(
    group: LazyGroup, settings: Settings, environment: Mapping[str, str]
) -> Iterator[UsageError]:
    """Check all values of variables and the settings file.

    Args:
        group: All commands, with their variables.
        settings: The user's settings.
        environment: Variables of the process.

    Yields:
        The errors that commands would raise, each once.
    """
    reported = set()
    for name, command in group.built().items():
        context = typer.Context(command, info_name=name)
        values = values_of(name, settings)
        taken = {}
        for option, parameter in options_of(command).items():
            text = environment.get(variable_of(option))
            if not text and option not in values:
                continue
            problem: UsageError | None = None
            try:
                taken[parameter.name] = parameter.process_value(context, text or values[option])
            except typer.BadParameter as error:
                problem = (
                    _wrong_variable(option, error) if text else _wrong_line(name, option, settings, error)
                )
            if problem is not None and str(problem) not in reported:
                reported.add(str(problem))
                yield problem
        if name == "run":
            yield from _check_run(taken)
    known = {variable_of(option) for of in group.built().values() for option in options_of(of)}
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in known | OWN_VARIABLES:
            near = difflib.get_close_matches(variable, sorted(known | OWN_VARIABLES), n=1, cutoff=0.8)
            yield UsageError(
                f"{variable} is set, but no option of moechat has this name",
                hint=f"do you mean {near[0]}?"
                if near
                else "unset it; moechat COMMAND --help has the options",
            )


def _check_run(taken: dict[str, Any]) -> Iterator[UsageError]:
    from moechat.cli.commands.run_arguments import RunOptions

    known = {name: value for name, value in taken.items() if name in RunOptions.__dataclass_fields__}
    try:
        RunOptions(model="", **known)
    except UsageError as error:
        yield UsageError(f"with the variables and {FILE}, {error}", hint=error.hint or "correct one of them")


def _source(context: Any, parameter: Any) -> str:
    source = context.get_parameter_source(parameter.name)
    return "" if source is None else str(source.name)


def _wrong_variable(option: str, error: Any) -> UsageError:
    variable = variable_of(option)
    return UsageError(
        f"{variable} is {os.environ.get(variable, '')!r}{_problem(error)}",
        hint=f"it sets --{option}: correct or unset it",
    )


def _wrong_line(command: str, option: str, settings: Settings, error: Any) -> UsageError:
    value = values_of(command, settings).get(option)
    return UsageError(
        f"the settings file {settings.path} says {option} = {value!r}{_problem(error)}",
        hint=f"it sets --{option}: correct or remove that line",
    )


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
