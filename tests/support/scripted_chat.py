"""A chat in a process of its own, for a pseudo-terminal: the real one but for the model.

Usage: ``python scripted_chat.py JSON``: answers, pause_s, options of the chat, save.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chat_support import OneModel, ScriptedEngine

from moechat.chat.recorder import resumed
from moechat.chat.repl import Chat
from moechat.chat.sessions import sessions_path
from moechat.chat.settings import ChatOptions
from moechat.cli.main import Terminated, end_on_signals
from moechat.cli.voice import ConsoleVoice


def main() -> int:
    told = json.loads(sys.argv[1])
    end_on_signals()
    engine = ScriptedEngine(
        told["answers"],
        pause_s=told.get("pause_s", 0),
        prompt_s=told.get("prompt_s", 0),
        context_length=1000,
        finish_reason="stop",
    )
    options = ChatOptions(**told.get("options", {}))
    path = sessions_path() if told.get("save") else None
    voice = ConsoleVoice()
    going_on = (
        None if path is None else resumed(path, options, engine.name, lambda text, _: voice.notice(text))
    )
    try:
        status = Chat(OneModel(engine), options, voice, conversation=going_on, sessions=path).run()
    except Terminated as ended:
        status = ended.status
    assert "torch" not in sys.modules
    return status


if __name__ == "__main__":
    sys.exit(main())
