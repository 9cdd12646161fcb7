"""A notice of a newer version, for who has asked for it: the setting ``update-check``, off by default.

Once a day a process of its own asks the package index, so that no command waits for the network or fails
because of it. What it finds is shown at the end of a later command.
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

URL = "https://pypi.org/pypi/moechat/json"
_TIMEOUT_S = 2.0
_DAY_S = 86400.0
_MOST_BYTES = 16 << 20
_STATE = "update.json"
_RELEASE = re.compile(r"\d{1,6}(?:\.\d{1,6}){0,3}", re.ASCII)
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
        [sys.executable, "-m", __name__, URL, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def look(url: str, path: Path) -> None:
    """Ask the package index for the newest release, and keep it.

    Args:
        url: Of the package's JSON.
        path: Of the file to keep it in.

    Raises:
        OSError: The index cannot be reached within the time, or the file cannot be written.
        ValueError: It answers something else.
    """
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": f"moechat/{__version__}"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        version = json.loads(response.read(_MOST_BYTES))["info"]["version"]
    if not isinstance(version, str) or not _RELEASE.fullmatch(version):
        raise ValueError("no release")
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
        look(sys.argv[1], Path(sys.argv[2]))
