"""Commands whose arguments are the fields of a frozen dataclass.

The fields with ``Annotated`` types become the parameters of the command line; the dataclass then checks them
together. So every option is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

import typer

from moechat.cli.config.setting_origins import origins_of, own_names_of
from moechat.cli.parameters import Action


class Arguments(Protocol):
    """A dataclass of arguments.

    A field ``origins`` receives the sources of values that were not typed; ``own`` and ``preset`` receive the
    user's own names, and the preset that was applied.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    HELP: ClassVar[str]
    EXAMPLES: ClassVar[str]


_Arguments = TypeVar("_Arguments", bound=Arguments)


def register(
    app: typer.Typer, name: str, arguments: type[_Arguments], run: Callable[[_Arguments], int]
) -> None:
    """Add a command to the grammar.

    Args:
        app: Collects the commands.
        name: Of the command.
        arguments: Its dataclass, with ``HELP`` and ``EXAMPLES``.
        run: Executes the command; returns the exit status.
    """
    app.command(name, help=arguments.HELP, epilog=arguments.EXAMPLES)(_Callback(arguments, run))


class _Callback:
    """Makes the dataclass from parsed values, and returns the action to run.

    Typer reads ``__signature__`` when it builds the command, which is only for the command that is used.
    """

    def __init__(self, arguments: type[Any], run: Callable[[Any], int]) -> None:
        self._arguments = arguments
        self._run = run
        vars(self)["__annotations__"] = {}  # Typer reads it beside the signature

    @property
    def __signature__(self) -> Signature:
        hints = get_type_hints(self._arguments, include_extras=True)
        parameters = [
            Parameter(
                entry.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if entry.default is MISSING else entry.default,
                annotation=hints[entry.name],
            )
            for entry in fields(self._arguments)
            if hasattr(hints[entry.name], "__metadata__")
        ]
        context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        return Signature([context, *parameters])

    def __call__(self, context: typer.Context, **values: Any) -> Action:
        if "origins" in self._arguments.__dataclass_fields__:
            values["origins"] = origins_of(context)
        if "own" in self._arguments.__dataclass_fields__:
            values |= own_names_of(context)
        arguments = self._arguments(**values)
        return lambda: self._run(arguments)
