"""GPTQ: 2, 4 or 8 bits, zeros, scales for groups of input columns, which activation order may rearrange.

A word of ``qweight [columns * bits / 32, rows]`` holds neighbouring columns of a row, the first in the lowest
bits; ``g_idx`` names the group of each column. The format ``gptq`` (version 1) stores zeros less one, modulo
the range of a code; ``gptq_v2`` stores them as they are. A weight is (code - zero) times its scale: exact in
float32, rounded once to the type of the scales, as GPTQModel does.
"""

from __future__ import annotations

import numpy as np

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.kept_rows import integer_encodings
from moechat.store.quantised.modules import do_not_fit, find_modules, group_columns, grouping
from moechat.store.quantised.number_formats import as_float32, fields
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found, PackedWeight, Parts
from moechat.store.tensors import TensorSet

_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def title(settings: Settings) -> str:
    """The format, for people."""
    return _title(settings.number("bits", 4), group_columns(settings))


def find(tensors: TensorSet, settings: Settings) -> Found:
    """The GPTQ weights of a checkpoint.

    Raises:
        CheckpointError: A setting is malformed.
        UnsupportedModelError: Another number of bits, or another format.
    """
    bits = settings.number("bits", 4)
    if bits not in _BITS or _format(settings) not in _FORMATS:
        raise UnsupportedModelError(
            f"{settings.where}: GPTQ of {bits} bits in the format {_format(settings)[:40]!r}; moechat reads "
            f"{', '.join(map(str, _BITS))} bits in the formats {' and '.join(_FORMATS)}",
            hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
        )
    return find_modules(tensors, settings, _weight)


def _format(settings: Settings) -> str:
    content = settings.content
    return str(content.get("checkpoint_format") or content.get("format") or "gptq").lower()


def _title(bits: int, columns: int) -> str:
    return f"GPTQ, {bits} bits, {grouping(columns)}"


def _weight(tensors: TensorSet, name: str, parts: dict[str, str], settings: Settings) -> PackedWeight:
    (height, rows), zeros, grid = (tensors.info(parts[role])[1] for role in ("qweight", "qzeros", "scales"))
    bits, group = settings.number("bits", 4), group_columns(settings)
    if "g_idx" in parts:
        columns = tensors.info(parts["g_idx"])[1][0]
        if settings.content.get("dynamic") and columns and grid[0]:  # bits and groups differ by module
            bits, group = height * 32 // columns, -(-columns // grid[0])
    elif settings.content.get("desc_act"):
        raise CheckpointError(
            f"{tensors.file_of(parts['qweight']).path}: tensor {parts['qweight']!r} has no g_idx, and "
            f"{settings.where} says desc_act: true"
        )
    elif settings.content.get("dynamic") and group:
        columns = grid[0] * group
        bits = height * 32 // columns if columns else bits
    else:
        columns = height * 32 // bits
    label, size = _title(bits, group), group or columns
    groups = -(-columns // size) if size else 0
    fits = bits in _BITS and height * 32 == columns * bits and grid == (groups, rows)
    if not fits or zeros != (groups, rows * bits // 32) or rows * bits % 32:
        raise do_not_fit(tensors, name, parts, label)
    is_first = _format(settings) == "gptq"

    def unpack(found: Parts) -> Codes:
        scales = as_float32(found["scales"].values, found["scales"].dtype)
        zero = fields(found["qzeros"].values, bits).astype(np.float32)
        if is_first:
            zero = (zero + 1) % np.float32(1 << bits)
        codes = fields(found["qweight"].values.T, bits)
        order = None
        if "g_idx" in found:
            order = found["g_idx"].values.astype(np.intp)
            if order.min() < 0 or order.max() >= groups:
                raise ValueError(f"{found['g_idx'].name!r} names groups beyond the {groups} of the scales")
            if np.array_equal(order, np.arange(columns) // size):
                order = None
        return Codes("affine", bits, codes, scales.T, (1, size), zero.T, order)

    scale_type = tensors.info(parts["scales"])[0]
    visible = settings.dtype if scale_type == "F32" else scale_type
    kept = dense = None
    if not settings.content.get("desc_act"):
        symmetric = settings.content.get("sym") is True
        kept, dense = integer_encodings(bits, size, columns, scale_type, symmetric=symmetric)
    return PackedWeight(name, visible, (rows, columns), parts, unpack, label, kept, dense)
