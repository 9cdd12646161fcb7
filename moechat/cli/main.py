"""Entry point of the ``moechat`` command: takes arguments, returns the exit status.

Exit status: 0 ok (also when the reader of the output closed it), 1 unexpected error, 2 to 9 as in
:mod:`moechat.errors`, 129 terminal closed (SIGHUP), 130 interrupted, 143 terminated. Errors go to stderr as
``error: …`` and ``hint: …``; a traceback only with ``MOECHAT_DEBUG=1``.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

_INTERRUPTED = 128 + signal.SIGINT
_LARGE_LIBRARIES = ("torch", "transformers", "moechat.models", "moechat.engine")
_AGAIN_S = 0.02  # until a signal that came during an import is sent again
_GC_OBJECTS = 100_000  # new objects between two searches for garbage


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Not an ``Exception``: only clean-up may run before the exit.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments without the program's name; ``None`` takes those of the process, which then has
            to end with the status that is returned.

    Returns:
        The exit status.
    """
    if arguments is None:
        # Libraries make a million objects that stay, so frequent searches find next to nothing.
        gc.set_threshold(_GC_OBJECTS)
        end = _QuickEnd()
        atexit.register(end)
    own = arguments is None
    try:
        status = _run(sys.argv[1:] if arguments is None else list(arguments))
        if own:
            _stop_handling_signals()
    except BaseException as error:  # a signal while another error was reported, or at the very end
        status = _end(_origin(error))
        if own:
            _stop_handling_signals()
    if own:
        end.status = status
    return status


def _run(arguments: list[str]) -> int:
    """Run the command and report its error; returns the exit status."""
    try:
        end_on_signals()
        _prepare_standard_streams()
        warnings.showwarning = _show_warning
        # Imported here so that interrupts and import errors are reported like all others.
        from moechat.cli.app import parse

        status = parse(arguments)()
        sys.stdout.flush()
        if sys.stderr.isatty():
            from moechat.cli.update_notice import announce

            announce()
    except BaseException as error:
        status = _end(_origin(error))
    return status


class _QuickEnd:
    """Ends the process as the last step at the interpreter's exit, without freeing each object.

    Freeing all that torch and transformers have made takes half as long as their import. The first function
    registered with ``atexit`` is called last: after threads have ended and all others have cleaned up.

    Attributes:
        status: The exit status; ``None`` until the command has ended.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self._process = os.getpid()

    def __call__(self) -> None:
        if self.status is None or os.getpid() != self._process:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)


def _stop_handling_signals() -> None:
    """Nothing is left to interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _on_end:
            signal.signal(number, signal.SIG_DFL)


_show_python_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print our warnings like other messages; those of libraries in Python's format."""
    from moechat.errors import MoechatWarning

    if not issubclass(category, MoechatWarning):
        _show_python_warning(message, category, *where, **more)
        return
    from moechat.cli.terminal.consoles import print_warning

    print_warning(str(message))


def end_on_signals() -> None:
    """Raise :class:`Terminated` on SIGTERM, and on SIGHUP unless it is ignored (``nohup``).

    Ctrl-C raises ``KeyboardInterrupt`` as before. While libraries are imported, all of them wait.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)
    signal.signal(signal.SIGTERM, _on_end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _on_end)
    sys.unraisablehook = _on_unraisable


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if not _comes_later(number):
        signal.default_int_handler(number, frame)


def _comes_later(number: int) -> bool:
    """Whether a library is being imported, which no exception may leave; then the signal is sent again soon.

    torch aborts the process otherwise, and half imported modules fail where they are used.
    """
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in _LARGE_LIBRARIES)
    if not any(getattr(spec, "_initializing", False) for spec in specs):
        return False
    _send_again(number)
    return True


def _send_again(number: int) -> None:
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _on_unraisable(lost: sys.UnraisableHookArgs) -> None:
    """The interpreter has dropped an exception, as those that leave a finaliser: if it was to end the
    command, the signal is sent again.
    """
    error = lost.exc_value
    if error is None or not _is_interrupt(error):
        sys.__unraisablehook__(lost)
        return
    if isinstance(error, Terminated):
        number = error.status - 128
        signal.signal(number, _on_end)
        _send_again(number)
    else:
        _send_again(signal.SIGINT)


def _on_end(number: int, frame: FrameType | None) -> None:
    if _comes_later(number):
        return
    # A second SIGTERM ends the process at once. A closed terminal sends SIGHUP, and often the shell another.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise Terminated(number)


def _prepare_standard_streams() -> None:
    """Make all three streams usable, even closed ones, for any characters."""
    # A file opened later must not become descriptor 1 and receive the output. Lowest descriptor first,
    # because open() takes the lowest free one.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
    if sys.stdout is None:
        from moechat.cli.terminal.consoles import ClosedStream

        sys.stdout = ClosedStream()
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _end(error: BaseException) -> int:
    """Report an error, if the user should know it, and choose the exit status."""
    try:
        if _is_interrupt(error):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the exit
        if os.environ.get("MOECHAT_DEBUG") == "1" and not isinstance(error, SystemExit):
            _show_traceback(error)
        status = _explain(error)
        sys.stderr.flush()
        if not isinstance(error, BrokenPipeError):
            sys.stdout.flush()
    except OSError:
        status = 0 if isinstance(error, BrokenPipeError) else _status(error)
    _discard_output()
    return status


def _show_traceback(error: BaseException) -> None:
    """Print where an error happened. Its text may be a file's, so it must not reach the terminal as it is."""
    import traceback

    from moechat.safe_text import neutralise

    sys.stderr.write(neutralise("".join(traceback.format_exception(error))))


def _origin(error: BaseException) -> BaseException:
    """The signal behind an error: Python 3.11 makes a ``RuntimeError`` of what leaves ``__set_name__``."""
    cause: BaseException | None = error
    while isinstance(cause, RuntimeError):
        cause = cause.__cause__
    return error if cause is None or not _is_interrupt(cause) else cause


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
            return 0  # rich, which prints the help, exits on a broken pipe
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    # MoechatError and the errors of typer's parser have an exit status.
    status = getattr(error, "exit_code", 1)
    return status if isinstance(status, int) else 1


def _explain(error: BaseException) -> int:
    from moechat.cli.terminal.consoles import print_error
    from moechat.errors import DoesNotFitError, MoechatError

    if _is_interrupt(error) or isinstance(error, BrokenPipeError | SystemExit):
        pass
    elif isinstance(error, MoechatError):
        print_error(str(error), error.hint)
    elif hasattr(error, "exit_code"):
        # A usage error of typer's parser. Without a message it already printed the help.
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
    """Discard unwritable buffered output, so that the interpreter does not fail on it at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, 1)
        os.close(null_device)


if __name__ == "__main__":
    sys.exit(main())
