"""The consoles and the model that a chat uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moechat.chat.signals import uninterrupted
from moechat.cli.progress import format_bytes
from moechat.cli.stats import print_replanned, print_stats
from moechat.cli.terminal import console, neutralise, print_error, print_notice
from moechat.errors import NoModelError, UsageError

if TYPE_CHECKING:
    from moechat import Engine

_NONE_LOADED = "/model NAME loads one; the conversation stays"


class ConsoleVoice:
    """Says what is not a part of an answer on stderr."""

    def notice(self, message: str) -> None:
        """Say something that is not an error."""
        print_notice(message)

    def error(self, message: str, hint: str | None = None) -> None:
        """Say what happened, and what to do about it."""
        print_error(message, hint)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show names with values."""
        from rich.text import Text

        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            console().print(Text.assemble((f"{name:{width}}", "dim"), "  ", neutralise(value)))

    def size(self, count: float) -> str:
        """A number of bytes for people."""
        return format_bytes(count)

    def statistics(self, statistics: Mapping[str, Any]) -> None:
        """Show the statistics of an answer."""
        print_stats(statistics)

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        """Show what a new plan has changed."""
        print_replanned(replanned)


class LoadedModels:
    """Holds the one model that is loaded; a context manager that closes it.

    Args:
        load: Loads a model by its name, ready for a chat.
        name: The first one.
        bits: Those that ``load`` asks for; they may choose between stores of one name.
    """

    def __init__(self, load: Callable[[str], Engine], name: str, bits: int | None = None) -> None:
        self._load = load
        self._bits = bits
        self._name = name
        self._engine: Engine | None = load(name)

    @property
    def engine(self) -> Engine:
        """The model.

        Raises:
            NoModelError: None is loaded, since :meth:`use` failed altogether.
        """
        if self._engine is None:
            raise NoModelError("no model is loaded", hint=_NONE_LOADED)
        return self._engine

    def use(self, name: str) -> None:
        """Load another model in place of this one: memory is planned for one.

        Raises:
            NoModelError: It cannot be used, and the one before cannot be loaded again.
            MoechatError: It cannot be used; the one before is loaded again.
            KeyboardInterrupt: Ctrl-C meanwhile; the same. While that one is loaded Ctrl-C does nothing.
        """
        from moechat.hub.names import resolve

        resolve(name, bits=self._bits)  # before anything is given up
        self.close()
        try:
            self._engine = self._load(name)
            if not self._engine.has_chat_template:
                raise UsageError(f"{self._engine.name} has no chat template: it was not made for chats")
        except (Exception, KeyboardInterrupt) as error:
            with uninterrupted():
                self.close()
                self._load_again(error)
            raise
        self._name = name

    def _load_again(self, reason: BaseException) -> None:
        try:
            self._engine = self._load(self._name)
        except Exception as error:
            why = str(reason) or (
                "stopped" if isinstance(reason, KeyboardInterrupt) else type(reason).__name__
            )
            raise NoModelError(
                f"no model is loaded: {why}; {self._name} could not be loaded again either: "
                f"{str(error) or type(error).__name__}",
                hint=_NONE_LOADED,
            ) from error

    def close(self) -> None:
        """Give the model back; harmless when repeated."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> LoadedModels:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
