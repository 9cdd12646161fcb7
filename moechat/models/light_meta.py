"""Computes on the meta device without sympy.

torch's Python functions for the meta device also serve its compiler, whose sizes can be formulas of sympy.
They import it to ask whether a size is one; for the plain numbers here the answer is known without it, and
its import took a tenth of the time from program start to first token.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from importlib.machinery import PathFinder
from operator import and_, or_
from typing import Any

from moechat.models.stand_in import StandIn

# Held inside light_meta(), since it changes what belongs to the whole process: modules, torch's settings, and
# its default element type, which transformers changes while it builds a model and sets back to what it found.
_ONE_THREAD = threading.RLock()
_SYMPY = "sympy"
_SHAPES = "torch.fx.experimental.symbolic_shapes"


class _OfSympy(type):
    """Its classes have the instances of sympy's class of the same name; without sympy there are none."""

    def __instancecheck__(cls, instance: Any) -> bool:
        real = sys.modules.get(_SYMPY)
        return real is not None and not isinstance(real, Sympy) and isinstance(instance, real.Basic)


class Sympy(StandIn):
    """``sympy``, of which torch's functions for the meta device use one class."""

    class Basic(metaclass=_OfSympy):
        """For ``isinstance`` only."""


class Shapes(StandIn):
    """``torch.fx.experimental.symbolic_shapes``, for sizes that are plain numbers.

    All other arguments are passed on to the real functions.
    """

    def expect_true(self, a: Any, *rest: Any, **named: Any) -> Any:
        """``a`` itself if it is a plain bool, and so for the next functions."""
        return a if type(a) is bool else self.load().expect_true(a, *rest, **named)

    def guard_or_false(self, a: Any) -> Any:
        return a if type(a) is bool else self.load().guard_or_false(a)

    def guard_or_true(self, a: Any) -> Any:
        return a if type(a) is bool else self.load().guard_or_true(a)

    def guard_size_oblivious(self, expr: Any) -> Any:
        return expr if type(expr) is bool else self.load().guard_size_oblivious(expr)

    def statically_known_true(self, x: Any) -> Any:
        return x if type(x) is bool else self.load().statically_known_true(x)

    def is_nested_int(self, s: Any) -> Any:
        """Never a plain number."""
        return False if type(s) is int else self.load().is_nested_int(s)

    def guarding_hint_or_throw(self, a: Any, *rest: Any, **named: Any) -> Any:
        """The plain number itself."""
        plain = type(a) in (int, bool) and not rest and not named
        return a if plain else self.load().guarding_hint_or_throw(a, *rest, **named)

    def has_guarding_hint(self, a: Any) -> Any:
        """Plain numbers have one: themselves."""
        return True if type(a) in (int, bool, float) else self.load().has_guarding_hint(a)

    def sym_and(self, x: Any, *others: Any) -> Any:
        """Both or all of several bools."""
        plain = all(type(each) is bool for each in (x, *others))
        return reduce(and_, others, x) if plain else self.load().sym_and(x, *others)

    def sym_or(self, x: Any, *others: Any) -> Any:
        """One or more of several bools."""
        plain = all(type(each) is bool for each in (x, *others))
        return reduce(or_, others, x) if plain else self.load().sym_or(x, *others)

    def sym_eq(self, x: Any, y: Any) -> Any:
        """Whether two plain sizes, or all of two shapes, are equal."""
        if isinstance(x, tuple | list) and isinstance(y, tuple | list):
            plain = all(type(each) is int for each in (*x, *y))
            return list(x) == list(y) if plain else self.load().sym_eq(x, y)
        return x == y if type(x) is type(y) is int else self.load().sym_eq(x, y)


@contextmanager
def light_meta() -> Iterator[None]:
    """Compute on the meta device inside; sympy is imported only where it is really needed.

    Contents are not known there; ``nonzero`` finds as many elements as there can be. One thread at a time.
    """
    settings: Any = importlib.import_module("torch.fx.experimental._config")
    with _ONE_THREAD, ExitStack() as undo:
        undo.enter_context(settings.patch(meta_nonzero_assume_all_nonzero=True))
        # A program that has loaded them already saves nothing, and must see only one of each.
        if _SYMPY not in sys.modules and _SHAPES not in sys.modules:
            spec = PathFinder.find_spec(_SYMPY)
            path = None if spec is None else spec.submodule_search_locations
            if path is not None:
                for stand_in in (Sympy(_SYMPY, path), Shapes(_SHAPES)):
                    stand_in.install()
                    undo.callback(stand_in.remove)
        yield
