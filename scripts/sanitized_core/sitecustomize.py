"""Imported when Python starts: the native core is the one that ``scripts/sanitize --python`` has built."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

_NAME = "moechat._native"


class _Core:
    """Finds the native core before the installed one."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where the native core is; ``None`` for all other modules."""
        del path, target
        if name != _NAME:
            return None
        file = os.environ["SANITIZED_CORE"]
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


if "SANITIZED_CORE" in os.environ:
    sys.meta_path.insert(0, _Core)
