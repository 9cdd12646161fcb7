"""Interfaces that the chat needs from its caller: status output, and the loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moechat.chat.chat_options import ChatOptions
    from moechat.steps import Step


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

    def expert_map(self, found: Any) -> None:
        """Show where every expert is, a :class:`moechat.offload.expert_map.ExpertMap`."""

    def map_lines(self, found: Any, columns: int, rows: int) -> Sequence[str]:
        """Format an :class:`moechat.offload.expert_map.ExpertMap` for a terminal, within a size."""

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        """Show a change of plan, the content of ``Replanned.to_json()``."""


class ChatEngine(Protocol):
    """A model that answers: the engine of this process, or one on another server."""

    @property
    def name(self) -> str:
        """As the user named it, or as the server tells it."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def has_chat_template(self) -> bool:
        """Whether it takes messages."""

    @property
    def template_variables(self) -> frozenset[str] | None:
        """Variables that its chat template reads beside messages and tools; ``None``: not known."""

    @property
    def sampling(self) -> Any:
        """Its own sampling settings."""

    @property
    def stats(self) -> Any:
        """Measurements of the last answer."""

    @property
    def encode(self) -> Callable[..., Sequence[int]]:
        """Makes tokens of messages or a text; see ``Engine.encode``."""

    @property
    def generate(self) -> Callable[..., Iterator[Step]]:
        """Generates an answer; see ``Engine.generate``."""

    def token_text(self, token: int) -> str:
        """One token as text."""

    def describe(self) -> Any:
        """Facts, with ``rows`` for people and ``to_json``."""

    def expert_map(self) -> Any:
        """Where every expert is, see ``Engine.expert_map``; ``None`` where nothing is known about that."""

    def idle(self) -> Any:
        """Use the time before the next message."""

    def notices(self) -> list[str]:
        """Sentences for the user since the last call."""

    def close(self) -> None:
        """Free what it holds."""


class Models(Protocol):
    """Owns the loaded model, at most one at a time."""

    @property
    def engine(self) -> ChatEngine:
        """The model.

        Raises:
            NoModelError: None is loaded.
        """

    def use(self, name: str) -> ChatOptions | None:
        """Replace the model. On failure the previous one stays, or is loaded again.

        Returns:
            The options that come with it, such as those of a preset; ``None``: as before.

        Raises:
            NoModelError: Neither model can be loaded; another call may succeed.
            MoechatError: The new model cannot be used.
            KeyboardInterrupt: Ctrl-C was pressed.
        """

    def load_here(self) -> None:
        """Load the model in this process, after the server that had it in memory has ended.

        Raises:
            MoechatError: It cannot be loaded; another call may succeed.
            KeyboardInterrupt: Ctrl-C was pressed; another call may succeed.
        """
