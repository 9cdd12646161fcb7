"""Which model a name in a chat means: one of this machine, a preset, or one of another server."""

from __future__ import annotations

from dataclasses import replace

from moechat.chat.chat_options import ChatOptions
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.config.own_names import shadowed_model
from moechat.config import user_paths
from moechat.errors import ModelNotFoundError, MoechatError, NotInLibraryError
from moechat.hub.names import resolve


class ModelChoice:
    """Finds the options for names of models.

    Args:
        options: Of the command.

    Attributes:
        current: Options of the model that is in use.
    """

    def __init__(self, options: RunOptions) -> None:
        self._first = options
        self.current = options
        self.name = options.preset or options.model

    def options(self, name: str) -> RunOptions:
        """The options to load a model with.

        Without a mark, a name is first one of this machine. In a chat with another server it may be that of a
        model there.

        Raises:
            MoechatError: There is no such model, preset or server.
        """
        if name == self.name:
            return self._first
        found = self.current.for_model(name)
        if found.server is not None:
            return found
        try:
            resolve(found.model, bits=found.bits)
        except (ModelNotFoundError, NotInLibraryError):
            if self.current.server is None or found.preset:
                raise
            return replace(self.current, model=name)
        return found

    def is_remote(self, name: str) -> bool:
        """Whether a name means a model of another server; errors as of :meth:`options`."""
        return self.options(name).server is not None

    def use(self, name: str) -> ChatOptions:
        """Note that a model is in use; returns the options of a chat with it."""
        self.current = self.options(name)
        return self.current.chat


def preset_notice(options: RunOptions) -> str | None:
    """A sentence about a model that is hidden by the preset in use; ``None`` if there is none."""
    if not options.preset:
        return None
    try:
        other = shadowed_model(options.preset, user_paths())
    except MoechatError:
        return None
    if other is None:
        return None
    return f"{options.preset} is your preset for {options.model}; the library has a model of this name too"
