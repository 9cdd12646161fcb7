"""The arguments of ``moechat config``."""

from __future__ import annotations

from typing import Annotated

import typer

from moechat.cli.completion.completers import complete_settings
from moechat.cli.lazy_group import LazyGroup
from moechat.cli.parameters import Action, argument, flag

_HELP = """\
Show and change settings: those of options, presets of models, and servers.

KEY is an option for all commands (ctx), for one (run.ctx), or a key of an own name (presets.NAME.model, \
remotes.NAME.url). The file's comments and other lines stay. `moechat help configuration` describes all of it.
"""
_EXAMPLES = """\
moechat config set run.temperature 0.7

moechat config set presets.coder model=qwen3 temperature=0.2 system="You write short, correct code."

moechat config set remotes.big url=http://gpu-box:8000

moechat config --changed
"""

config_app = typer.Typer(help=_HELP, epilog=_EXAMPLES, invoke_without_command=True, add_completion=False)

_Json = Annotated[bool, flag("Print one JSON list.", "--json")]
_Changed = Annotated[bool, flag("Only what is set somewhere.", "--changed")]
_Key = Annotated[str, argument("KEY", "Such as ctx, run.ctx or presets.NAME.", complete_settings)]


@config_app.callback()
def _config(context: typer.Context, json: _Json = False, changed: _Changed = False) -> Action | None:
    return None if context.invoked_subcommand is not None else _list_action(context, json, changed)


@config_app.command("list", help="Show every setting with its value and where that comes from.")
def _list(context: typer.Context, json: _Json = False, changed: _Changed = False) -> Action:
    return _list_action(context, json, changed)


def _list_action(context: typer.Context, json: bool, changed: bool) -> Action:
    from moechat.cli.commands.config import list_settings

    return lambda: list_settings(_grammar(context), json=json, changed=changed)


@config_app.command("get", help="Print the value in effect; exit status 1 if there is none.")
def _get(
    context: typer.Context, key: _Key, json: Annotated[bool, flag("Print JSON.", "--json")] = False
) -> Action:
    from moechat.cli.commands.config import get_setting

    return lambda: get_setting(_grammar(context), key, json=json)


@config_app.command(
    "set",
    help="Set a value, or several of one table: KEY NAME=VALUE...",
    context_settings={"ignore_unknown_options": True},  # a value may begin with a hyphen
)
def _set(
    context: typer.Context,
    key: _Key,
    values: Annotated[list[str], argument("VALUE...", "As for the option that KEY stands for.")],
) -> Action:
    from moechat.cli.commands.config import set_setting

    return lambda: set_setting(_grammar(context), key, values)


@config_app.command("unset", help="Remove a setting from the file, or a preset, a server, a command's table.")
def _unset(context: typer.Context, key: _Key) -> Action:
    from moechat.cli.commands.config import unset_setting

    return lambda: unset_setting(_grammar(context), key)


@config_app.command("edit", help="Open the file in your editor ($VISUAL or $EDITOR), then check it.")
def _edit(context: typer.Context) -> Action:
    from moechat.cli.commands.config import edit_settings

    return lambda: edit_settings(_grammar(context))


@config_app.command("path", help="Print the path of the settings file.")
def _path() -> Action:
    from moechat.cli.commands.config import print_path

    return print_path


def _grammar(context: typer.Context) -> LazyGroup:
    group = context.find_root().command
    assert isinstance(group, LazyGroup)
    return group
