"""The command line's grammar. Parsing and doing are apart: :func:`parse` returns what is to be done."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from moechat.cli.arguments import register
from moechat.cli.commands.bench_arguments import BenchCommand
from moechat.cli.commands.compare_arguments import CompareCommand
from moechat.cli.commands.config_arguments import config_app
from moechat.cli.commands.count_arguments import CountCommand
from moechat.cli.commands.help import register_help
from moechat.cli.commands.library_arguments import register_library
from moechat.cli.commands.plan_arguments import PlanCommand, ProfileCommand
from moechat.cli.commands.replay_arguments import SimulateCommand, TraceCommand
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.commands.serve_arguments import ServeCommand
from moechat.cli.commands.servers import register_servers
from moechat.cli.commands.sessions_arguments import sessions_app
from moechat.cli.commands.tune_arguments import TuneCommand
from moechat.cli.completion.shell import VARIABLE as COMPLETE_VARIABLE
from moechat.cli.completion.shell import answer_shell, install_completion, show_completion
from moechat.cli.config.setting_origins import ExplainingCommand, wrong_value
from moechat.cli.config.settings_file import Settings, apply_settings, read_settings
from moechat.cli.lazy_group import LazyGroup
from moechat.cli.parameters import Action, flag, option
from moechat.cli.unknown_option import unknown_option
from moechat.errors import MoechatError

_EPILOG = """\
moechat run demo

moechat plan mixtral --vram 12G --gpu rtx3060-12g

moechat download olmoe

Exit status: 0 ok, 2 usage, 3 model not found or not allowed, 4 does not fit, 5 offline, \
6 store damaged, 7 GPU lost, 8 in use by another program, 9 a file system failed, \
129 terminal closed (SIGHUP), 130 interrupted, 143 terminated; 1 anything else.
"""
_DOCTOR_HELP = """\
Look for what is wrong or could be better here: one report to paste.

The home directory is written as ~, and what may be a secret is hidden. Nothing is measured or changed.

--json: sections (names and values by title) and findings (level, fact, hint).
"""
_DOCTOR_EXAMPLES = """\
moechat doctor

