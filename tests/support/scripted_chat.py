"""A chat in its own process, for a pseudo-terminal: the real chat over a scripted model.

Usage: ``python scripted_chat.py JSON``: answers, pause_s, options of the chat, save, layers of a map.
"""

from __future__ import annotations

import itertools
import json
import sys

from chat_support import OneModel, ScriptedEngine

from moechat.chat.chat_options import ChatOptions
from moechat.chat.repl import Chat
from moechat.chat.session_recorder import resume_conversation
from moechat.cli.commands.chat_backend import StderrStatus
from moechat.cli.main import Terminated, end_on_signals
from moechat.history.session_database import sessions_path


class ChangingMap:
    """A map of experts, another one each time."""

    def __init__(self, layers: int) -> None:
        self.layers = tuple(range(layers))
        self._turn = itertools.count()

    @property
    def places(self) -> tuple[str, ...]:
        moved = next(self._turn) % 3
        return tuple(("mp." * 8)[moved : moved + 16] for _ in self.layers)


def main() -> int:
    script = json.loads(sys.argv[1])
    end_on_signals()
    engine = ScriptedEngine(
        script["answers"],
        pause_s=script.get("pause_s", 0),
        prompt_s=script.get("prompt_s", 0),
        context_length=1000,
        finish_reason="stop",
    )
    if layers := script.get("layers"):
        engine.map = ChangingMap(layers)
    options = ChatOptions(**script.get("options", {}))
    path = sessions_path() if script.get("save") else None
    status_output = StderrStatus()
    going_on = (
        None
        if path is None
        else resume_conversation(path, options, engine.name, lambda text, _: status_output.notice(text))
    )
    try:
        status = Chat(OneModel(engine), options, status_output, conversation=going_on, sessions=path).run()
    except Terminated as ended:
        status = ended.status
    assert "torch" not in sys.modules
    return status


if __name__ == "__main__":
    sys.exit(main())
