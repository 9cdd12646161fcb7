"""ModelOpt (NVIDIA TensorRT Model Optimizer): NVFP4 and FP8.

The settings are in ``config.json`` or ``hf_quant_config.json``. NVFP4 weights are ``weight`` (U8),
``weight_scale`` (e4m3 for each 16 columns) and ``weight_scale_2`` (float32), which multiply; FP8 weights have
``weight_scale`` for the matrix, each row, or each block. Scales of activations and of the attention cache
(``input_scale``, ``k_scale``, ``v_scale``) are not used: moechat does not quantise those.
"""

from __future__ import annotations

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised.fp4 import NVFP4, NVFP4_COLUMNS, nvfp4_weight
from moechat.store.quantised.fp8 import fp8_weight
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found
from moechat.store.tensors import TensorSet

_TITLES = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8 with a scale for each row",
    "FP8_PB_WO": "FP8 in blocks of 128 x 128",
    "MIXED_PRECISION": "NVFP4 and FP8",
}
_SCALES = ("_scale", "_weight_scale")


def title(settings: Settings) -> str:
    """The format, for people."""
    return _TITLES.get(_algorithm(settings), "ModelOpt")


def find(tensors: TensorSet, settings: Settings) -> Found:
    """The quantised weights of a checkpoint.

    Raises:
        CheckpointError: The settings are malformed.
        UnsupportedModelError: The algorithm is not read.
    """
    algorithm = _algorithm(settings)
    if algorithm not in _TITLES:
        raise UnsupportedModelError(
            f"{settings.where}: quant_algo is {algorithm[:80]!r}; of ModelOpt moechat reads "
            f"{', '.join(_TITLES)}",
            hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
        )
    size = settings.content.get("group_size")
    if _TITLES[algorithm] == NVFP4 and size not in (None, NVFP4_COLUMNS):
        raise settings.wrong(f"group_size is {str(size)[:80]}; NVFP4 has blocks of {NVFP4_COLUMNS}")
    found = Found()
    for name in tensors:
        kind = tensors.info(name)[0]
        if kind not in ("U8", "F8_E4M3", "F8_E5M2") or name.endswith(("_scale", "_scale_2")):
            continue
        scale = next((name + suffix for suffix in _SCALES if name + suffix in tensors), name + _SCALES[0])
        if kind == "U8" and scale not in tensors and not name.endswith(".weight"):
            continue
        try:
            _require_unscaled_inputs(tensors, name)
            if kind == "U8":
                parts = {"codes": name, "scale": scale, "global": f"{scale}_2"}
                found.add(nvfp4_weight(tensors, name, parts, settings.dtype, divides=False))
            else:
                block = (128, 128) if algorithm == "FP8_PB_WO" else None
                known = scale if scale in tensors else None
                found.add(fp8_weight(tensors, name, known, block, settings.dtype))
        except (CheckpointError, UnsupportedModelError) as problem:
            found.problems[name] = problem
    return found


def _algorithm(settings: Settings) -> str:
    algorithm = settings.content.get("quant_algo")
    if not isinstance(algorithm, str):
        raise settings.wrong("its quantisation names no quant_algo")
    return algorithm.upper()


def _require_unscaled_inputs(tensors: TensorSet, name: str) -> None:
    """Check that a weight is not one of those whose inputs are scaled first (AWQ)."""
    scale = f"{name.removesuffix('.weight')}.pre_quant_scale"
    if scale in tensors:
        raise UnsupportedModelError(
            f"{tensors.file_of(name).path}: the inputs of {name!r} are scaled by {scale!r}, and moechat "
            "does not scale inputs"
        )
