"""What the chat needs of whoever owns the consoles and the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moechat import Engine


class Voice(Protocol):
    """Says on stderr what is not a part of an answer. Texts may hold anything; it makes them harmless."""

    def notice(self, message: str) -> None:
        """Say something that is not an error."""

    def error(self, message: str, hint: str | None = None) -> None:
        """Say what happened, and what to do about it."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show names with values."""

    def size(self, count: float) -> str:
        """A number of bytes for people."""

    def statistics(self, statistics: Mapping[str, Any]) -> None:
        """Show the statistics of an answer, as ``Stats.to_json()`` gives them."""

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        """Show ``Replanned.to_json()``."""


class Models(Protocol):
    """Holds the one model that is loaded."""

    @property
    def engine(self) -> Engine:
        """The model.

        Raises:
            NoModelError: None is loaded.
        """

    def use(self, name: str) -> None:
        """Load another model in its place. Whatever goes wrong, the one before is loaded again.

        Raises:
            NoModelError: Neither can be loaded; another call may.
            MoechatError: The other one cannot be used.
            KeyboardInterrupt: Ctrl-C meanwhile.
        """
