"""Progress reports of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConvertProgress:
    """One report of a conversion.

    Attributes:
        stage: ``waiting`` (another process converts the same model), ``checking`` (files of an interrupted
            run), ``files``, ``dense``, ``experts`` or ``finishing``; or ``notice``, whose
            ``detail`` is a remark for the user and whose sizes mean nothing.
        done_bytes: Bytes of the store that are finished, those of earlier runs included.
        total_bytes: Bytes of the whole store.
        detail: The current item, for display: ``layer 3, expert 17 of 64``.
    """

    stage: str
    done_bytes: int
    total_bytes: int
    detail: str


ProgressCallback = Callable[[ConvertProgress], None]