moechat doctor --json | jq ".findings[]"
"""
_HELP_NAMES = ["-h", "--help"]
# Either may be followed by the name of a shell.
_FOR_SHELLS = {"--install-completion": install_completion, "--show-completion": show_completion}

_root_app = typer.Typer(
    cls=LazyGroup,
    name="moechat",
    help="Chat with Mixture-of-Experts models that are far larger than the GPU's memory.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": _HELP_NAMES},
)
_commands = typer.Typer()


def parse(arguments: list[str]) -> Action:
    """Understand the arguments.

    Returns:
        What is to be done; call it to get the exit status. For ``--help`` and ``--version`` it is done
        already.

    Raises:
        Exception: A usage error, with ``exit_code`` and ``format_message()``.
    """
    command = grammar()
    if COMPLETE_VARIABLE in os.environ:
        answer_shell(command, arguments)
    option, equals, shell = (arguments[0] if arguments else "").partition("=")
    if option in _FOR_SHELLS and len(arguments) + bool(equals) <= 2:
        chosen = shell if equals else next(iter(arguments[1:]), None)
        return lambda: _FOR_SHELLS[option](chosen)
    from moechat.config import user_paths

    settings: Settings | None = None
    try:
        settings = read_settings(user_paths())
        defaults = apply_settings(command, settings)
    except MoechatError:
        # These are what helps to mend it.
        if not ({"-h", "--help", "--version"} & set(arguments) or arguments[:1] in (["doctor"], ["config"])):
            raise
        defaults = {}
    # Not command.main(): it would turn interrupts and broken pipes into exit statuses of its own.
    try:
        with command.make_context("moechat", arguments, default_map=defaults, obj=settings) as context:
            action: Action = command.invoke(context)
            return action
    except typer.BadParameter as error:
        raise wrong_value(error, settings) from None
    except typer.Exit as done:
        status = done.exit_code
        return lambda: status
    except Exception as error:
        suggesting = unknown_option(error)
        if suggesting is None:
            raise
        raise suggesting from None


def grammar() -> LazyGroup:
    """The commands and their options."""
    group = typer.main.get_command(_root_app)
    assert isinstance(group, LazyGroup)
    group.add_commands_of(_commands)
    _mend_help(group)
    group.prepare(_mend_help)
    return group


def _mend_help(command: Any) -> None:
    """Keep the help from showing a type for ``--help``, which takes no value.

    Without a default that is a bool, the parser imports pydantic to make one of it: a fifth of the time that
    `list` takes, and half of a completion's.
    """
    option = command.get_help_option(typer.Context(command, help_option_names=_HELP_NAMES))
    if option is not None:
        option.metavar = ""
        option.default = False
    if not isinstance(command, LazyGroup):  # whose commands are mended when they are built
        for inner in getattr(command, "commands", {}).values():
            _mend_help(inner)


def _show_version(wanted: bool) -> None:
    if wanted:
        from moechat import __version__
        from moechat.cli.terminal.consoles import write_output

        write_output(sys.stdout, f"moechat {__version__}\n")
        raise typer.Exit


@_root_app.callback()
def _root(
    version: Annotated[
        bool, flag("Show the version and exit.", "--version", callback=_show_version, is_eager=True)
    ] = False,
    # Both are dealt with before: see _FOR_SHELLS. They stand here for the help. No parameter here may have
    # the name of a command: settings are given by command.
    completion_installed: Annotated[
        bool,
        option(
            "[SHELL]",
            "Let the shell complete commands, models and options: bash, zsh, fish or powershell; the "
            "current one if not given.",
            None,
            "--install-completion",
        ),
    ] = False,
    completion_shown: Annotated[
        bool, option("[SHELL]", "Show what that would install.", None, "--show-completion")
    ] = False,
) -> None:
    pass


# The modules of the commands are imported when a command runs: help and completion do without.
def _run(command: RunOptions) -> int:
    from moechat.cli.commands.run import run

    return run(command)


def _serve(command: ServeCommand) -> int:
    from moechat.cli.commands.serve import serve

    return serve(command)


def _bench(command: BenchCommand) -> int:
    from moechat.cli.commands.bench import bench

    return bench(command)


def _compare(command: CompareCommand) -> int:
    from moechat.cli.commands.compare import compare

    return compare(command)


def _count(command: CountCommand) -> int:
    from moechat.cli.commands.count import count

    return count(command)


def _plan(command: PlanCommand) -> int:
    from moechat.cli.commands.plan import plan

    return plan(command)


def _profile(command: ProfileCommand) -> int:
    from moechat.cli.commands.profile import profile

    return profile(command)


def _simulate(command: SimulateCommand) -> int:
    from moechat.cli.commands.simulate import simulate

    return simulate(command)


def _trace(command: TraceCommand) -> int:
    from moechat.cli.commands.trace import trace

    return trace(command)


def _tune(command: TuneCommand) -> int:
    from moechat.cli.commands.tune import tune

    return tune(command)


register(_commands, "run", RunOptions, _run)
register(_commands, "serve", ServeCommand, _serve)
register(_commands, "bench", BenchCommand, _bench)
register(_commands, "compare", CompareCommand, _compare)
register(_commands, "plan", PlanCommand, _plan)
register(_commands, "profile", ProfileCommand, _profile)
register(_commands, "simulate", SimulateCommand, _simulate)
register(_commands, "trace", TraceCommand, _trace)
register(_commands, "tune", TuneCommand, _tune)
register(_commands, "count", CountCommand, _count)


@_commands.command("doctor", help=_DOCTOR_HELP, epilog=_DOCTOR_EXAMPLES)
def _doctor(json: Annotated[bool, flag("Print JSON.", "--json")] = False) -> Action:
    def action() -> int:
        from moechat.cli.doctor.command import doctor

        return doctor(grammar(), json=json)

    return action


register_servers(_commands)
register_library(_commands)
register_help(_commands)
for _registered in _commands.registered_commands:
    _registered.cls = ExplainingCommand
_commands.add_typer(sessions_app, name="sessions")
_commands.add_typer(config_app, name="config")
