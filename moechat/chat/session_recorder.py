"""Records a chat in the database; failures are reported and never stop the chat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.errors import MoechatError, SessionsBusyError, SessionsUnavailableError
from moechat.history.conversation import turns_of
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from moechat.chat.chat_options import ChatOptions
    from moechat.history.conversation import Conversation
    from moechat.history.session_database import Sessions


class Recorder:
    """Stores a conversation after each turn.

    A failure is reported once; unstored turns are tried again with each call.

    Args:
        path: The database; ``None`` stores nothing.
        warn: Receives a message for the user, and a hint or ``None``.
        once: There is a single answer, so no later try.
    """

    def __init__(
        self, path: Path | None, warn: Callable[[str, str | None], None], *, once: bool = False
    ) -> None:
        self._path = path
        self._warn = warn
        self._once = once
        self._sessions: Sessions | None = None
        self._failing = False

    def keep(self, conversation: Conversation) -> bool:
        """Store new turns; returns whether all are stored. A conversation without turns is not stored."""
        if self._path is None:
            return False
        if not conversation.turns and conversation.key is None:
            return True
        try:
            if self._sessions is None:
                from moechat.history.session_database import Sessions

                self._sessions = Sessions(self._path)
            before = conversation.key
            if self._sessions.keep(conversation):
                self._warn(
                    f"(conversation {before} was deleted; new turns are saved as {conversation.key})",
                    None,
                )
        except (MoechatError, ImportError) as error:
            self.close()
            if not self._failing:
                self._failing = True
                hint = error.hint if isinstance(error, SessionsUnavailableError) else None
                if isinstance(error, SessionsBusyError) and not self._once:
                    hint = "another program is using it; the next answer tries again"
                self._warn(f"(this conversation is not saved: {error})", hint)
            return False
        if self._failing:
            self._failing = False
            self._warn("(the conversation is saved again, all of it)", None)
        return True

    def close(self) -> None:
        """Close the database; :meth:`keep` opens it again."""
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            with suppress(Exception):  # closing a damaged file may fail
                sessions.close()


def resume_conversation(
    path: Path, options: ChatOptions, model: str, notify: Callable[[str, str | None], None]
) -> Conversation | None:
    """The conversation to continue; ``None`` for a new one.

    Args:
        path: The database.
        options: Which conversation, and a system prompt to replace its own.
        model: Name of the model; the last conversation with it is preferred.
        notify: Receives a message on the choice, or on a failure to read the last conversation.

    Raises:
        SessionNotFoundError: There is no conversation with the requested number.
        SessionsUnavailableError: The database cannot be read, and a number was requested.
    """
    if options.resume is False:
        return None
    from moechat.history.session_database import Sessions

    try:
        with Sessions(path, existing=True) as sessions:
            number = options.resume
            conversation = sessions.last(model) if number is True else sessions.get(number)
    except SessionsUnavailableError as error:
        if options.resume is not True:
            raise
        notify(f"(the last conversation cannot be read: {error}; this is a new one)", error.hint)
        return None
    if conversation is None:
        if not options.quiet:
            notify("(no conversation is kept yet; this is a new one)", None)
        return None
    if options.system is not None:
        conversation.system = options.system
    of = "" if conversation.model == model else f", so far with {one_line(conversation.model)}"
    if not options.quiet:
        title = one_line(conversation.title)
        notify(f"conversation {conversation.key} goes on: {title} ({turns_of(conversation)}{of})", None)
    return conversation
