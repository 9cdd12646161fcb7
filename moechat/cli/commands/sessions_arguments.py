"""The arguments of ``moechat sessions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from moechat.cli.completion.completers import answering, complete_formats

Action = Callable[[], int]

_HELP = """\
List, search, show, export and delete saved conversations.

`moechat run MODEL -c` continues the last one, `--session ID` any of them.
"""
_EXAMPLES = """\
moechat sessions

moechat sessions search fox garden

moechat sessions export 12 -o fox.md
"""

sessions_app = typer.Typer(help=_HELP, epilog=_EXAMPLES, invoke_without_command=True, add_completion=False)

_Id = Annotated[int, typer.Argument(metavar="ID", help="Number of the conversation.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON list.")]
_Limit = Annotated[
    int,
    typer.Option(
        "--limit", metavar="N", min=0, help="Most conversations to show, newest first; 0 shows all."
    ),
]


@sessions_app.callback()
def _list(context: typer.Context, json: _Json = False, limit: _Limit = 20) -> Action | None:
    if context.invoked_subcommand is not None:
        return None
    from moechat.cli.commands.sessions import list_sessions

    return lambda: list_sessions(limit, json=json)


@sessions_app.command("search", help="Find conversations with all words in one question and its answer.")
def _search(
    text: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Words.", show_default=False)],
    json: _Json = False,
    limit: _Limit = 20,
) -> Action:
    from moechat.cli.commands.sessions import search_sessions

    return lambda: search_sessions(" ".join(text), limit, json=json)


@sessions_app.command("show", help="Show a conversation.")
def _show(
    key: _Id,
    everything: Annotated[
        bool, typer.Option("--all", metavar="", help="Also show undone and regenerated answers.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", metavar="", help="Do not render markdown.")] = False,
) -> Action:
    from moechat.cli.commands.sessions import show_session

    return lambda: show_session(key, everything=everything, raw=raw)


@sessions_app.command("export", help="Write a conversation as a file, or to stdout.")
def _export(
    key: _Id,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="md|json",
            autocompletion=answering(complete_formats),
            help="If not given, by the suffix of the file, else md.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="A new file; stdout if not given."),
    ] = None,
) -> Action:
    from moechat.cli.commands.sessions import export_session

    return lambda: export_session(key, form, out)


@sessions_app.command("rm", help="Delete conversations permanently.")
def _remove(
    keys: Annotated[
        list[int], typer.Argument(metavar="ID...", help="Numbers of the conversations.", show_default=False)
    ],
) -> Action:
    from moechat.cli.commands.sessions import remove_sessions

    return lambda: remove_sessions(keys)
