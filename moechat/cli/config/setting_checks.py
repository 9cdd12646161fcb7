"""Checks all values of variables and the settings file, for ``moechat doctor`` and ``moechat config set``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import typer

from moechat.cli.config.own_names import OwnNames
from moechat.cli.config.own_tables import parse_preset, parse_remote
from moechat.cli.config.settings_file import (
    FILE,
    OWN_VARIABLES,
    PREFIX,
    Settings,
    default_map,
    for_parser,
    options_of,
    values_of,
    variable_of,
)
from moechat.cli.config.wrong_values import wrong_line, wrong_variable
from moechat.cli.lazy_group import LazyGroup
from moechat.errors import UsageError
from moechat.options import LoadOptions, as_flag


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
                taken[parameter.name] = parameter.process_value(
                    context, text or for_parser(values[option], parameter)
                )
            except typer.BadParameter as error:
                problem = wrong_variable(option, error) if text else wrong_line(name, option, settings, error)
            if problem is not None and str(problem) not in reported:
                reported.add(str(problem))
                yield problem
        for problem in _range_problems(name, taken):
            if str(problem) not in reported:
                reported.add(str(problem))
                yield problem
        if name == "run":
            yield from check_own_names(command, settings)
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


def check_own_names(run: Any, settings: Settings) -> Iterator[UsageError]:
    """Check all presets and servers of the settings file.

    Args:
        run: The command ``run``, whose options presets hold.
        settings: The user's settings.

    Yields:
        The errors that their use would raise.
    """
    for name, values in settings.presets.items():
        try:
            preset = parse_preset(name, values, run, settings.path)
            remote = preset.values.get("remote")
            if remote is not None:
                OwnNames(settings, run).remote(remote)
        except UsageError as error:
            yield error
    for name, values in settings.remotes.items():
        try:
            parse_remote(name, values, settings.path)
        except UsageError as error:
            yield error


def new_problems(group: LazyGroup, before: Settings, after: Settings) -> list[UsageError]:
    """The errors that a change of the settings file brings.

    Args:
        group: All commands.
        before: The settings that were there.
        after: The changed ones.
    """
    known = {str(problem) for problem in _file_problems(group, before)}
    return [problem for problem in _file_problems(group, after) if str(problem) not in known]


def _file_problems(group: LazyGroup, settings: Settings) -> Iterator[UsageError]:
    try:
        default_map(group, settings)
    except UsageError as error:
        yield error
    yield from check_settings(group, settings, {})


def _range_problems(command: str, taken: dict[str, Any]) -> Iterator[UsageError]:
    """Errors about values that are out of range, or exclude each other."""
    from moechat.cli.commands.run_arguments import RunOptions
    from moechat.cli.commands.serve_arguments import ServeCommand

    arguments: Any = {"run": RunOptions, "serve": ServeCommand}.get(command)
    try:
        if arguments is not None:
            known = arguments.__dataclass_fields__
            arguments(model="", **{name: value for name, value in taken.items() if name in known})
            return
        names = {entry.name for entry in fields(LoadOptions)}
        LoadOptions.parse({name: value for name, value in taken.items() if name in names}, as_flag)
    except UsageError as error:
        yield UsageError(f"with the variables and {FILE}, {error}", hint=error.hint or "correct one of them")
