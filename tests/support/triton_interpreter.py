"""Makes Triton's interpreter faster: what is the same for every launch and operation is done once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Launches take about half the time meanwhile.

    The interpreter's language stays in place between launches, numpy's types are looked up once, and sums of
    32-bit integers are not computed a second time in 64 bits, as they are to see whether they overflow: the
    tensors of the tests are far too small for that.
    """
    triton = pytest.importorskip("triton")
    from triton.runtime import interpreter

    language, builder = triton.language, interpreter.interpreter_builder
    scopes: dict[frozenset[int], Any] = {}
    put_in_place, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    found: dict[Any, Any] = {}

    class Stays:
        def restore(self) -> None:
            """Nothing: the next launch needs the same."""

    def put_in_place_once(kernel: Any) -> Stays:
        modules = frozenset(map(id, kernel.__globals__.values())) & {id(language), id(language.core)}
        if modules not in scopes:
            scopes[modules] = put_in_place(kernel)
        return Stays()

    def numpy_type_once(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        if isinstance(element, language.pointer_type):
            return numpy_type(element)
        if element not in found:
            found[element] = numpy_type(element)
        return found[element]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", put_in_place_once)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        try:
            yield
        finally:
            for scope in reversed(scopes.values()):
                scope.restore()
