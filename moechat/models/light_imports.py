"""Imports transformers without torch's compiler and its support for several machines.

transformers imports both to mark a few functions and to name a few types that moechat never uses; together
with hqq they took a third of the time from program start to first token. Here the compiler,
``torch._dynamo``, is replaced by a stand-in that only notes the marks. As soon as anything asks it for more,
such as ``torch.compile``, it loads the real compiler and passes the marks on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
# Has no need of the compiler around it; transformers computes masks with it.
_INDEPENDENT = f"{_COMPILER}._trace_wrapped_higher_order_op"


class CompilerStandIn(ModuleType):
    """``torch._dynamo`` until something needs more of it than marks on functions.

    Args:
        directory: Of the real package.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [str(directory)]
        self._in_graph: list[Any] = []
        self._finder = _SubmoduleFinder(self)

    def assume_constant_result(self, fn: Any) -> Any:
        """Mark a function as the compiler does."""
        fn._dynamo_marked_constant = True
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Note a function for the compiler."""
        self._in_graph.append(fn)
        return fn

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """A function that the compiler skips once it is loaded."""
        if fn is None:
            return lambda later: self.disable(later, recursive, **options)
        skipped: list[Callable[..., Any]] = []

        def call(*arguments: Any, **more: Any) -> Any:
            if sys.modules.get(_COMPILER) is self:
                return fn(*arguments, **more)
            if not skipped:
                skipped.append(sys.modules[_COMPILER].disable(fn, recursive, **options))
            return skipped[0](*arguments, **more)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{_COMPILER}.{name}" == _INDEPENDENT:
            raise AttributeError(name)
        return getattr(self.load(), name)

    def install(self) -> None:
        """Take the compiler's place."""
        sys.modules[_COMPILER] = self
        torch: Any = sys.modules["torch"]
        torch._dynamo = self
        sys.meta_path.insert(0, self._finder)

    def load(self) -> ModuleType:
        """Load the real compiler in this one's place."""
        if sys.modules.get(_COMPILER) is self:
            sys.meta_path.remove(self._finder)
            del sys.modules[_COMPILER]
            torch: Any = sys.modules["torch"]
            del torch._dynamo
            real: Any = importlib.import_module(_COMPILER)
            for fn in self._in_graph:
                real.allow_in_graph(fn)
        return sys.modules[_COMPILER]


class _SubmoduleFinder:
    """Loads the real compiler before any of its modules is imported."""

    def __init__(self, stand_in: CompilerStandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}.") or name == _INDEPENDENT:
            return None
        self._stand_in.load()
        return ModuleSpec(name, _Loaded()) if name in sys.modules else None


class _Loaded(Loader):
    """Gives a module that is loaded already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def light_transformers() -> Iterator[None]:
    """Import modules of transformers inside, as if hqq and support for several machines were not installed.

    transformers would import hqq for a quantised KV cache, and ``torch.distributed`` for sharded tensors;
    moechat uses neither. The checks are restored afterwards, and modules that were imported inside go on
    without them.
    """
    names: Any = importlib.import_module("transformers.utils")
    more: Any = importlib.import_module("transformers.utils.import_utils")
    checks = ("is_hqq_available", "is_torch_distributed_available")
    before = [
        (module, name, getattr(module, name))
        for module in (names, more)
        for name in checks
        if hasattr(module, name)
    ]
    torch: Any = importlib.import_module("torch")
    if _COMPILER not in sys.modules:
        CompilerStandIn(Path(torch.__file__).parent / "_dynamo").install()
    try:
        for module, name, _ in before:
            setattr(module, name, lambda *_: False)
        yield
    finally:
        for module, name, check in before:
            setattr(module, name, check)
