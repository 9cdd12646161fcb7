"""Shell completion: its scripts, and the answer when a shell asks.

bash cuts words at ``@``, ``:`` and ``=`` (``COMP_WORDBREAKS``), which are parts of our names, and replaces
only the piece that the cursor is in. So pieces are joined, and of what is offered only the part that belongs
to that piece is said.
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
from moechat.cli.terminal import print_notice, write_output
from moechat.errors import UsageError

VARIABLE = "_MOECHAT_COMPLETE"
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_PROGRAM = "moechat"
_BREAKS = re.compile(r"[@:=]+")


def answer_shell(command: LazyGroup, arguments: list[str]) -> NoReturn:
    """Print what the shell asks for, and end.

    Args:
        command: The command line's grammar.
        arguments: Of this process.

    Raises:
        SystemExit: Always.
    """
    _typer().completion_init()
    command.prepare(_take_as_text)
    _take_as_text(command)
    option = _option_begun(os.environ)
    if option:
        command.prepare(lambda built: _offer_behind(option, built))
    before = join_words(os.environ) if os.environ.get(VARIABLE) == "complete_bash" else ""
    said = io.BytesIO()
    answer = io.TextIOWrapper(said, "utf-8", errors="replace")
    status: Any = 0
    try:
        with redirect_stdout(answer):
            command.main(args=arguments, prog_name=_PROGRAM)
    except SystemExit as done:
        status = done.code
    answer.flush()
    lines = said.getvalue().decode().splitlines()
    sys.stdout.write("".join(f"{line.removeprefix(before)}\n" for line in lines))
    sys.exit(status)


def _take_as_text(command: Any) -> None:
    """Let no value be checked or acted on: checking imports pydantic, half of the time of a completion."""
    for parameter in command.params:
        parameter.process_value = lambda context, value: value
    if not isinstance(command, LazyGroup):
        for inner in getattr(command, "commands", {}).values():
            _take_as_text(inner)


def _option_begun(environment: Mapping[str, str]) -> str:
    """``--option=`` where the cursor is in its value and the shell replaces the whole word, unlike bash."""
    word = environment.get("_TYPER_COMPLETE_ARGS", "").rpartition(" ")[2]
    option, equals, _ = word.partition("=")
    return option + equals if option.startswith("--") and equals else ""


def _offer_behind(option: str, command: Any) -> None:
    """Let what is offered for values begin with the option."""
    for parameter in command.params:

        def offered(context: Any, incomplete: str, ask: Any = parameter.shell_complete) -> Any:
            items = ask(context, incomplete)
            for item in items:
                item.value = option + item.value
            return items

        parameter.shell_complete = offered
    for inner in getattr(command, "commands", {}).values():
        _offer_behind(option, inner)


def show_completion(shell: str | None) -> int:
    """Print the script that completes for a shell; ``None`` for the current one. Returns the exit status.

    Raises:
        UsageError: It is not known, or there is no script for it.
    """
    name = _known(shell, "--show-completion")
    script = _typer().get_completion_script(prog_name=_PROGRAM, complete_var=VARIABLE, shell=name)
    write_output(sys.stdout, (_at_first_call(script) if name == "zsh" else script) + "\n")
    return 0


def install_completion(shell: str | None) -> int:
    """Write that script where the shell finds it. Returns the exit status.

    Raises:
        UsageError: The shell is not known, or there is no script for it.
        OSError: It cannot be written.
    """
    name, path = _typer().install(
        shell=_known(shell, "--install-completion"), prog_name=_PROGRAM, complete_var=VARIABLE
    )
    if name == "zsh":
        path.write_text(_at_first_call(path.read_text()))
    print_notice(f"completion for {name} is in {path}: it works in shells that you start from now on")
    return 0


def _at_first_call(script: str) -> str:
    """Typer's script for zsh, which from a directory of functions only registers itself when it is first
    called: in every new shell the first Tab would complete nothing.
    """
    register = f"compdef _{_PROGRAM}_completion {_PROGRAM}"
    complete = f'if [[ $funcstack[1] = _{_PROGRAM} ]]; then _{_PROGRAM}_completion "$@"; fi'
    return script.replace(register, f"{register}\n{complete}")


def _known(shell: str | None, option: str) -> str:
    if shell in SHELLS:
        return shell
    hint = f"moechat {option} SHELL, one of: {', '.join(SHELLS)}"
    if shell is not None:
        raise UsageError(f"there is no completion for {shell!r}", hint=hint)
    detection: Any = importlib.import_module("shellingham")  # a dependency of typer; it has no types
    try:
        found: str = detection.detect_shell()[0]
    except detection.ShellDetectionFailure:
        raise UsageError("it cannot be told which shell this is", hint=hint) from None
    return _known(found, option)


def _typer() -> Any:
    import typer.completion

    return typer.completion


def join_words(environment: MutableMapping[str, str]) -> str:
    """Join what bash has cut, in ``COMP_WORDS`` and ``COMP_CWORD``.

    Args:
        environment: With both variables as bash's script sets them, a word a line; they are changed.

    Returns:
        What stands before the piece with the cursor in the joined word: bash leaves that as it is.
    """
    words = environment.get("COMP_WORDS", "").split("\n")
    number = environment.get("COMP_CWORD", "")
    if not number.isdigit() or not 0 < int(number) < len(words):
        return ""
    at = int(number)
    joined: list[str] = []
    before = ""
    for index, word in enumerate(words[: at + 1]):
        # An empty piece is what comes after a blank.
        glued = index > 1 and word != "" and (_is_break(word) or _is_break(words[index - 1]))
        if glued:
            before = joined[-1]
            joined[-1] += word
        else:
            before = ""
            joined.append(word)
    if _is_break(words[at]):
        before = joined[-1]  # the cursor is behind it
    if before.endswith("@"):
        before = before[:-1]  # readline counts this one to the piece that it replaces, unlike the others
    environment["COMP_WORDS"] = "\n".join(joined)
    environment["COMP_CWORD"] = str(len(joined) - 1)
    # What is offered for --option=VALUE are values alone.
    return before.partition("=")[2] if before.startswith("-") else before


def _is_break(word: str) -> bool:
    return _BREAKS.fullmatch(word) is not None
