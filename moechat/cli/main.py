"""Entry point of the ``moechat`` command: arguments in, exit status out.

Exit status: 0 ok (also when whoever reads the output has closed it), 1 something unexpected, 2 to 7 as in
:mod:`moechat.errors`, 129 hung up, 130 interrupted, 143 terminated. Errors go to stderr as ``error: …`` and
``hint: …``; a traceback only with ``MOECHAT_DEBUG=1``.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

_INTERRUPTED = 128 + signal.SIGINT


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Not an ``Exception``: only clean-up may come between it and the exit.

    Args:
        number: That of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows the program's name; ``None`` takes the process's own arguments.

    Returns:
        The exit status.
    """
    try:
        end_on_signals()
        _prepare_standard_streams()
        warnings.showwarning = _show_warning
        # Imported here so that an interrupt or a broken installation ends as every other error does.
        from moechat.cli.app import parse

        status = parse(sys.argv[1:] if arguments is None else list(arguments))()
        sys.stdout.flush()
        return status
    except BaseException as error:
        return _end(error)


_show_any = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Say ours as every other message is said; those of libraries as Python does."""
    from moechat.errors import MoechatWarning

    if not issubclass(category, MoechatWarning):
        _show_any(message, category, *where, **more)
        return
    from moechat.cli.terminal import print_warning

    print_warning(str(message))


def end_on_signals() -> None:
    """Let SIGTERM, and SIGHUP unless it is ignored (``nohup``), end the program by :class:`Terminated`."""
    signal.signal(signal.SIGTERM, _on_end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _on_end)


def _on_end(number: int, frame: FrameType | None) -> NoReturn:
    # A second SIGTERM does not wait for any clean-up; of SIGHUP one comes from the system when a terminal is
    # gone, and often another from the shell.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise Terminated(number)


def _prepare_standard_streams() -> None:
    """Make all three streams usable, whatever the caller has closed and whatever characters come."""
    # A file opened later must not become descriptor 1 and receive the output. Lowest descriptor first:
    # open() takes the lowest that is free.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
    if sys.stdout is None:
        from moechat.cli.terminal import ClosedStream

        sys.stdout = ClosedStream()
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _end(error: BaseException) -> int:
    """Say what went wrong, if it is for the user to know, and choose the exit status."""
    try:
        if _is_interrupt(error):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the second Ctrl-C must not break the way out
        if os.environ.get("MOECHAT_DEBUG") == "1" and not isinstance(error, SystemExit):
            import traceback

            traceback.print_exception(error)
        status = _explain(error)
        sys.stderr.flush()
        if not isinstance(error, BrokenPipeError):
            sys.stdout.flush()
    except OSError:
        status = 0 if isinstance(error, BrokenPipeError) else _status(error)
    _discard_output()
    return status


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt | Terminated)


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if isinstance(error, Terminated):
        return error.status
    if isinstance(error, BrokenPipeError):
        return 0
    if isinstance(error, SystemExit):
        if isinstance(error.__context__, BrokenPipeError):
            return 0  # rich, which writes the help, ends the program itself when nobody reads it
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    # MoechatError and the exceptions of typer's parser both say it themselves.
    status = getattr(error, "exit_code", 1)
    return status if isinstance(status, int) else 1


def _explain(error: BaseException) -> int:
    from moechat.cli.terminal import print_error
    from moechat.errors import DoesNotFitError, MoechatError

    if _is_interrupt(error) or isinstance(error, BrokenPipeError | SystemExit):
        pass
    elif isinstance(error, MoechatError):
        print_error(str(error), error.hint)
    elif hasattr(error, "exit_code"):
        # A usage error of typer's parser. Without a text it has shown the help already.
        if hasattr(error, "format_message") and (text := error.format_message()):
            print_error(text, "moechat --help lists the commands, moechat COMMAND --help the options of one")
    elif isinstance(error, MemoryError):
        print_error("there is not enough memory", "use fewer bits, a shorter context, or a smaller model")
        return DoesNotFitError.exit_code
    else:
        print_error(_describe(error), "MOECHAT_DEBUG=1 shows where it happened")
    return _status(error)


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _discard_output() -> None:
    """Whatever is still buffered has nowhere to go: keep the interpreter from trying again as it exits."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
