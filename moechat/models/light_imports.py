"""Imports transformers without torch's compiler, its support for several machines, and lists of all models.

transformers imports both to mark a few functions and to name a few types that moechat never uses; together
with hqq they took a third of the time from program start to first token. Here the compiler,
``torch._dynamo``, is replaced by a stand-in that only notes marks. As soon as anything asks it for more,
such as ``torch.compile``, it loads the real compiler and passes the marks on. For the lists see
:mod:`moechat.models.deferred_names`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moechat.models.deferred_names import defer_names
from moechat.models.stand_in import StandIn

_COMPILER = "torch._dynamo"
# Has no need of the compiler around it; transformers computes masks with it.
_INDEPENDENT = f"{_COMPILER}._trace_wrapped_higher_order_op"


class CompilerStandIn(StandIn):
    """``torch._dynamo`` until something needs more of it than marks on functions and tensors.

    Args:
        directory: Of the real package.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(_COMPILER, [str(directory)], frozenset({_INDEPENDENT}))
        self._in_graph: list[Any] = []

    def assume_constant_result(self, fn: Any) -> Any:
        """Mark a function as the compiler does."""
        fn._dynamo_marked_constant = True
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Note a function for the compiler."""
        self._in_graph.append(fn)
        return fn

    def mark_static_address(self, t: Any, guard: bool = False) -> None:
        """Mark a tensor as the compiler does; states of linear attention and convolutions are marked so."""
        t._dynamo_static_input_type = "guarded" if guard else "unguarded"

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

    def loaded(self, real: Any) -> None:
        """Pass the marks on."""
        for fn in self._in_graph:
            real.allow_in_graph(fn)


@contextmanager
def light_transformers() -> Iterator[None]:
    """Import modules of transformers inside, as if hqq, flex attention and support for several machines were
    not installed.

    transformers would import hqq for a quantised KV cache, flex attention for its masks, which needs sympy
    since torch 2.15, and ``torch.distributed`` for sharded tensors; moechat uses none of them. The checks are
    restored afterwards, and modules that were imported inside go on without them.
    """
    defer_names()
    names: Any = importlib.import_module("transformers.utils")
    more: Any = importlib.import_module("transformers.utils.import_utils")
    checks = ("is_hqq_available", "is_torch_distributed_available", "is_torch_flex_attn_available")
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
