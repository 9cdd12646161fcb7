"""AWQ in the order ``gemm``: 4 bits, zeros, scales for groups of input columns.

A word of ``qweight [columns, rows / 8]`` holds eight rows in the order 0, 2, 4, 6, 1, 3, 5, 7, the first in
the lowest bits. A weight is (code - zero) times its scale: exact in float32, rounded once to the type of the
scales, as AutoAWQ's ``dequantize_gemm`` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import UnsupportedModelError
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.kept_rows import integer_encodings
from moechat.store.quantised.modules import do_not_fit, find_modules, group_columns, grouping
from moechat.store.quantised.number_formats import as_float32, fields
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found, PackedWeight, Parts
from moechat.store.tensors import TensorSet

_BITS = 4
_IN_WORD = 32 // _BITS
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows in a word


def title(settings: Settings) -> str:
    """The format, for people."""
    return f"AWQ, {_BITS} bits, {grouping(group_columns(settings))}"


def find(tensors: TensorSet, settings: Settings) -> Found:
    """The AWQ weights of a checkpoint.

    Raises:
        CheckpointError: A setting is malformed.
        UnsupportedModelError: Another number of bits, or another order.
    """
    bits = settings.number("bits", settings.number("w_bit", _BITS))
    version = str(settings.content.get("version") or settings.content.get("format") or "gemm").lower()
    if bits != _BITS or version != "gemm":
        raise UnsupportedModelError(
            f"{settings.where}: AWQ of {bits} bits in the order {version[:40]!r}; moechat reads {_BITS} bits "
            "in the order 'gemm'",
            hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
        )
    return find_modules(tensors, settings, _weight)


def _weight(tensors: TensorSet, name: str, parts: dict[str, str], settings: Settings) -> PackedWeight:
    parts.pop("g_idx", None)
    (columns, width), zeros, grid = (tensors.info(parts[role])[1] for role in ("qweight", "qzeros", "scales"))
    rows, group = width * _IN_WORD, group_columns(settings) or columns
    if columns % group or grid != (columns // group, rows) or zeros != (columns // group, width):
        raise do_not_fit(tensors, name, parts, title(settings))

    def unpack(found: Parts) -> Codes:
        scales = as_float32(found["scales"].values, found["scales"].dtype)
        zero = _rows_in_order(found["qzeros"].values).astype(np.float32)
        codes = _rows_in_order(found["qweight"].values)
        return Codes("affine", _BITS, codes.T, scales.T, (1, group), zero.T)

    scale_type = tensors.info(parts["scales"])[0]
    visible = settings.dtype if scale_type == "F32" else scale_type
    kept, dense = integer_encodings(_BITS, group, columns, scale_type, symmetric=False)
    return PackedWeight(name, visible, (rows, columns), parts, unpack, title(settings), kept, dense)


def _rows_in_order(words: NDArray[Any]) -> NDArray[np.uint8]:
    unpacked = fields(words, _BITS).reshape(len(words), -1, _IN_WORD)
    return unpacked[:, :, _POSITIONS].reshape(len(words), -1)
