"""Where the value of an option came from that nobody typed, and what is said when it is wrong."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from moechat.cli.lazy_group import LazyGroup
from moechat.cli.settings_file import (
    FILE,
    OWN_VARIABLES,
    PREFIX,
    Settings,
    options_of,
    values_of,
    variable_of,
)
from moechat.errors import MoechatError, UsageError

_NAMED = re.compile(r"--([a-z][a-z-]*)")
# How errors speak of what some options set, where they do not name the option.
_WORDS = {
    "ctx": re.compile("the context (is|of|needs)"),
    "ram": re.compile("memory budget|RAM"),
    "vram": re.compile("graphics memory|CUDA|card"),
    "device": re.compile("CUDA|card"),
    "system": re.compile("the system "),
    "system-prompt": re.compile("the system prompt"),
}
# Parameters of which only one can be meant; a device of "cpu" beside vram is one more.
_EXCLUDING = (
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
    """A command whose usage errors say where values came from that nobody typed."""

    def invoke(self, ctx: Any) -> Any:
        """Understand the arguments; what is returned does what was asked for."""
        _give_way(ctx)
        with _explained(ctx):
            action = super().invoke(ctx)
        if not callable(action):
            return action

        def explaining() -> Any:
            with _explained(ctx):
                return action()

        return explaining


def _give_way(context: Any) -> None:
    """Drop what a variable or the file says where it excludes what was typed: the command line wins."""
    params = context.params
    pairs = [pair for pair in _EXCLUDING if all(params.get(name) for name in pair)]
    if params.get("device") == "cpu" and params.get("vram"):
        pairs.append(("device", "vram"))
    for pair in pairs:
        for typed, other in (pair, pair[::-1]):
            source = context.get_parameter_source(other)
            if context.get_parameter_source(typed).name == "COMMANDLINE" != source.name:
                params[other] = False if params[other] is True else None
                context.set_parameter_source(other, type(source)["DEFAULT"])


def origins_of(context: Any) -> dict[str, str]:
    """Where the values come from that a variable or the file gave, in words, by parameter."""
    found = {}
    for option, parameter in options_of(context.command).items():
        source = _source(context, parameter)
        if source == "ENVIRONMENT":
            found[parameter.name] = f"from {variable_of(option)}"
        elif source == "DEFAULT_MAP":
            found[parameter.name] = f"from {FILE}"
    return found


def wrong_value(error: Any, settings: Settings) -> Exception:
    """What to raise for a value that the parser of the command line refused.

    Args:
        error: The parser's.
        settings: Of the user.

    Returns:
        A usage error that names the variable or the line of the file, or the parser's own.
    """
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return error  # type: ignore[no-any-return]
    for option, candidate in options_of(context.command).items():
        if candidate is parameter:
            source = _source(context, parameter)
            if source == "ENVIRONMENT":
                return _wrong_variable(option, error)
            if source == "DEFAULT_MAP":
                return _wrong_line(context.command.name, option, settings, error)
    return error  # type: ignore[no-any-return]


def check_settings(
    group: LazyGroup, settings: Settings, environment: Mapping[str, str]
) -> Iterator[UsageError]:
    """What variables and file say that no command can take.

    Args:
        group: The command line's grammar, with the names of variables.
        settings: Of the user.
        environment: Variables of the process.

    Yields:
        Errors that would be raised, each once.
    """
    said = set()
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
            if problem is not None and str(problem) not in said:
                said.add(str(problem))
                yield problem
        if name == "run":
            yield from _check_run(taken)
    known = {variable_of(option) for of in group.built().values() for option in options_of(of)}
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in known | OWN_VARIABLES:
            near = difflib.get_close_matches(variable, sorted(known | OWN_VARIABLES), n=1, cutoff=0.8)
            yield UsageError(
                f"{variable} is set, which means nothing to moechat",
                hint=f"do you mean {near[0]}?"
                if near
                else "unset it; moechat COMMAND --help has the options",
            )


def _check_run(taken: dict[str, Any]) -> Iterator[UsageError]:
    from moechat.cli.options import RunOptions

    known = {name: value for name, value in taken.items() if name in RunOptions.__dataclass_fields__}
    try:
        RunOptions(model="", **known)
    except UsageError as error:
        yield UsageError(
            f"as variables and {FILE} have it, {error}", hint=error.hint or "correct one of them"
        )


def _source(context: Any, parameter: Any) -> str:
    source = context.get_parameter_source(parameter.name)
    return "" if source is None else str(source.name)


def _wrong_variable(option: str, error: Any) -> UsageError:
    variable = variable_of(option)
    return UsageError(
        f"{variable} is {os.environ.get(variable, '')!r}: {error.message}",
        hint=f"it stands for --{option}: correct or unset it",
    )


def _wrong_line(command: str, option: str, settings: Settings, error: Any) -> UsageError:
    value = values_of(command, settings).get(option)
    return UsageError(
        f"the settings file {settings.path} says {option} = {value!r}: {error.message}",
        hint=f"it stands for --{option}: correct or remove that line",
    )


@contextmanager
def _explained(context: Any) -> Iterator[None]:
    """Add to an error which of the options that it is about nobody has typed."""
    try:
        yield
    except MoechatError as error:
        text = str(error)
        named = set(_NAMED.findall(text))
        named |= {option for option, words in _WORDS.items() if words.search(text)}
        untyped = origins_of(context)
        told = [
            f"--{option} is {untyped[parameter.name]}"
            for option, parameter in options_of(context.command).items()
            if parameter.name in untyped
            and (option in named or repr(context.params.get(parameter.name)) in text)
        ]
        if told:
            error.args = (f"{text} ({', '.join(told)})", *error.args[1:])
        raise
