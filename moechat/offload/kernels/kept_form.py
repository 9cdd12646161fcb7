"""Kept encodings as the GPU kernels see them; see ``native/src/kernels/layout/kept_encodings.h``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from moechat import _native
from moechat.offload.kernels import triton_kept_codes as codes

_TABLES = {
    "none": codes.NO_TABLE,
    "iq4": codes.IQ4,
    "e2m1": codes.E2M1,
    "e4m3": codes.FP8,
}
_SCALES = {
    "halves": codes.HALVES,
    "mins": codes.MINS,
    "exponents": codes.EXPONENTS,
    "signed2": codes.SIGNED2,
    "signed4": codes.SIGNED4,
    "factors": codes.FACTORS,
    "nibbles": codes.NIBBLES,
    "floats": codes.FLOATS,
    "e4m3": codes.E4M3,
    "wholes": codes.WHOLES,
}
# Bits of the planes that codes are cut into, by the bits of a code.
_PLANES = {8: (8, 0), 6: (4, 2), 5: (4, 1), 4: (4, 0), 3: (2, 1), 2: (2, 0)}


def kept_constants(encoding: str) -> dict[str, Any]:
    """Compile-time parameters that tell a kernel the encoding of a dense matrix.

    Args:
        encoding: One of :func:`moechat._native.kept_encodings`.

    Raises:
        ValueError: The encoding is unknown.
    """
    form: dict[str, Any] = _native.kept_form(encoding)
    first, second = _PLANES[form["code_bits"]]
    return {
        "FIRST": first,
        "SECOND": second,
        "TABLE": _TABLES[form["table"]].value,
        "SUBS": form["subs"],
        "SCALES": _SCALES[form["words"]].value,
        # The values of tables are signed, so nothing is subtracted from them.
        "ZERO": 0 if form["values"] else form["zero"],
        "SUPERS": form["super_halves"],
        "SHARED": form["super_groups"],
    }


@cache
def value_table(device: torch.device) -> torch.Tensor:
    """float32 ``[16]`` on a device: the values of the codes of IQ4_NL and IQ4_XS."""
    return torch.tensor(_native.kept_form("iq4_nl")["values"], dtype=torch.float32, device=device)
