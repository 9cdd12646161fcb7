"""``moechat ps`` and ``moechat stop``: the servers of this user that run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer

from moechat.cli.parameters import Action, Json, Quiet, argument, flag
from moechat.errors import MoechatError, UsageError

_PS_HELP = """\
Show the servers (`moechat serve`) of this user that run.

--json: a list of objects with pid, url, model (that was named at the start), loaded (the model in memory), \
answers, waiting, seconds (since the start). null means that the server did not tell.
"""
_PS_EXAMPLES = "moechat ps\n"
_STOP_HELP = """\
End a server (`moechat serve`) of this user.

Answers under way end within a token, and their clients are told.
"""
_STOP_EXAMPLES = """\
moechat stop

moechat stop 12345

moechat stop --all
"""
_ANSWER_S = 2.0
_END_S = 15.0


def register_servers(app: typer.Typer) -> None:
    """Add the commands to the grammar."""

    @app.command("ps", help=_PS_HELP, epilog=_PS_EXAMPLES)
    def _ps(json: Json = False) -> Action:
        return lambda: show_servers(as_json=json)

    @app.command("stop", help=_STOP_HELP, epilog=_STOP_EXAMPLES)
    def _stop(
        pid: Annotated[
            int | None, argument("PID", "Of the server, as ps shows it; the only one if not given.")
        ] = None,
        all_: Annotated[bool, flag("End all of them.", "--all")] = False,
        quiet: Quiet = False,
    ) -> Action:
        return lambda: stop_servers(pid, every=all_, quiet=quiet)


def show_servers(*, as_json: bool) -> int:
    """Print the servers; returns the exit status."""
    from moechat.cli.terminal.consoles import print_notice, write_json_line, write_output
    from moechat.serve.registry import running_servers

    rows, shown = [], []
    for server in running_servers():
        told = _health(server.url)
        shown.append(shown_model(server.model, told))
        rows.append(
            {
                "pid": server.pid,
                "url": server.url,
                "model": server.model or None,
                "loaded": told.get("model"),
                "answers": told.get("answers"),
                "waiting": told.get("waiting"),
                "seconds": round(time.time() - server.started),
            }
        )
    if as_json:
        write_json_line(sys.stdout, rows)
        return 0
    if not rows:
        print_notice("no server runs; moechat serve starts one")
        return 0
    for row, model in zip(rows, shown, strict=True):
        busy = ""
        if row["answers"] is not None:
            busy = f"{row['answers']} being answered, {row['waiting']} waiting"
        write_output(sys.stdout, f"{row['pid']:<8} {row['url']}  {model}  {busy}\n")
    return 0


def stop_servers(pid: int | None, *, every: bool, quiet: bool) -> int:
    """End servers, and wait until they have ended.

    Returns:
        The exit status.

    Raises:
        UsageError: There is none, or several and none was named.
        MoechatError: One does not end.
    """
    from moechat.cli.terminal.consoles import print_notice
    from moechat.serve.registry import running_servers

    servers = running_servers()
    if pid is not None and every:
        raise UsageError("PID and --all exclude each other")
    chosen = [server for server in servers if pid in (None, server.pid)]
    names = ", ".join(f"{server.pid} ({server.url})" for server in servers)
    if not chosen:
        if pid is None:
            raise UsageError("no server runs", hint="moechat serve starts one")
        raise UsageError(f"{pid} is no server that runs", hint=f"there are: {names}" if servers else None)
    if len(chosen) > 1 and not every:
        raise UsageError(f"{len(chosen)} servers run", hint=f"name one: {names}; or --all")
    for server in chosen:
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
    ends = time.monotonic() + _END_S
    for server in chosen:
        while server.lives:
            if time.monotonic() > ends:
                raise MoechatError(
                    f"the server {server.pid} does not end", hint=f"kill -KILL {server.pid} ends it at once"
                )
            time.sleep(0.05)
        if not quiet:
            print_notice(f"{server.url} has ended")
    return 0


def shown_model(named: str, told: Mapping[str, Any]) -> str:
    """The model of a server, for people.

    Args:
        named: The one that was named at the start; empty: none.
        told: What the server tells of itself; empty if it does not answer.
    """
    if told.get("model"):
        return str(told["model"])
    loading = told.get("loading")
    if isinstance(loading, dict) and loading.get("model"):
        return f"{loading['model']} (is being loaded)"
    if not named:
        return "no model loaded"
    return f"{named} (not loaded)" if "model" in told else named


def _health(url: str) -> dict[str, Any]:
    """What a server tells about itself; empty if it does not answer."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_ANSWER_S) as answer:
            found = json.loads(answer.read(1 << 16))
    except urllib.error.HTTPError as error:  # 503 while it loads
        with suppress(ValueError, OSError):
            found = json.loads(error.read(1 << 16))
            return found if isinstance(found, dict) else {}
        return {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
