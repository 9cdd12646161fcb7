"""Options, flags and arguments in the form that all commands use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moechat.cli.completion.completers import complete_machines, complete_system_list

Action = Callable[[], int]
Completer = Callable[[str], list[str]]


def argument(metavar: str, help_text: str, complete: Completer | None = None) -> Any:
    """A positional argument; its default is not shown in the help."""
    return typer.Argument(
        metavar=metavar, autocompletion=_answering(complete), help=help_text, show_default=False
    )


def option(metavar: str, help_text: str, complete: Completer | None = None, *names: str, **more: Any) -> Any:
    """An option with a value.

    Args:
        metavar: Name of the value.
        help_text: One sentence or two.
        complete: Completes values in the shell.
        names: ``--name`` and ``-n``; that of the parameter if there is none.
        more: More arguments of ``typer.Option``.
    """
    return typer.Option(*names, metavar=metavar, autocompletion=_answering(complete), help=help_text, **more)


def flag(help_text: str, *names: str, **more: Any) -> Any:
    """An option without a value; with all its names, so that Typer adds no ``--no-`` form."""
    return typer.Option(*names, metavar="", help=help_text, **more)


def _answering(complete: Completer | None) -> Completer | None:
    """Wrap a completion function without its type hints.

    Typer inspects the type hints of every completion function at each start. For all of them together that
    takes a tenth of the time of a short command; a lambda has no type hints.
    """
    return None if complete is None else lambda incomplete: complete(incomplete)


Json = Annotated[bool, flag("Print the result as one JSON object.", "--json")]
Quiet = Annotated[bool, flag("Only the result, and errors.", "--quiet", "-q")]
Seed = Annotated[int, option("N", "Seed of all random numbers.")]
Systems = Annotated[
    str,
    option(
        "S,S",
        "NAME or NAME:KEY=VALUE,KEY=VALUE; the others are compared with the first.",
        complete_system_list,
    ),
]
Out = Annotated[Path | None, option("FILE", "Also write the JSON object to a file.")]
Plot = Annotated[Path | None, option("FILE", "Draw time per token over memory: .png, .svg or .pdf.")]
ReplayedOn = Annotated[
    str | None,
    option(
        "NAME",
        "A reference machine (moechat profile --list) or a .toml file of the same format; this "
        "machine's measured profile if not given.",
        complete_machines,
    ),
]
