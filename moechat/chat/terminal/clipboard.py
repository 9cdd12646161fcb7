"""Copies text to the clipboard: by a program of the desktop, and by the terminal itself (OSC 52).

Over SSH the desktop's programs would reach the clipboard of the other machine, so the terminal alone is asked
there. No terminal answers whether it has copied, and some ignore the request.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from moechat.errors import MoechatError

# Bytes in base64 that terminals take: xterm's limit, which others have taken over.
MOST_OSC_BYTES = 100_000
_PROGRAM_S = 3.0
# Values of TERM; an empty one too.
_WITHOUT_CLIPBOARD = ("", "dumb", "linux")
_PROGRAMS = "wl-clipboard, xclip or xsel"


@dataclass(frozen=True)
class Copied:
    """How a text was copied.

    Attributes:
        program: The program that has taken it; empty if none did.
        terminal: The terminal was asked to take it.
    """

    program: str
    terminal: bool


def copy_to_clipboard(text: str, environment: Mapping[str, str] | None = None) -> Copied:
    """Copy a text.

    Args:
        text: Not empty.
        environment: Variables of the process; ``None`` takes those of this one.

    Raises:
        MoechatError: There is neither a program nor a terminal that could take it.
    """
    environment = os.environ if environment is None else environment
    program = next((command[0] for command in _commands(environment) if _run(command, text)), "")
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
    fits = len(encoded) <= MOST_OSC_BYTES
    has_clipboard = environment.get("TERM", "") not in _WITHOUT_CLIPBOARD
    terminal = fits and has_clipboard and _ask_terminal(encoded)
    if not program and not terminal:
        raise MoechatError(
            "the clipboard cannot be reached: there is no program for it, and "
            + ("this terminal has none" if fits else f"{len(text):,} characters are too many for a terminal"),
            hint=f"install {_PROGRAMS}, or use /save FILE",
        )
    return Copied(program, terminal)


def _commands(environment: Mapping[str, str]) -> list[list[str]]:
    """Programs that may take the text, in order."""
    found = []
    if environment.get("TMUX"):
        found.append(["tmux", "load-buffer", "-w", "-"])  # tmux passes it on to its terminal
    if not any(environment.get(name) for name in ("SSH_TTY", "SSH_CONNECTION")):
        if environment.get("WAYLAND_DISPLAY"):
            found.insert(0, ["wl-copy"])
        if environment.get("DISPLAY"):
            found[:0] = [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
        if environment.get("WSL_DISTRO_NAME"):
            found.append(["clip.exe"])
        found.append(["pbcopy"])
    path = environment.get("PATH")
    return [command for command in found if shutil.which(command[0], path=path) is not None]


def _run(command: list[str], text: str) -> bool:
    """Whether a program has taken the text. Some stay in the background, to hand it out."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROGRAM_S,
            start_new_session=True,  # Ctrl-C in the chat must not end the one that holds the text
            check=False,
        )
        return done.returncode == 0
    return False


def _ask_terminal(encoded: str) -> bool:
    """Send the text to the terminal, if there is one."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write(f"\x1b]52;c;{encoded}\x07")
            stream.flush()
            return True
    return False
