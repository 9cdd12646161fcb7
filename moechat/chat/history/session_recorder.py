"""Keeps the conversation of a chat while it goes on; what goes wrong never stops the chat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.chat.conversation import turns_of
from moechat.chat.neutral import one_line
from moechat.errors import MoechatError, SessionsBusyError, SessionsUnavailableError

if TYPE_CHECKING:
    from moechat.chat.conversation import Conversation
    from moechat.chat.sessions import Sessions
    from moechat.chat.settings import ChatOptions


class Recorder:
    """Writes a conversation after each turn.

    A failure is told once; what it left out is tried again each time.

    Args:
        path: The database; ``None``: nothing is kept.
        tell: Called with a sentence for the user, and a hint or ``None``.
        once: A single answer comes: nothing is tried again after it.
    """

    def __init__(
        self, path: Path | None, tell: Callable[[str, str | None], None], *, once: bool = False
    ) -> None:
        self._path = path
        self._tell = tell
        self._once = once
        self._sessions: Sessions | None = None
        self._failing = False

    def keep(self, conversation: Conversation) -> bool:
        """Write what is new; whether all of it is written now. Without a turn there is nothing to keep."""
        if self._path is None:
            return False
        if not conversation.turns and conversation.key is None:
            return True
        try:
            if self._sessions is None:
                from moechat.chat.sessions import Sessions

                self._sessions = Sessions(self._path)
            before = conversation.key
            if self._sessions.keep(conversation):
                self._tell(
                    f"(conversation {before} was deleted; what follows is kept as number {conversation.key})",
                    None,
                )
        except (MoechatError, ImportError) as error:
            self.close()
            if not self._failing:
                self._failing = True
                hint = error.hint if isinstance(error, SessionsUnavailableError) else None
                if isinstance(error, SessionsBusyError) and not self._once:
                    hint = "another program is using it; it is tried again with the next answer"
                self._tell(f"(this conversation is not saved: {error})", hint)
            return False
        if self._failing:
            self._failing = False
            self._tell("(the conversation is saved again, all of it)", None)
        return True

    def close(self) -> None:
        """Close the database; it is opened again when something is to be kept."""
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            with suppress(Exception):  # a damaged file may refuse even this
                sessions.close()


def resumed(
    path: Path, options: ChatOptions, model: str, tell: Callable[[str, str | None], None]
) -> Conversation | None:
    """The conversation that a chat goes on with; ``None``: a new one.

    Args:
        path: The database.
        options: Which one, and the system prompt that is to hold now, if one was given.
        model: Whose conversations come first where the last one is wanted.
        tell: Called with what was chosen, and with what went wrong where the last one was wanted.

    Raises:
        SessionNotFoundError: There is none of the number that was asked for.
        SessionsUnavailableError: One was asked for by its number, and the database cannot be read.
    """
    if options.resume is False:
        return None
    from moechat.chat.sessions import Sessions

    try:
        with Sessions(path, existing=True) as sessions:
            wanted = options.resume
            conversation = sessions.last(model) if wanted is True else sessions.get(wanted)
    except SessionsUnavailableError as error:
        if options.resume is not True:
            raise
        tell(f"(the last conversation cannot be read: {error}; this is a new one)", error.hint)
        return None
    if conversation is None:
        if not options.quiet:
            tell("(no conversation is kept yet; this is a new one)", None)
        return None
    if options.system is not None:
        conversation.system = options.system
    of = "" if conversation.model == model else f", so far with {one_line(conversation.model)}"
    if not options.quiet:
        title = one_line(conversation.title)
        tell(f"conversation {conversation.key} goes on: {title} ({turns_of(conversation)}{of})", None)
    return conversation
