"""Finds a server of this user that has a model in memory, so that ``moechat run`` need not load it again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.terminal.consoles import print_notice
from moechat.config import user_paths
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat.chat.interfaces import ChatEngine
    from moechat.remote.server_engine import ServerEngine

# Seconds for a server that shuts down: it ends its answers, then frees the model.
_END_S = 15.0


def loaded_by_a_server(options: RunOptions) -> ServerEngine | None:
    """The engine of a server that has the model loaded with the same options; ``None`` if there is none.

    Options for loading that are not given may be what they are there.
    """
    if not (user_paths().state / "servers").is_dir():
        return None  # without the imports below
    from moechat import __version__
    from moechat.remote.server_engine import ServerEngine, ask_server
    from moechat.serve.registry import running_servers

    wanted = repr(resolve(options.model, bits=options.bits))
    given = options.load_options.given
    for server in running_servers():
        found = ask_server(server.socket) if server.socket else None
        # Another version may tell other things.
        if found is None or found.get("version") != __version__ or found["is"] != wanted:
            continue
        if any(found["options"].get(name) != value for name, value in given.items()):
            continue
        if options.verbose:
            print_notice(f"the server with the number {server.pid} has {found['name']} in memory and answers")
        return ServerEngine(server.socket, found)
    return None


def wait_for_its_end(engine: ChatEngine) -> None:
    """Wait until the server of an engine has ended: before that it still holds the memory of the model."""
    from moechat.remote.server_engine import ServerEngine
    from moechat.serve.registry import running_servers

    ends = time.monotonic() + _END_S
    while isinstance(engine, ServerEngine) and time.monotonic() < ends:
        if all(server.socket != engine.socket for server in running_servers()):
            return
        time.sleep(0.05)
