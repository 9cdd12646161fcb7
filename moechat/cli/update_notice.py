"""A notice of a newer version, for who has asked for it: the setting ``update-check``, off by default.

Once a day a process of its own asks pip, and pip asks the package index that it is set to. So no command
waits for the network or fails because of it. What is found is shown at the end of a later command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moechat import __version__
from moechat.cli.config.settings_file import FILE, UPDATE_CHECK, read_settings, variable_of
from moechat.config import user_paths

_TIMEOUT_S = 30.0
_DAY_S = 86400.0
_STATE = "update.json"
_RELEASE = re.compile(r"\d{1,6}(?:\.\d{1,6}){0,3}", re.ASCII)
# The first line of `pip index versions`: name (newest release).
_NEWEST = re.compile(r"moechat \(([^)\s]+)\)")
_TRUE = ("1", "true", "yes", "on")


def announce(environment: Mapping[str, str] | None = None) -> None:
    """Show a newer version that was found, once, and look for one if that was a day ago. Never fails.

    REQUIRES: stderr is a terminal.

    Args:
        environment: Variables of the process; ``None`` takes those of this one.
    """
    with suppress(Exception):
        environment = os.environ if environment is None else environment
        if not _is_wanted(environment):
            return
        path = user_paths(environment).cache / _STATE
        state = _read(path)
        latest = state.get("latest", "")
        if latest and not state.get("shown") and _is_newer(latest):
            from moechat.cli.terminal.consoles import print_notice

            print_notice(
                f"moechat {latest} is there, this is {__version__}; `moechat config unset {UPDATE_CHECK}` "
                "ends these notices"
            )
            state["shown"] = True
            _write(path, state)
        asked = state.get("asked", 0.0)
        if not 0 <= time.time() - asked < _DAY_S:
            _write(path, {**state, "asked": time.time()})  # first: one process a day, also of many commands
            _start(path)


def _is_wanted(environment: Mapping[str, str]) -> bool:
    if environment.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return False
    variable = environment.get(variable_of(UPDATE_CHECK), "")
    if variable:
        return variable.lower() in _TRUE
    paths = user_paths(environment)
    return (paths.config / FILE).exists() and read_settings(paths).general.get(UPDATE_CHECK) is True


def _start(path: Path) -> None:
    """Start the process that asks; it outlives this one, and has no terminal."""
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def look(path: Path) -> None:
    """Ask pip for the newest release, and keep it.

    Args:
        path: Of the file to keep it in.

    Raises:
        OSError: The file cannot be written.
        subprocess.SubprocessError: pip is not there, takes too long, or finds no release.
        ValueError: pip answers something else.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "0"]
    done = subprocess.run(
        [*command, "index", "versions", "moechat"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_TIMEOUT_S,
        check=True,
    )
    found = _NEWEST.match(done.stdout)
    if found is None or not _RELEASE.fullmatch(found[1]):
        raise ValueError("no release")
    version = found[1]
    state = _read(path)
    shown = state.get("shown", False) and state.get("latest") == version
    _write(path, {**state, "latest": version, "shown": shown})


def _is_newer(version: str) -> bool:
    if not _RELEASE.fullmatch(version) or not _RELEASE.match(__version__):
        return False
    mine = _RELEASE.match(__version__)
    assert mine is not None
    return _numbers(version) > _numbers(mine[0])


def _numbers(version: str) -> tuple[int, ...]:
    found = [int(part) for part in version.split(".")]
    return (*found, *[0] * (4 - len(found)))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    kinds = {"latest": str, "shown": bool, "asked": float}
    return {name: found[name] for name, kind in kinds.items() if isinstance(found.get(name), kind)}


def _write(path: Path, state: dict[str, Any]) -> None:
    from moechat.atomic_file import replacing

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(state).encode())


if __name__ == "__main__":
    with suppress(Exception):  # the next day tries again
        look(Path(sys.argv[1]))
