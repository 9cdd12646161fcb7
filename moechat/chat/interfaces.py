"""Interfaces that the chat needs from its caller: status output, and the loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moechat import Engine


class StatusOutput(Protocol):
    """Writes everything that is not part of an answer to stderr. Neutralises control characters in texts."""

    def notice(self, message: str) -> None:
        """Show a message that is not an error."""

    def error(self, message: str, hint: str | None = None) -> None:
        """Show an error and the next step."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show names with values."""

    def size(self, count: float) -> str:
        """Format a number of bytes."""

    def statistics(self, statistics: Mapping[str, Any]) -> None:
        """Show the statistics of an answer, the content of ``Stats.to_json()``."""

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        """Show a change of plan, the content of ``Replanned.to_json()``."""


class Models(Protocol):
    """Owns the loaded model, at most one at a time."""

    @property
    def engine(self) -> Engine:
        """The model.

        Raises:
            NoModelError: None is loaded.
        """

    def use(self, name: str) -> None:
        """Replace the model. On failure the previous one is loaded again.

        Raises:
            NoModelError: Neither model can be loaded; another call may succeed.
            MoechatError: The new model cannot be used.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
