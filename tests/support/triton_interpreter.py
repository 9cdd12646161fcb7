"""Makes launches in Triton's interpreter cheaper."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def list_members_once(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter remember the built-in functions of Triton's language.

    It replaces them at every launch, and most of that time goes to listing all members of the modules anew.
    """
    triton = pytest.importorskip("triton")
    from triton.runtime import interpreter

    is_builtin = triton.language.core.is_builtin
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, *where: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, *where)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
