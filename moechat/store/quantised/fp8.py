"""FP8: weights as e4m3 with float scales, for blocks, rows or the whole matrix.

``quant_method`` is ``fp8`` (DeepSeek, Qwen, GLM, MiniMax; ``weight_scale_inv`` for each block of 128 x 128,
of which those at the edges may be smaller) or ``fbgemm_fp8`` (``weight_scale`` for each row). A weight is the
value of its code times its scale in float32, rounded once to the type of the model; so do transformers
(``dequantize=True``) and DeepSeek's ``weight_dequant``. Scales are float32, bf16, fp16, or e8m0 exponents.
DeepSeek-V4 stores experts beside them as e2m1, two in a byte of ``I8``, with an e8m0 scale for 32 columns.
"""

from __future__ import annotations

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.fp4 import mxfp4_weight
from moechat.store.quantised.kept_rows import FP8, WIDE
from moechat.store.quantised.number_formats import as_float32
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found, PackedWeight, Parts, matrix_shape
from moechat.store.tensors import TensorSet

SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
# What the scale of a tensor is called, after the tensor's name.
_SUFFIXES = ("_scale_inv", "_scale")
# What it is called in a module, beside ``weight``: by DeepSeek-V4 and by Mistral Large 4.
_SIBLINGS = ("scale", "qscale_weight")
_USUAL_BLOCK = (128, 128)


def title(settings: Settings) -> str:
    """The format, for people."""
    block = settings.sizes("weight_block_size")
    if settings.method == "fbgemm_fp8":
        return "FP8 with a scale for each row"
    experts = ", experts in MXFP4" if settings.content.get("expert_dtype") == "fp4" else ""
    return "FP8" + (f" in blocks of {block[0]} x {block[1]}" if block else "") + experts


def find(tensors: TensorSet, settings: Settings) -> Found:
    """The FP8 weights of a checkpoint.

    Raises:
        CheckpointError: A setting is malformed.
    """
    block = settings.sizes("weight_block_size")
    found = Found()
    for name in tensors:
        dtype, shape = tensors.info(name)
        is_fp4 = dtype == "I8" and name.endswith(".weight") and len(shape) >= 2
        if not (dtype.startswith("F8_E") and dtype != "F8_E8M0") and not is_fp4:
            continue
        if name.endswith(_SUFFIXES):
            continue
        scale = scale_of(tensors, name)
        if is_fp4 and scale is None:
            continue
        try:
            if is_fp4 and scale is not None:
                found.add(mxfp4_weight(tensors, name, {"codes": name, "scale": scale}, settings.dtype))
            else:
                found.add(fp8_weight(tensors, name, scale, block, settings.dtype))
        except (CheckpointError, UnsupportedModelError) as problem:
            found.problems[name] = problem
    return found


def scale_of(tensors: TensorSet, name: str) -> str | None:
    """Name of the scale of a weight; ``None`` if it has none."""
    stem = name.removesuffix(".weight")
    candidates = [name + suffix for suffix in _SUFFIXES]
    candidates += [f"{stem}.{sibling}" for sibling in _SIBLINGS if stem != name]
    return next((candidate for candidate in candidates if candidate in tensors), None)


def fp8_weight(
    tensors: TensorSet, name: str, scale: str | None, block: tuple[int, int] | None, dtype: str
) -> PackedWeight:
    """One FP8 weight.

    Args:
        tensors: The stored tensors.
        name: The weight.
        scale: Its scale.
        block: Rows and columns of a block; ``None``: scales are for rows or the whole matrix.
        dtype: Type that the weight appears as.

    Raises:
        CheckpointError: It has no scale, or one of another shape or type.
        UnsupportedModelError: Its number format is not e4m3.
    """
    where = tensors.file_of(name).path
    kind, shape = tensors.info(name)
    if kind != "F8_E4M3":
        raise UnsupportedModelError(f"{where}: tensor {name!r} is {kind}; of FP8 moechat reads F8_E4M3")
    if scale is None:
        raise CheckpointError(
            f"{where}: tensor {name!r} is FP8 and has no scale: no tensor {name + _SUFFIXES[0]!r} or "
            f"{name + _SUFFIXES[1]!r}",
            hint="take a complete copy of the checkpoint",
        )
    matrix_shape(tensors, name)
    scale_type, grid = tensors.info(scale)
    if scale_type not in SCALE_TYPES or (scale_type == "U8" and block is None):
        raise CheckpointError(
            f"{where}: scale {scale!r} is {scale_type}, not one of {', '.join(SCALE_TYPES)}"
        )
    group = block or _group_of(shape, grid) or _USUAL_BLOCK
    if not _covers(shape, grid, group):
        usual = _grids(shape, _USUAL_BLOCK)[:1]
        expected = _grids(shape, block)[:1] if block else [*_grids(shape, None), *usual]
        raise CheckpointError(
            f"{where}: scale {scale!r} has shape {list(grid)}; for {name!r} {list(shape)} "
            + (f"in blocks of {block[0]} x {block[1]} " if block else "")
            + f"it would be {' or '.join(str(list(one)) for one in expected)}",
            hint="config.json and tensors contradict each other: take both from the same repository",
        )
    rows, columns = shape[-2:]
    fits = (min(group[0], rows), min(group[1], columns))
    label = f"FP8 in blocks of {group[0]} x {group[1]}"
    if group == (rows, columns):
        label = "FP8 with one scale"
    elif group == (1, columns):
        label = "FP8 with a scale for each row"

    def unpack(parts: Parts) -> Codes:
        codes, scales = parts["codes"], parts["scale"]
        numbers = as_float32(scales.values, scales.dtype)
        counts = (-(-rows // fits[0]), -(-columns // fits[1]))
        return Codes("e4m3", 8, codes.values, numbers.reshape(counts), fits)

    whole = columns % WIDE == 0 and (fits[1] % WIDE == 0 or fits[1] == columns)
    parts = {"codes": name, "scale": scale}
    return PackedWeight(name, dtype, shape, parts, unpack, label, dense_encoding=FP8 if whole else None)


def _group_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where no block size is stated."""
    rows, columns = shape[-2:]
    inner = grid[1:] if len(shape) == 3 and len(grid) > 1 and grid[0] == shape[0] else grid
    if len(shape) == 3 and grid == (shape[0],):
        return rows, columns
    if inner in ((), (1,), (1, 1)):
        return rows, columns
    return (1, columns) if inner in ((rows,), (rows, 1)) else None


def _covers(shape: tuple[int, ...], grid: tuple[int, ...], group: tuple[int, int]) -> bool:
    """Whether a grid of scales has one for each group."""
    return grid in _grids(shape, group) or (group[1] >= shape[-1] and _group_of(shape, grid) == group)


def _grids(shape: tuple[int, ...], block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """Shapes that the scales of a weight can have."""
    *experts, rows, columns = shape
    if block is None:
        return [(*experts, rows, 1), tuple(experts) or (1,)]
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    return [(*experts, high, wide), (*experts, high, 1, wide, 1)]  # the second: of ModelOpt
