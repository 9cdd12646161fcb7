"""The models that a server offers, by the names that clients give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moechat.config import user_paths
from moechat.errors import ModelNotFoundError, MoechatError, UsageError, one_line
from moechat.hub.library import display_names, list_stores
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat import Engine, Progress

_DEMO = "demo"
# Clients that know no other name send it.
_ANY = ("", "default")


class OfferedModels:
    """One model, or all of the library.

    Args:
        only: The one model, as the user named it; ``None``: all of the library and the demo.
        options: Keyword arguments of ``moechat.load``.
        loaded: Called with each model that is loaded.
    """

    def __init__(
        self, only: str | None, options: dict[str, Any], loaded: Callable[[Engine], None] = lambda _: None
    ) -> None:
        self._only = only
        self._shown = "" if only is None else resolve(only, bits=options.get("bits")).name
        self._options = options
        self._loaded = loaded

    def names(self) -> list[str]:
        """Names for clients, the first one first."""
        if self._only is not None:
            return [self._shown]
        return sorted({_DEMO, *display_names(list_stores(user_paths()))})

    def resolve(self, name: str) -> str:
        """The name that a model is loaded by.

        Clients cannot name directories or models that would have to be downloaded.

        Raises:
            ModelNotFoundError: The server does not offer it.
        """
        if self._only is not None:
            if name in (*_ANY, self._only, self._shown):
                return self._only
        else:
            names = self.names()
            if name in names:
                return name
            if name in _ANY:
                raise ModelNotFoundError("the request names no model", hint=f"there are {', '.join(names)}")
        raise ModelNotFoundError(
            f"there is no model {one_line(name, 80)} here", hint=f"there are {', '.join(self.names())}"
        )

    def load(self, name: str, progress: Callable[[str, float], None]) -> Engine:
        """Load a model; see :class:`moechat.serve.worker.Loader`."""
        import moechat

        def report(state: Progress) -> None:
            share = state.done / state.total if state.total else 0.0
            progress(state.detail or state.stage, min(1.0, share))

        try:
            engine = moechat.load(name, progress=report, **self._options)
        except UsageError as error:
            # Wrong options of the server are no fault of the client.
            raise MoechatError(str(error), hint=error.hint) from error
        self._loaded(engine)
        return engine
