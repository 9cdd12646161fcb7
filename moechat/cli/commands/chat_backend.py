"""Implements the interfaces of the chat: status output on stderr, and the loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moechat.chat.signals import uninterrupted
from moechat.cli.terminal.answer_stats import print_replanned, print_stats
from moechat.cli.terminal.consoles import print_error, print_notice, print_rows
from moechat.cli.terminal.load_progress import format_bytes
from moechat.cli.terminal.map_of_experts import live_lines, print_map
from moechat.errors import NoModelError, UsageError

if TYPE_CHECKING:
    from moechat.chat.chat_options import ChatOptions
    from moechat.chat.interfaces import ChatEngine
    from moechat.cli.commands.model_choice import ModelChoice

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

    def map_lines(self, found: Any, columns: int, rows: int) -> list[str]:
        """Format a map for a terminal."""
        return live_lines(found, columns, rows)

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        """Show a change of plan."""
        print_replanned(replanned)


class ModelSlot:
    """Owns the loaded model, at most one at a time; a context manager that closes it.

    Args:
        load: Loads a model by name for a chat.
        name: The first model.
        bits: The bits that ``load`` uses, to choose between stores of one name.
        choice: Finds presets and other servers by name; ``None``: names are those of models of this machine.
        load_here: Like ``load``, but in this process though a server may have the model in memory.
    """

    def __init__(
        self,
        load: Callable[[str], ChatEngine],
        name: str,
        bits: int | None = None,
        *,
        choice: ModelChoice | None = None,
        load_here: Callable[[str], ChatEngine] | None = None,
    ) -> None:
        self._load = load
        self._load_here = load_here or load
        self._bits = bits
        self._choice = choice
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

    def use(self, name: str) -> ChatOptions | None:
        """Close the model and load another one: there is memory for one only.

        A model of another server takes no memory, so that one is there before the other is closed.

        Returns:
            Options of a chat with the new model; ``None``: as before.

        Raises:
            NoModelError: The new model cannot be used, and the previous one cannot be loaded again.
            MoechatError: The new model cannot be used; the previous one is loaded again.
            KeyboardInterrupt: Ctrl-C was pressed; the previous one is loaded again, without interruption.
        """
        if self._is_elsewhere(name):  # raises before the model is closed
            engine = self._load(name)
            self.close()
            self._engine = engine
        else:
            self._replace(name)
        self._name = name
        return None if self._choice is None else self._choice.use(name)

    def load_here(self) -> None:
        """Load the model in this process, in place of one of a server that has ended.

        The engine of the server stays until the model is loaded, so that a later message tries again.

        Raises:
            MoechatError: It cannot be loaded.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        engine = self._load_here(self._name)
        self.close()
        self._engine = engine

    def _is_elsewhere(self, name: str) -> bool:
        """Whether the old or the new model is that of another server.

        Raises:
            MoechatError: There is no such model.
        """
        if self._choice is not None:
            wanted = self._choice.options(name)
            return wanted.server is not None or self._choice.current.server is not None
        from moechat.hub.names import resolve

        resolve(name, bits=self._bits)
        return False

    def _replace(self, name: str) -> None:
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
