"""Modules that take the place of large ones until these are really needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module that loads the real one when something asks for more than it has itself.

    Args:
        name: Of the real module.
        path: Directories of the real module's modules.
        independent: Modules below it that can be imported without it.
    """

    def __init__(
        self, name: str, path: Sequence[str] = (), independent: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(name)
        self.__path__ = list(path)
        self._independent = independent
        self._finder = _SubmoduleFinder(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{self.__name__}.{name}" in self._independent:
            raise AttributeError(name)
        return getattr(self.load(), name)

    @property
    def is_installed(self) -> bool:
        """Whether it is in the real module's place."""
        return sys.modules.get(self.__name__) is self

    def install(self) -> None:
        """Take the real module's place."""
        parent, _, name = self.__name__.rpartition(".")
        sys.modules[self.__name__] = self
        if parent:
            setattr(sys.modules[parent], name, self)
        sys.meta_path.insert(0, self._finder)

    def remove(self) -> None:
        """Leave the real module's place, which the real one takes at its next import."""
        parent, _, name = self.__name__.rpartition(".")
        if self.is_installed:
            sys.meta_path.remove(self._finder)
            del sys.modules[self.__name__]
            if parent:
                delattr(sys.modules[parent], name)

    def load(self) -> ModuleType:
        """Load the real module in this one's place."""
        if self.is_installed:
            self.remove()
            self.loaded(importlib.import_module(self.__name__))
        return importlib.import_module(self.__name__)

    def loaded(self, real: Any) -> None:
        """Called once with the real module when this one has loaded it."""

    def needs(self, name: str) -> bool:
        """Whether a module is below the real one and needs it."""
        return name.startswith(f"{self.__name__}.") and name not in self._independent


class _SubmoduleFinder:
    """Loads a real module before any module below it is imported."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._stand_in.needs(name):
            return None
        self._stand_in.load()
        # Loading the real module has often imported this one too. The import system would execute it once
        # more, if it found it among the modules.
        loaded = sys.modules.pop(name, None)
        return None if loaded is None else ModuleSpec(name, _Loaded(loaded))


class _Loaded(Loader):
    """Gives a module that is loaded already.

    Args:
        module: That module.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
