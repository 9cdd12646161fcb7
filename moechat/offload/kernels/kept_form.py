"""Kept encodings as the GPU kernels see them; see ``native/src/kernels/layout/kept_encodings.h``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from moechat import _native
from moechat.offload.kernels import triton_kept_codes as codes
from moechat.offload.kernels.triton_kept_grids import TABLE_DWORDS, grid_place

_TABLES = {
    "none": codes.NO_TABLE,
    "iq4": codes.IQ4,
    "e2m1": codes.E2M1,
    "e4m3": codes.FP8,
    "grid": codes.NO_TABLE,  # what kernels make of a grid's numbers are codes as they are
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
_GRIDS = {
    "iq2_xxs": codes.IQ2_XXS,
    "iq2_xs": codes.IQ2_XS,
    "iq2_s": codes.IQ2_S,
    "iq3_xxs": codes.IQ3_XXS,
    "iq3_s": codes.IQ3_S,
    "iq1_s": codes.IQ1_S,
    "iq1_m": codes.IQ1_M,
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
    grid = _GRIDS.get(encoding)
    first, second = _PLANES[form["code_bits"] if grid is None else 8]
    return {
        "FIRST": first,
        "SECOND": second,
        "TABLE": _TABLES[form["table"]].value,
        "SUBS": form["subs"],
        "SCALES": (_SCALES[form["words"]] if grid is None else grid).value,
        # The values of tables are signed, so nothing is subtracted from them.
        "ZERO": 0 if form["values"] else form["zero"],
        "SUPERS": form["super_halves"],
        "SHARED": form["super_groups"],
    }


@cache
def value_table(device: torch.device) -> torch.Tensor:
    """float32 ``[TABLE_DWORDS]`` on a device, what kernels look codes up in: the 16 values of IQ4_NL and
    IQ4_XS, then the grids of the other encodings, whose dwords are patterns of four codes, not numbers.
    """
    table = torch.zeros(TABLE_DWORDS, dtype=torch.float32)
    table[:16] = torch.tensor(_native.kept_form("iq4_nl")["values"])
    for encoding, scales in _GRIDS.items():
        dwords = torch.from_numpy(_native.kept_grid(encoding).view(np.int32)).flatten()
        place = grid_place(scales.value)
        table.view(torch.int32)[place : place + len(dwords)] = dwords
    return table.to(device)
