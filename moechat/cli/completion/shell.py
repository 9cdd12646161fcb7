"""Shell completion: prints and installs the scripts, and answers their requests.

bash splits words at ``@``, ``:`` and ``=`` (``COMP_WORDBREAKS``), which occur in model names, and replaces
only the piece at the cursor. So this module joins the pieces before completing, and then prints each
candidate without the part before that piece.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import redirect_stdout
from typing import Any, NoReturn

from moechat.cli.lazy_group import LazyGroup
from moechat.cli.terminal.consoles import print_notice, write_output
from moechat.errors import UsageError

VARIABLE = "_MOECHAT_COMPLETE"
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_PROGRAM = "moechat"
_BREAKS = re.compile(r"[@:=]+")


def answer_shell(command: LazyGroup, arguments: list[str]) -> NoReturn:
    """Print the candidates for a shell's request, and exit.

    Args:
        command: The command line's grammar.
        arguments: Arguments of this process.

    Raises:
        SystemExit: Always.
    """
    _typer().completion_init()
    command.prepare(_skip_conversion)
    _skip_conversion(command)
    option = _option_prefix(os.environ)
    if option:
        command.prepare(lambda built: _prepend_option(option, built))
    before = join_words(os.environ) if os.environ.get(VARIABLE) == "complete_bash" else ""
    output = io.BytesIO()
    answer = io.TextIOWrapper(output, "utf-8", errors="replace")
    status: Any = 0
    try:
        with redirect_stdout(answer):
            command.main(args=arguments, prog_name=_PROGRAM)
    except SystemExit as done:
        status = done.code
    answer.flush()
    lines = output.getvalue().decode().splitlines()
    sys.stdout.write("".join(f"{line.removeprefix(before)}\n" for line in lines))
    sys.exit(status)


def _skip_conversion(command: Any) -> None:
    """Neither check nor process values: checking imports pydantic, half of the time of a completion."""
    for parameter in command.params:
        parameter.process_value = lambda context, value: value
    if not isinstance(command, LazyGroup):
        for inner in getattr(command, "commands", {}).values():
            _skip_conversion(inner)


def _option_prefix(environment: Mapping[str, str]) -> str:
    """``--option=`` if the cursor is in its value; else empty.

    For shells other than bash, which replace the whole word.
    """
    word = environment.get("_TYPER_COMPLETE_ARGS", "").rpartition(" ")[2]
    option, equals, _ = word.partition("=")
    return option + equals if option.startswith("--") and equals else ""


def _prepend_option(option: str, command: Any) -> None:
    """Prepend the option to the candidates for its value."""
    for parameter in command.params:

        def complete(context: Any, incomplete: str, original: Any = parameter.shell_complete) -> Any:
            items = original(context, incomplete)
            for item in items:
                item.value = option + item.value
            return items

        parameter.shell_complete = complete
    for inner in getattr(command, "commands", {}).values():
        _prepend_option(option, inner)


def show_completion(shell: str | None) -> int:
    """Print the completion script of a shell, or of the current one; returns the exit status.

    Raises:
        UsageError: The shell cannot be detected, or has no script.
    """
    name = _require_shell(shell, "--show-completion")
    script = _typer().get_completion_script(prog_name=_PROGRAM, complete_var=VARIABLE, shell=name)
    write_output(sys.stdout, (_complete_at_once(script) if name == "zsh" else script) + "\n")
    return 0


def install_completion(shell: str | None) -> int:
    """Install the completion script of a shell, or of the current one; returns the exit status.

    Raises:
        UsageError: The shell cannot be detected, or has no script.
        OSError: The script cannot be written.
    """
    name, path = _typer().install(
        shell=_require_shell(shell, "--install-completion"), prog_name=_PROGRAM, complete_var=VARIABLE
    )
    if name == "zsh":
        path.write_text(_complete_at_once(path.read_text()))
    print_notice(f"completion for {name} is in {path}; new shells will use it")
    return 0


def _complete_at_once(script: str) -> str:
    """Make Typer's script for zsh complete at its first call.

    Loaded from a directory of functions, the original only registers itself then, so the first Tab of every
    new shell completes nothing.
    """
    register = f"compdef _{_PROGRAM}_completion {_PROGRAM}"
    complete = f'if [[ $funcstack[1] = _{_PROGRAM} ]]; then _{_PROGRAM}_completion "$@"; fi'
    return script.replace(register, f"{register}\n{complete}")


def _require_shell(shell: str | None, option: str) -> str:
    if shell in SHELLS:
        return shell
    hint = f"moechat {option} SHELL, one of: {', '.join(SHELLS)}"
    if shell is not None:
        raise UsageError(f"there is no completion for {shell!r}", hint=hint)
    detection: Any = importlib.import_module("shellingham")  # a dependency of typer; it has no types
    try:
        found: str = detection.detect_shell()[0]
    except detection.ShellDetectionFailure:
        raise UsageError("the current shell cannot be detected", hint=hint) from None
    return _require_shell(found, option)


def _typer() -> Any:
    import typer.completion

    return typer.completion


def join_words(environment: MutableMapping[str, str]) -> str:
    """Join the words that bash has split, in ``COMP_WORDS`` and ``COMP_CWORD``.

    Args:
        environment: Has both variables as bash's script sets them, one word per line; they are changed.

    Returns:
        The part of the joined word before the piece at the cursor, which bash does not replace.
    """
    words = environment.get("COMP_WORDS", "").split("\n")
    number = environment.get("COMP_CWORD", "")
    if not number.isdigit() or not 0 < int(number) < len(words):
        return ""
    at = int(number)
    joined: list[str] = []
    before = ""
    for index, word in enumerate(words[: at + 1]):
        # An empty piece follows a blank.
        glued = index > 1 and word != "" and (_is_break(word) or _is_break(words[index - 1]))
        if glued:
            before = joined[-1]
            joined[-1] += word
        else:
            before = ""
            joined.append(word)
    if _is_break(words[at]):
        before = joined[-1]  # the cursor is after it
    if before.endswith("@"):
        before = before[:-1]  # readline also replaces a preceding @, but no : or =
    environment["COMP_WORDS"] = "\n".join(joined)
    environment["COMP_CWORD"] = str(len(joined) - 1)
    # The candidates for --option=VALUE are values without the option.
    return before.partition("=")[2] if before.startswith("-") else before


def _is_break(word: str) -> bool:
    return _BREAKS.fullmatch(word) is not None
