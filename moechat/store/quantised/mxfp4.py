"""MXFP4 of gpt-oss: ``_blocks`` ``[experts, rows, groups, 16]`` and ``_scales`` ``[experts, rows, groups]``.

A byte holds two e2m1 elements, the low half first; a group of 32 columns has an e8m0 exponent (Open Compute
Project, Microscaling Formats 1.0). The names say it all, so no configuration is needed. Rows are those of a
linear layer, also where the model's parameter is transposed.
"""

from __future__ import annotations

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised import kept_rows
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.fp4 import MXFP4, MXFP4_COLUMNS
from moechat.store.quantised.number_formats import as_float32, nibbles
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found, PackedWeight, Parts
from moechat.store.tensors import TensorSet

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = MXFP4_COLUMNS // 2


def title(_settings: Settings) -> str:
    """The format, for people."""
    return MXFP4


def find(tensors: TensorSet, _settings: Settings | None) -> Found:
    """The MXFP4 weights of a checkpoint."""
    found = Found()
    for stored in tensors:
        name = stored.removesuffix(_BLOCKS)
        if name == stored:
            continue
        try:
            found.add(_weight(tensors, name, {"codes": stored, "scale": name + _SCALES}))
        except (CheckpointError, UnsupportedModelError) as problem:
            found.problems[name] = problem
            found.hidden.add(stored)
    return found


def _weight(tensors: TensorSet, name: str, parts: dict[str, str]) -> PackedWeight:
    codes, scale = parts["codes"], parts["scale"]
    where = tensors.file_of(codes).path
    if scale not in tensors:
        raise CheckpointError(
            f"{where}: tensor {codes!r} has no scales {scale!r}",
            hint="take a complete copy of the checkpoint",
        )
    for part in parts.values():
        kind = tensors.info(part)[0]
        if kind != "U8":
            raise UnsupportedModelError(f"{where}: tensor {part!r} is {kind}; MXFP4 needs U8")
    blocks, grid = tensors.info(codes)[1], tensors.info(scale)[1]
    if len(blocks) not in (3, 4) or 0 in blocks or blocks[-1] != _BYTES or grid != blocks[:-1]:
        raise CheckpointError(
            f"{where}: {codes!r} {list(blocks)} and {scale!r} {list(grid)} are no pair of MXFP4: groups have "
            f"{_BYTES} bytes and a scale"
        )
    rows, groups = grid[-2:]

    def unpack(found: Parts) -> Codes:
        packed = found["codes"].values.reshape(rows, groups * _BYTES)
        numbers = as_float32(found["scale"].values, found["scale"].dtype)
        return Codes("e2m1", 4, nibbles(packed), numbers, (1, MXFP4_COLUMNS))

    shape = (*grid[:-1], groups * MXFP4_COLUMNS)
    return PackedWeight(name, "BF16", shape, parts, unpack, MXFP4, kept_rows.MXFP4, rows_first=True)
