"""``moechat serve``: answers other programs over HTTP."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.commands.serve_arguments import ServeCommand
from moechat.cli.engine_import import import_engine
from moechat.cli.terminal.consoles import can_ask, print_notice
from moechat.errors import NotInLibraryError, UsageError
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat import Engine
    from moechat.serve.offered_models import OfferedPreset


def serve(options: ServeCommand) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    settings = options.with_history(options.with_key())
    if options.model is not None and not _is_here(options):
        from moechat.cli.commands.download import download_to_run

        if not download_to_run(
            options.model, options.load_options.given, yes=options.yes, quiet=options.quiet
        ):
            return NotInLibraryError.exit_code
    if options.verbose:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
        logging.getLogger("moechat.serve").setLevel(logging.INFO)
    import_engine()
    from moechat.serve.offered_models import OfferedModels
    from moechat.serve.private_socket import private_socket
    from moechat.serve.registry import registered, servers_directory
    from moechat.serve.server import Server

    load = {**options.load_options.given}
    load["conversations"] = max(options.parallel, options.load_options.conversations)

    def loaded(engine: Engine) -> None:
        if not options.quiet:
            print_notice(f"{engine.name} is ready, {engine.context_length} tokens of context")
            for notice in engine.notices():
                print_notice(notice)

    only = options.preset or options.model
    offered = OfferedModels(only, load, loaded, _presets(options))

    def ready() -> None:
        if not options.quiet:
            print_notice(f"listening on {server.url}/v1, page at {server.url}/; Ctrl-C ends the server")

    with private_socket(servers_directory()) as private:
        server = Server(settings, offered, only, private=private)
        path = "" if private is None else str(private.getsockname())
        with registered(server.url, only, path):
            server.run(ready)
    return 0


def _presets(options: ServeCommand) -> dict[str, OfferedPreset]:
    """The presets that clients may name: the one that is served, else all that are of this machine."""
    from moechat.serve.conversation import AnswerDefaults
    from moechat.serve.offered_models import OfferedPreset

    found = {}
    for name in (
        [options.preset] if options.preset else options.own.settings.presets if not options.model else ()
    ):
        try:
            preset = options.own.preset(name)
        except UsageError as error:
            print_notice(f"not offered: {error}")
            continue
        if preset is None or "remote" in preset.values:
            continue
        run = replace(RunOptions(model=preset.model), **preset.values)
        generation = run.settings
        defaults = AnswerDefaults(preset.system_prompt, generation.arguments, generation.template.values)
        # The options of the one that is served are those of the command already.
        load = {} if options.preset else preset.load_options
        found[name] = OfferedPreset(preset.model, load, defaults)
    return found


def _is_here(options: ServeCommand) -> bool:
    """Whether the model is in the library or a directory.

    Raises:
        NotInLibraryError: It would have to be downloaded, and there is nobody to ask.
    """
    assert options.model is not None
    try:
        resolve(options.model, bits=options.bits)
    except NotInLibraryError:
        if not options.yes and not can_ask():
            raise
        return False
    return True
