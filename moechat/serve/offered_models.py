"""The models that a server offers, by the names that clients give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moechat.config import user_paths
from moechat.errors import ModelNotFoundError, MoechatError, UsageError, one_line
from moechat.hub.library import display_names, list_stores
from moechat.hub.names import resolve
from moechat.serve.conversation import AnswerDefaults

if TYPE_CHECKING:
    from moechat import Engine, Progress

_DEMO = "demo"
# Clients that know no other name send it.
_ANY = ("", "default")


@dataclass(frozen=True)
class OfferedPreset:
    """A model under a name of the user's, with settings.

    Attributes:
        model: Name of the model.
        load: Keyword arguments of ``moechat.load``, beside those of the server.
        defaults: What its answers have where a client asks for nothing else.
    """

    model: str
    load: Mapping[str, Any]
    defaults: AnswerDefaults


class OfferedModels:
    """One model, or all of the library.

    Args:
        only: The one model or preset, as the user named it; ``None``: all of the library, the demo, and all
            presets.
        options: Keyword arguments of ``moechat.load``.
        ready: Called with each model that was loaded, once requests for it are answered.
        presets: The user's presets by name.
    """

    def __init__(
        self,
        only: str | None,
        options: dict[str, Any],
        ready: Callable[[Engine], None] = lambda _: None,
        presets: Mapping[str, OfferedPreset] | None = None,
    ) -> None:
        self._only = only
        self._presets = presets or {}
        self._options = options
        self._shown = "" if only is None or only in self._presets else self._name_of(only)
        self._ready = ready

    def names(self) -> list[str]:
        """Names for clients, the first one first."""
        if self._only is not None:
            return [self._shown or self._only]
        return sorted({_DEMO, *display_names(list_stores(user_paths())), *self._presets})

    def defaults(self, name: str) -> AnswerDefaults:
        """What the answers of a model have where a client asks for nothing else."""
        try:
            preset = self._presets.get(self.resolve(name))
        except MoechatError:  # told when the request is begun
            preset = None
        return AnswerDefaults() if preset is None else preset.defaults

    def loading(self, name: str) -> tuple[str, dict[str, Any]]:
        """The model behind a result of :meth:`resolve`, and the keyword arguments that it is loaded with."""
        preset = self._presets.get(name)
        return (name, self._options) if preset is None else (preset.model, {**self._options, **preset.load})

    def _name_of(self, model: str) -> str:
        return resolve(model, bits=self._options.get("bits")).name

    def resolve(self, name: str) -> str:
        """The name that a model is loaded by.

        Clients cannot name directories or models that would have to be downloaded.

        Raises:
            ModelNotFoundError: The server does not offer it.
        """
        if self._only is not None:
            if name in (*_ANY, self._only, self._shown):
                return self._only
            preset = self._presets.get(self._only)
            if preset is not None and name in (preset.model, self._name_of(preset.model)):
                return self._only  # as answers name it
        else:
            names = self.names()
            if name in names:
                return name
            if name in _ANY:
                fact = (
                    f"{name} is the model of moechat serve MODEL, and this server was started without MODEL"
                    if name
                    else "the request names no model"
                )
                raise ModelNotFoundError(fact, hint=_listed(names))
        raise ModelNotFoundError(f"there is no model {one_line(name, 80)} here", hint=_listed(self.names()))

    def load(self, name: str, progress: Callable[[str, float], None]) -> Engine:
        """Load a model; see :class:`moechat.serve.worker.Loader`."""
        import moechat

        def report(state: Progress) -> None:
            share = state.done / state.total if state.total else 0.0
            progress(state.detail or state.stage, min(1.0, share))

        try:
            model, options = self.loading(name)
            engine = moechat.load(model, progress=report, **options)
        except UsageError as error:
            # Wrong options of the server are no fault of the client.
            raise MoechatError(str(error), hint=error.hint) from error
        return engine

    def note_ready(self, engine: Engine) -> None:
        """Tell that requests for a model are answered."""
        self._ready(engine)


def _listed(names: Sequence[str]) -> str:
    return f"there is only {names[0]}" if len(names) == 1 else f"there are {', '.join(names)}"
