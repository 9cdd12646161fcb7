"""Kept encodings as the GPU kernels see them; see ``native/src/kernels/layout/kept_encodings.h``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from moechat import _native
from moechat.offload.kernels import triton_kept

_TABLES = {"none": triton_kept.NO_TABLE, "iq4": triton_kept.IQ4, "e2m1": triton_kept.E2M1}
_WORDS = {
    "halves": triton_kept.HALVES,
    "mins": triton_kept.MINS,
    "exponents": triton_kept.EXPONENTS,
    "signed2": triton_kept.SIGNED2,
    "signed4": triton_kept.SIGNED4,
    "factors": triton_kept.FACTORS,
    "nibbles": triton_kept.NIBBLES,
}
# Bits of the planes that codes are cut into, by the bits of a code.
_PLANES = {8: (8, 0), 6: (4, 2), 5: (4, 1), 4: (4, 0), 3: (2, 1), 2: (2, 0)}
# Values of the codes of IQ4_NL and IQ4_XS (llama.cpp, ggml-common.h).
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def kept_constants(encoding: str, *, shared: bool = True) -> dict[str, Any]:
    """Compile-time parameters that tell a kernel an encoding.

    Args:
        encoding: One of :func:`moechat._native.kept_encodings`.
        shared: Blocks of 256 columns share super scales; not in down projections.

    Raises:
        ValueError: The encoding is unknown.
    """
    form: dict[str, Any] = _native.kept_form(encoding)
    first, second = _PLANES[form["code_bits"]]
    table = _TABLES[form["table"]]
    return {
        "FIRST": first,
        "SECOND": second,
        "TABLE": table,
        "SUBS": form["subs"],
        "SCALES": _WORDS[form["words"]],
        # Tables here have signed values, so nothing is subtracted from them.
        "ZERO": form["zero"] if table == triton_kept.NO_TABLE else 0,
        "SHARED": form["super_groups"] if shared else 1,
    }


@cache
def value_table(device: torch.device) -> torch.Tensor:
    """float32 ``[16]`` on a device: the values of IQ4 codes."""
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=device)
