"""Executes the chat's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moechat.chat.code_blocks import last_code_block
from moechat.chat.command_settings import change_setting, setting_rows
from moechat.chat.commands import help_text, unquoted
from moechat.chat.terminal.clipboard import copy_to_clipboard
from moechat.chat.text_files import Stamp, path_of, read_named, read_text, write_text
from moechat.errors import SessionsUnavailableError, UsageError
from moechat.history.attachments import without_files
from moechat.history.conversation import Conversation, title_of, turns_of
from moechat.history.session_list import format_summary
from moechat.history.transcript import format_of, read_from, write_as
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from moechat.chat.session import ChatSession

_LISTED = 20  # the newest conversations; `moechat sessions --limit 0` lists all
_MAX_DIGITS = 19  # of SQLite's integers


class Commands:
    """Executes commands in a chat.

    Args:
        session: Its conversation and settings are changed.
    """

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        # Files that this conversation was saved to: overwritten by /save while no one else changes them.
        self._saved: set[Stamp] = set()
        self._saved_conversation = session.conversation

    def do(self, name: str, text: str) -> bool:
        """Execute a command; ``False`` to leave the chat.

        Args:
            name: The name of one of ``COMMANDS``.
            text: Its arguments.

        Raises:
            MoechatError: The command failed and changed nothing.
        """
        if name == "bye":
            return False
        action: Callable[[str], None] = getattr(self, f"_{name}")
        action(text)
        return True

    def _help(self, text: str) -> None:
        self._say(help_text())

    def _clear(self, text: str) -> None:
        session = self._session
        kept = session.conversation.key
        session.use_conversation(Conversation(system=session.conversation.system))
        where = "" if kept is None else f"; it is kept as number {kept}"
        self._say(f"the conversation is forgotten{where}")

    def _system(self, text: str) -> None:
        conversation = self._session.conversation
        if not text:
            now = conversation.system
            self._say("there is no system prompt" if now is None else f"the system prompt: {now}")
            return
        text = unquoted(text)
        conversation.system = text or None
        self._session.changed()
        self._session.record()
        self._say("the system prompt is set" if text else "there is no system prompt any more")

    def _set(self, text: str) -> None:
        if text:
            change_setting(self._session, text)
        else:
            self._session.status.table(setting_rows(self._session))

    def _show(self, text: str) -> None:
        session, engine = self._session, self._session.models.engine
        used = session.context_used()
        system = session.conversation.system
        rows = [
            *engine.describe().rows(session.status.size),
            ("context", f"{'?' if used is None else f'{used:,}'} of {engine.context_length:,} tokens used"),
            ("turns", f"{len(session.conversation.turns)}" + self._left_out()),
            (
                "conversation",
                "not saved" if session.conversation.key is None else str(session.conversation.key),
            ),
            ("system prompt", "none" if system is None else title_of(system)),
        ]
        loading = [(name, f"{value}  ({origin})") for name, value, origin in session.options.loading]
        session.status.table([*rows, *loading, *setting_rows(self._session)])

    def _left_out(self) -> str:
        count = self._session.conversation.first_sent
        return f", the first {count} no longer sent to the model" if count else ""

    def _stats(self, text: str) -> None:
        if not self._session.models.engine.stats.output_tokens:
            raise UsageError("there was no answer yet")
        self._session.status.statistics(self._session.models.engine.stats.to_json())

    def _map(self, text: str) -> None:
        self._session.status.expert_map(self._session.require_map())

    def _watch(self, text: str) -> None:
        session = self._session
        choice = text.lower()
        if choice not in ("", "on", "off"):
            raise UsageError(f"/watch {one_line(text)[:40]} is neither on nor off")
        wanted = choice == "on" if choice else not session.watching
        if wanted:
            session.require_map()
            if not session.view.animated:
                raise UsageError("the map needs a terminal that can move its cursor; /map prints it")
        session.watching = wanted
        self._say("the map is shown below each answer" if wanted else "the map is no longer shown")

    def _regen(self, text: str) -> None:
        if not self._session.conversation.turns:
            raise UsageError("there is no question to answer again")
        if not self._session.turn(self._session.conversation.turns[-1].question, replace_last=True):
            self._say("(the previous answer stays)")

    def _edit(self, text: str) -> None:
        if not self._session.conversation.turns:
            raise UsageError("there is no question to edit")
        before = self._session.conversation.turns[-1].question
        files = before.removesuffix(without_files(before))
        if not self._session.turn(files + text, replace_last=True):
            self._say("(the previous question and its answer stay)")

    def _copy(self, text: str) -> None:
        turns = self._session.conversation.turns
        if text not in ("", "code"):
            raise UsageError(f"/copy {one_line(text)[:40]}: it takes nothing, or code")
        if not turns:
            raise UsageError("there is no answer to copy yet")
        copied = turns[-1].answer.strip("\n") if not text else last_code_block(turns[-1].answer)
        if copied is None or not copied.strip():
            raise UsageError("the last answer has no block of code" if text else "the last answer is empty")
        how = copy_to_clipboard(copied)
        lines = copied.count("\n") + 1
        what = f"{len(copied):,} characters in {lines:,} line{'s'[: lines != 1]}"
        if how.program:
            self._say(f"copied: {what}")
        else:
            self._say(f"sent to the terminal's clipboard: {what}; some terminals ignore that")

    def _undo(self, text: str) -> None:
        turn = self._session.conversation.undo()
        if turn is None:
            raise UsageError("there is nothing to undo")
        self._session.changed()
        self._session.record()
        self._say(f"undone: {title_of(turn.question)}")

    def _save(self, text: str) -> None:
        path, conversation = path_of(unquoted(text)), self._session.conversation
        if not conversation.turns:
            raise UsageError("there is nothing to save yet")
        if self._saved_conversation is not conversation:
            self._saved, self._saved_conversation = set(), conversation
        content = write_as(conversation, format_of(path))
        self._saved.add(write_text(path, content, replaceable=self._saved))
        self._say(f"saved as {one_line(str(path))}")

    def _load(self, text: str) -> None:
        path = path_of(unquoted(text))
        loaded = read_from(read_text(path), str(path))
        stored = self._stored(loaded)
        self._session.use_conversation(stored or loaded)
        self._session.record()
        which = "the conversation" if stored is None else f"conversation {stored.key}"
        self._say(f"{one_line(str(path))}: {turns_of(loaded)}; {which} goes on from there")

    def _stored(self, loaded: Conversation) -> Conversation | None:
        """The conversation in the database that was saved as the loaded one, if there is one."""
        if self._session.sessions is None or not self._session.sessions.exists():
            return None
        from moechat.history.same_conversation import find_stored
        from moechat.history.session_database import Sessions

        try:
            with Sessions(self._session.sessions, existing=True) as sessions:
                return find_stored(sessions, loaded)
        except SessionsUnavailableError:  # recording it gives the reason
            return None

    def _read(self, text: str) -> None:
        session = self._session
        if not text:
            names = ", ".join(name for name, _ in session.files)
            self._say(f"with your next message: {names}" if names else "no file goes with your next message")
            return
        if not unquoted(text):
            self._say(f"no file goes with your next message{' any more' if session.files else ''}")
            session.files = []
            return
        (name, content), engine = read_named(unquoted(text)), session.models.engine
        tokens = len(engine.encode(content)) if content else 0
        if tokens >= engine.context_length:
            raise UsageError(
                f"{name} has {tokens:,} tokens; the context holds {engine.context_length:,}",
                hint="a part of it may fit; or load the model with a longer context (--ctx)",
            )
        session.files.append((name, content))
        lines = content.count("\n") + bool(content and not content.endswith("\n"))
        self._say(
            f"{name} goes with your next message: {lines:,} line{'s'[: lines != 1]}, "
            f"{session.status.size(len(content.encode()))}, {tokens:,} tokens"
        )

    def _rename(self, text: str) -> None:
        conversation = self._session.conversation
        title = title_of(unquoted(text))
        if not title:
            raise UsageError("/rename needs TITLE")
        conversation.title = title
        self._session.record()
        self._say(f"the conversation is called {title}")

    def _fork(self, text: str) -> None:
        session, original = self._session, self._session.conversation
        if not original.turns:
            raise UsageError("there is nothing to copy yet")
        copy = original.copy()
        session.use_conversation(copy)
        session.record()
        kept = "" if original.key is None else f"; number {original.key} stays as it is"
        where = "a copy" if copy.key is None else f"number {copy.key}, a copy"
        self._say(f"the conversation goes on as {where} ({turns_of(copy)}){kept}")

    def _sessions(self, text: str) -> None:
        session = self._session
        if session.sessions is None:
            raise UsageError(
                "this chat keeps no conversations and goes on with none", hint="start it without --no-save"
            )
        if text and not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS):
            raise UsageError(f"{one_line(text)} is no number", hint="/sessions lists conversations")
        from moechat.history.session_database import Sessions

        with Sessions(session.sessions, existing=True) as sessions:
            found = [] if text else sessions.summaries(limit=_LISTED)
            chosen = sessions.get(int(text)) if text else None
        if chosen is not None:
            if chosen.key == session.conversation.key:
                raise UsageError(f"this is conversation {chosen.key}")
            session.use_conversation(chosen)
            self._say(f"conversation {chosen.key} goes on: {one_line(chosen.title)} ({turns_of(chosen)})")
        elif found:
            now = session.conversation.key
            session.status.table(
                [(f"{'*' if line.key == now else ' '} {line.key}", format_summary(line)) for line in found]
            )
        else:
            self._say("no conversation is kept yet")

    def _model(self, text: str) -> None:
        self._session.changed()
        session = self._session
        try:
            options = session.models.use(unquoted(text))
        except KeyboardInterrupt:
            self._say(f"(stopped; {session.models.engine.name} stays)")
            return
        prompt_changed = options is not None and session.adopt(options)
        self._say(f"{session.models.engine.name} goes on with this conversation")
        if prompt_changed:
            session.record()
            now = session.conversation.system
            gone = "there is no system prompt any more"
            self._say(gone if now is None else f"the system prompt: {title_of(now)}")

    def _say(self, message: str) -> None:
        self._session.status.notice(message)
