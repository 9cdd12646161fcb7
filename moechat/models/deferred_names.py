"""Imports transformers without reading the source of all its models.

At its import transformers reads thousands of files to find out which names its models export; that took a
quarter of the time from program start to first token. A module that names its imports by their full path,
``transformers.models.auto.configuration_auto``, needs no such list. Here the list of ``transformers`` and of
``transformers.models`` is made when something first needs it, by transformers' own function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "transformers"
_IMPORTS = f"{_PACKAGE}.utils.import_utils"
# Files of transformers that it imports with "from . import": after the error for a missing name the import
# system looks for them.
_FILES = frozenset({"initialization"})
_NEEDED = ("_LazyModule", "define_import_structure")

# For each set of requirements: names by module.
Structure = dict[frozenset[str], dict[str, set[str]]]


class LaterNames(dict[frozenset[str], dict[str, set[str]]]):
    """The names that models export, before their files are read; holds only those that are added to it.

    Args:
        read: Reads the files.
    """

    def __init__(self, read: Callable[[], Structure]) -> None:
        super().__init__({frozenset(): {}})
        self._read = read

    def read(self) -> Structure:
        """All names: those of the files, and those that were added."""
        found = {needs: dict(names) for needs, names in self._read().items()}
        for needs, names in self.items():
            found.setdefault(needs, {}).update(names)
        return found

    def module_of(self, name: str) -> str | None:
        """The module of a name that was added, or the name itself if it is a module's."""
        for module, names in self[frozenset()].items():
            if name in names or name == module:
                return module
        return None


def defer_names() -> None:
    """Let ``transformers`` make its lists of names later, unless it is imported already."""
    if _PACKAGE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Prepares the module with transformers' functions for lazy imports, once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _IMPORTS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PreparingLoader(spec.loader)
        return spec


class _PreparingLoader(Loader):
    """Loads a module with its own loader, then prepares it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        if all(hasattr(module, name) for name in _NEEDED):
            _prepare(module)


def _prepare(imports: Any) -> None:
    """Replace the two parts of lazy imports by equal ones, of which one defers and the other completes."""
    own = imports.define_import_structure
    models = Path(imports.__file__).parent.parent / "models"

    @wraps(own)
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if Path(module_path) in (models, models / "__init__.py"):
            return LaterNames(lambda: own(module_path, prefix))
        return own(module_path, prefix)

    imports.define_import_structure = define_import_structure
    imports._LazyModule = _completing(imports._LazyModule)


def _completing(own: Any) -> Any:
    """The class of lazy modules, for lists of names that may be made later."""

    class _LazyModule(own):  # type: ignore[misc]
        def __init__(
            self, name: str, module_file: str, import_structure: Any, *rest: Any, **named: Any
        ) -> None:
            if not isinstance(import_structure, LaterNames):
                super().__init__(name, module_file, import_structure, *rest, **named)
                return
            # What the import system needs; all else is asked for through __getattr__.
            ModuleType.__init__(self, name)
            self.__file__ = module_file
            self.__spec__ = named.get("module_spec")
            self.__path__ = [str(Path(module_file).parent)]
            self._later = (name, module_file, import_structure, rest, named)

        def __getattr__(self, name: str) -> Any:
            later = vars(self).get("_later")
            if later is None:
                return super().__getattr__(name)
            extra = later[4].get("extra_objects") or {}
            if name in extra:
                return extra[name]
            if name in _FILES or (name.startswith("__") and name != "__all__"):
                raise AttributeError(f"module {self.__name__} has no attribute {name}")
            module = later[2].module_of(name)
            if module is not None:
                try:
                    found = importlib.import_module(f".{module}", self.__name__)
                    value = found if module == name else getattr(found, name)
                except Exception:  # transformers has other ways and messages of its own
                    pass
                else:
                    setattr(self, name, value)
                    return value
            self._complete()
            return getattr(self, name)

        def __dir__(self) -> Any:
            if "_later" in vars(self):
                self._complete()
            return super().__dir__()

        def _complete(self) -> None:
            name, module_file, names, rest, named = self._later
            super().__init__(name, module_file, names.read(), *rest, **named)
            del self._later

    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(_LazyModule, name, getattr(own, name))
    return _LazyModule
