"""Implements the interfaces of the chat: status output on stderr, and the loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moechat.chat.signals import uninterrupted
from moechat.cli.terminal.answer_stats import print_replanned, print_stats
from moechat.cli.terminal.consoles import print_error, print_notice, print_rows
from moechat.cli.terminal.load_progress import format_bytes
from moechat.cli.terminal.map_of_experts import print_map
from moechat.errors import NoModelError, UsageError

if TYPE_CHECKING:
    from moechat.chat.interfaces import ChatEngine

_NONE_LOADED = "/model NAME loads one; the conversation stays"


class StderrStatus:
    """Writes status output to stderr; see :class:`moechat.chat.interfaces.StatusOutput`."""

    def notice(self, message: str) -> None:
        """Print a message that is not an error."""
        print_notice(message)

    def error(self, message: str, hint: str | None = None) -> None:
        """Print an error and the next step."""
        print_error(message, hint)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show names with values."""
        print_rows(rows)

    def size(self, count: float) -> str:
        """Format a number of bytes."""
        return format_bytes(count)

    def statistics(self, statistics: Mapping[str, Any]) -> None:
        """Show the statistics of an answer."""
        print_stats(statistics)

    def expert_map(self, found: Any) -> None:
        """Show where every expert is."""
        print_map(found)

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        """Show a change of plan."""
        print_replanned(replanned)


class ModelSlot:
    """Owns the loaded model, at most one at a time; a context manager that closes it.

    Args:
        load: Loads a model by name for a chat.
        name: The first model.
        bits: The bits that ``load`` uses, to choose between stores of one name.
        local: Models are those of this machine.
    """

    def __init__(
        self, load: Callable[[str], ChatEngine], name: str, bits: int | None = None, *, local: bool = True
    ) -> None:
        self._load = load
        self._bits = bits
        self._local = local
        self._name = name
        self._engine: ChatEngine | None = load(name)

    @property
    def engine(self) -> ChatEngine:
        """The model.

        Raises:
            NoModelError: None is loaded, because :meth:`use` could not restore the previous one.
        """
        if self._engine is None:
            raise NoModelError("no model is loaded", hint=_NONE_LOADED)
        return self._engine

    def use(self, name: str) -> None:
        """Close the model and load another one: there is memory for one only.

        Raises:
            NoModelError: The new model cannot be used, and the previous one cannot be loaded again.
            MoechatError: The new model cannot be used; the previous one is loaded again.
            KeyboardInterrupt: Ctrl-C was pressed; the previous one is loaded again, without interruption.
        """
        from moechat.hub.names import resolve

        if self._local:
            resolve(name, bits=self._bits)  # raises before the model is closed
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
        """Close the model; may be called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> ModelSlot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
