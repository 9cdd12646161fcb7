"""What the commands of the chat do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moechat.chat.commands import help_text, unquoted
from moechat.chat.conversation import Conversation, title_of, turns_of
from moechat.chat.files import Stamp, path_of, read_text, write_text
from moechat.chat.listing import listed
from moechat.chat.neutral import one_line
from moechat.chat.settings import MODELS_OWN, NAMES, setting_of
from moechat.chat.transcript import format_of, read_from, write_as
from moechat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moechat.chat.repl import Chat

# Of a list, the newest; `moechat sessions --limit 0` has them all.
_LISTED = 20
_DIGITS = 19  # SQLite's numbers end there


class Commands:
    """Does commands for a chat.

    Args:
        chat: Whose conversation and settings they change.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        # Files that this conversation was saved as; what nobody has changed since may grow with it.
        self._written: set[Stamp] = set()
        self._written_of = chat.conversation

    def do(self, name: str, text: str) -> bool:
        """Do a command; ``False`` when it says to leave.

        Args:
            name: That of one of ``COMMANDS``.
            text: Its arguments.

        Raises:
            MoechatError: It cannot be done; nothing has changed.
        """
        if name == "bye":
            return False
        action: Callable[[str], None] = getattr(self, f"_{name}")
        action(text)
        return True

    def _help(self, text: str) -> None:
        self._say(help_text())

    def _clear(self, text: str) -> None:
        chat = self._chat
        kept = chat.conversation.key
        chat.use_conversation(Conversation(system=chat.conversation.system))
        where = "" if kept is None else f"; it is kept as number {kept}"
        self._say(f"the conversation is forgotten{where}")

    def _system(self, text: str) -> None:
        conversation = self._chat.conversation
        if not text:
            now = conversation.system
            self._say("there is no system prompt" if now is None else f"the system prompt: {now}")
            return
        text = unquoted(text)
        conversation.system = text or None
        self._chat.changed()
        self._chat.record()
        self._say("the system prompt is set" if text else "there is no system prompt any more")

    def _set(self, text: str) -> None:
        if not text:
            self._chat.voice.table(self._settings())
            return
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name = setting_of(name)
        if not value.strip():
            raise UsageError(f"/set {name} needs a value", hint="'default' takes the model's own")
        self._chat.generation = self._chat.generation.with_text(name, value.strip())
        if name == "max_tokens":
            self._chat.changed()  # another answer leaves other turns room
        self._chat.voice.table([row for row in self._settings() if row[0] == name])

    def _settings(self) -> list[tuple[str, str]]:
        generation, sampling = self._chat.generation, self._chat.models.engine.sampling
        shown = {
            name: value
            for name in NAMES
            if name not in ("seed", "max_tokens") and (value := generation.value(name)) is not None
        }
        in_effect = sampling.override(**shown)
        unset = {"seed": "a fresh one each time", "max_tokens": "what the context holds"}
        rows = []
        for name in NAMES:
            chosen = generation.value(name)
            shown_value = getattr(in_effect, name, unset.get(name)) if chosen is None else chosen
            origin = generation.origin(name)
            # Cutting the distribution turns sampling on.
            moved = origin == MODELS_OWN and getattr(in_effect, name, None) != getattr(sampling, name, None)
            rows.append((name, f"{shown_value}  ({'follows from the others' if moved else origin})"))
        return rows

    def _show(self, text: str) -> None:
        chat, engine = self._chat, self._chat.models.engine
        facts: dict[str, Any] = engine.describe()
        used = chat.context_used()
        system = chat.conversation.system
        rows = [
            ("model", f"{engine.name} ({facts.get('model_type', '?')}, {facts.get('bits', '?')} bits)"),
            ("device", str(facts.get("device", "?"))),
            ("experts", str(facts.get("experts", "?"))),
            ("context", f"{'?' if used is None else f'{used:,}'} of {engine.context_length:,} tokens used"),
            ("turns", f"{len(chat.conversation.turns)}" + self._left_out()),
            ("conversation", "not saved" if chat.conversation.key is None else str(chat.conversation.key)),
            ("system prompt", "none" if system is None else title_of(system)),
        ]
        for key, title in (("memory_experts_bytes", "memory, experts"), ("memory_budget_bytes", "memory")):
            if isinstance(size := facts.get(key), int):
                rows.insert(2, (title, chat.voice.size(size)))
        loading = [(name, f"{value}  ({origin})") for name, value, origin in chat.options.loading]
        chat.voice.table([*rows, *loading, *self._settings()])

    def _left_out(self) -> str:
        count = self._chat.conversation.told_from
        return f", the first {count} no longer told to the model" if count else ""

    def _stats(self, text: str) -> None:
        if not self._chat.models.engine.stats.output_tokens:
            raise UsageError("there was no answer yet")
        self._chat.voice.statistics(self._chat.models.engine.stats.to_json())

    def _regen(self, text: str) -> None:
        if not self._chat.conversation.turns:
            raise UsageError("there is no question to answer again")
        if not self._chat.turn(self._chat.conversation.turns[-1].question, instead=True):
            self._say("(the answer before stays)")

    def _undo(self, text: str) -> None:
        turn = self._chat.conversation.take_back()
        if turn is None:
            raise UsageError("there is nothing to take back")
        self._chat.changed()
        self._chat.record()
        self._say(f"taken back: {title_of(turn.question)}")

    def _save(self, text: str) -> None:
        path, conversation = path_of(unquoted(text)), self._chat.conversation
        if not conversation.turns:
            raise UsageError("there is nothing to save yet")
        if self._written_of is not conversation:
            self._written, self._written_of = set(), conversation
        content = write_as(conversation, format_of(path))
        self._written.add(write_text(path, content, replaceable=self._written))
        self._say(f"saved as {one_line(str(path))}")

    def _load(self, text: str) -> None:
        path = path_of(unquoted(text))
        conversation = read_from(read_text(path), str(path))
        self._chat.use_conversation(conversation)
        self._chat.record()
        self._say(f"{one_line(str(path))}: {turns_of(conversation)}; the conversation goes on from there")

    def _read(self, text: str) -> None:
        chat = self._chat
        if not text:
            names = ", ".join(name for name, _ in chat.files)
            self._say(f"with your next message: {names}" if names else "no file goes with your next message")
            return
        if not unquoted(text):
            self._say(f"no file goes with your next message{' any more' if chat.files else ''}")
            chat.files = []
            return
        path = path_of(unquoted(text))
        content = read_text(path)
        name, engine = one_line(path.name), chat.models.engine
        tokens = len(engine.encode(content)) if content else 0
        if tokens >= engine.context_length:
            raise UsageError(
                f"{name} has {tokens:,} tokens; the context holds {engine.context_length:,}",
                hint="a part of it may fit; or load the model with a longer context (--ctx)",
            )
        chat.files.append((name, content))
        lines = content.count("\n") + bool(content and not content.endswith("\n"))
        self._say(
            f"{name} goes with your next message: {lines:,} line{'s'[: lines != 1]}, "
            f"{chat.voice.size(len(content.encode()))}, {tokens:,} tokens"
        )

    def _sessions(self, text: str) -> None:
        chat = self._chat
        if chat.sessions is None:
            raise UsageError(
                "this chat keeps no conversations and goes on with none", hint="start it without --no-save"
            )
        if text and not (text.isascii() and text.isdigit() and len(text) < _DIGITS):
            raise UsageError(f"{one_line(text)} is no number", hint="/sessions lists conversations")
        from moechat.chat.sessions import Sessions

        with Sessions(chat.sessions, existing=True) as sessions:
            found = [] if text else sessions.summaries(limit=_LISTED)
            chosen = sessions.get(int(text)) if text else None
        if chosen is not None:
            if chosen.key == chat.conversation.key:
                raise UsageError(f"this is conversation {chosen.key}")
            chat.use_conversation(chosen)
            self._say(f"conversation {chosen.key} goes on: {one_line(chosen.title)} ({turns_of(chosen)})")
        elif found:
            now = chat.conversation.key
            chat.voice.table(
                [(f"{'*' if line.key == now else ' '} {line.key}", listed(line)) for line in found]
            )
        else:
            self._say("no conversation is kept yet")

    def _model(self, text: str) -> None:
        self._chat.changed()
        try:
            self._chat.models.use(unquoted(text))
        except KeyboardInterrupt:
            self._say(f"(stopped; {self._chat.models.engine.name} stays)")
            return
        self._say(f"{self._chat.models.engine.name} goes on with this conversation")

    def _say(self, message: str) -> None:
        self._chat.voice.notice(message)
