"""Transcripts of chats on a pseudo-terminal: a session with the demo, and the first run of a model."""

from __future__ import annotations

from stage import Stage
from terminal_support import EDITOR_ENDS, Terminal

_PASTE = "\x1b[200~{}\x1b[201~"
_CLEAR = "\x15"  # Ctrl-U


def session(stage: Stage) -> None:
    """A chat with the demo on a terminal, then its continuation."""
    with stage.terminal("moechat", "run", "demo", "--seed", "1") as chat:
        chat.wait_prompt()
        stage.seen(chat, "started", "demo: /help for help, Ctrl-D to leave", "0 of 1,024 tokens")
        _begin(chat, "Tell me a story about a fox.", 40)
        stage.seen(
            chat, "Tell me a story about a fox. ⏎, while the answer comes", ">>> Tell me a story about a fox."
        )
        chat.wait_prompt()
        stage.seen(chat, "... and when it is complete", ">>> Tell me a story about a fox.")
        for line, *says in (
            ("Who are you?", "of 1,024 tokens"),
            ("/show", "demo", "context", "temperature"),
            ("/set temperature 0", "temperature"),
            ("/tell me", "there is no command /tell; it was not sent"),
            ("/stats", "time to first token", "tokens per second"),
        ):
            chat.enter(line)
            stage.seen(chat, f"{line} ⏎", *says)
        _begin(chat, "Tell me a story about a dog and a ball.", 60)
        chat.type("\x03", "(stopped; what was written is kept)")
        chat.wait_prompt()
        stage.seen(
            chat,
            "Tell me a story about a dog and a ball. ⏎, then Ctrl-C",
            "(stopped; what was written is kept)",
        )
        for line, *says in (
            ("/regen", "of 1,024 tokens"),
            ("/undo", "undone: Tell me a story about a dog"),
            ("/save talk.md", "saved as"),
        ):
            chat.enter(line)
            stage.seen(chat, f"{line} ⏎", *says)
        stage.left(chat, "\x04", "Ctrl-D")
    stage.command("cat talk.md", "Who are you?")

    (stage.work / "notes of today.txt").write_text("The fox is named Ada.\n")
    with stage.terminal("moechat", "run", "demo", "-c", "--seed", "1") as chat:
        chat.wait_prompt()
        stage.seen(chat, "started", "conversation 1 goes on: Tell me a story about a fox. (2 turns)")
        chat.type(_PASTE.format("My fox is red.\rMy dog is big.\rWho is big?"), "... Who is big?")
        stage.seen(chat, "three lines are pasted", "... My dog is big. ... Who is big?")
        chat.enter()
        stage.seen(chat, "⏎", "of 1,024 tokens")
        chat.type("/und", "take the last question")
        stage.seen(chat, "/und", "/undo")
        chat.type("\t", ">>> /undo")
        stage.seen(chat, "Tab", ">>> /undo")
        chat.type(f"{_CLEAR}/read no", " notes of today.txt")
        chat.type("\t", ">>> /read notes of today.txt")
        stage.seen(chat, "Ctrl-U, /read no, Tab", ">>> /read notes of today.txt")
        chat.enter()
        stage.seen(chat, "⏎", "goes with your next message", "+1 file")
        stage.left(chat, "/bye\r", "/bye ⏎")
    stage.command("moechat sessions", "Tell me a story about a fox.", "3")
    shown = stage.command("moechat sessions show 1 --all", "Who is big?")
    stage.record.check("stopped" in shown.out, "the partial answer is kept with its mark")


def _begin(chat: Terminal, line: str, characters: int) -> None:
    """Send a question; wait until so much of the answer has been written."""
    chat.enter(line, whole=False)
    taken = chat.written.rindex(EDITOR_ENDS)
    chat.until(lambda: len(chat.written) > taken + len(EDITOR_ENDS) + characters)


def first_run(stage: Stage) -> None:
    """A model of the hub that is not here: what it takes, a no, then a yes that ends in the chat."""
    from local_hub import REPOSITORY, hub_with_model

    with hub_with_model(stage) as (_hub, stage):
        with stage.terminal("moechat", "run", REPOSITORY) as terminal:
            terminal.wait("[Y/n]")
            stage.seen(
                terminal, "started", "download 2.2 MiB", "disk", "time", "Download and convert it now? [Y/n]"
            )
            stage.left(terminal, "n\r", "n ⏎", status=3)
            stage.seen(terminal, "n ⏎", "nothing was downloaded")
        kept = stage.command("find ~ -type f -size +0 | sort")
        stage.record.check("safetensors" not in kept.out, "nothing of the model was kept")

        with stage.terminal("moechat", "run", REPOSITORY) as terminal:
            terminal.wait("[Y/n]")
            terminal.type("y\r")
            terminal.wait_prompt()
            stage.seen(terminal, "y ⏎", "is here after ", "Ctrl-D to leave")
            terminal.enter("/set max_tokens 30")
            terminal.enter("hello")
            stage.seen(terminal, "hello ⏎ (the model is random, and so is what it says)", ">>> hello")
            stage.left(terminal, "\x04", "Ctrl-D")
        stage.command("moechat list", REPOSITORY)
