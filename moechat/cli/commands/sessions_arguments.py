"""The arguments of ``moechat sessions``."""

from __future__ import annotations

from typing import Annotated

import typer

from moechat.cli.completion.completers import complete_formats
from moechat.cli.parameters import Action, argument, flag, option

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

_Id = Annotated[int, argument("ID", "Number of the conversation.")]
_Json = Annotated[bool, flag("Print one JSON list.", "--json")]
_Limit = Annotated[
    int, option("N", "Most conversations to show, newest first; 0 shows all.", None, "--limit", min=0)
]


@sessions_app.callback()
def _list(context: typer.Context, json: _Json = False, limit: _Limit = 20) -> Action | None:
    if context.invoked_subcommand is not None:
        return None
    from moechat.cli.commands.sessions import list_sessions

    return lambda: list_sessions(limit, json=json)


@sessions_app.command("search", help="Find conversations with all words in one question and its answer.")
def _search(
    text: Annotated[list[str], argument("TEXT...", "Words.")], json: _Json = False, limit: _Limit = 20
) -> Action:
    from moechat.cli.commands.sessions import search_sessions

    return lambda: search_sessions(" ".join(text), limit, json=json)


@sessions_app.command("show", help="Show a conversation.")
def _show(
    key: _Id,
    everything: Annotated[bool, flag("Also show undone and regenerated answers.", "--all")] = False,
    raw: Annotated[bool, flag("Do not render markdown.", "--raw")] = False,
) -> Action:
    from moechat.cli.commands.sessions import show_session

    return lambda: show_session(key, everything=everything, raw=raw)


@sessions_app.command("export", help="Write a conversation as a file, or to stdout.")
def _export(
    key: _Id,
    form: Annotated[
        str | None,
        option(
            "md|json",
            "If not given, by the suffix of the file, else md.",
            complete_formats,
            "--format",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None, option("FILE", "A new file; stdout if not given.", None, "--output", "-o")
    ] = None,
) -> Action:
    from moechat.cli.commands.sessions import export_session

    return lambda: export_session(key, form, out)


@sessions_app.command("rm", help="Delete conversations permanently.")
def _remove(keys: Annotated[list[int], argument("ID...", "Numbers of the conversations.")]) -> Action:
    from moechat.cli.commands.sessions import remove_sessions

    return lambda: remove_sessions(keys)
