"""compressed-tensors, as llm-compressor and vLLM write it.

A tensor says by its type and the names of its parts which of the formats it is in (``pack-quantized``,
``int-quantized``, ``float-quantized``, ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``); ``config_groups``
say how many bits it has and what shares a scale. Sparse weights are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised.fp4 import MXFP4, NVFP4, mxfp4_weight, nvfp4_weight
from moechat.store.quantised.fp8 import fp8_weight
from moechat.store.quantised.integers import IntegerFormat, integer_weight
from moechat.store.quantised.settings import Settings, is_positive
from moechat.store.quantised.weights import Found, PackedWeight
from moechat.store.tensors import TensorSet

_PACKED = "_packed"
_SPARSE = ("dense", None)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True)
class _Group:
    """One of ``config_groups``.

    Attributes:
        targets: Names, patterns (``re:…``) or classes of modules.
        bits: Bits of a weight.
        is_float: Weights are floats, else integers.
        strategy: What shares a scale, one of ``_STRATEGIES``.
        columns: Columns of a group; 0 if the strategy has none.
        block: Rows and columns of a block; ``None`` if the strategy has none.
        symmetric: There are no zeros.
    """

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    strategy: str
    columns: int
    block: tuple[int, int] | None
    symmetric: bool

    @property
    def integers(self) -> IntegerFormat:
        """The format, if weights are integers."""
        groups = {"tensor": -1, "channel": 0}
        return IntegerFormat(self.bits, groups.get(self.strategy, self.columns), self.symmetric)

    @property
    def title(self) -> str:
        """For people."""
        if not self.is_float:
            return self.integers.title
        if self.bits == 4:
            return MXFP4 if self.columns == 32 else NVFP4
        by = {"tensor": "with one scale", "channel": "with a scale for each row"}
        block = f"in groups of {self.columns}"
        if self.block is not None:
            block = f"in blocks of {self.block[0]} x {self.block[1]}"
        return f"FP8 {by.get(self.strategy, block)}"


def title(settings: Settings) -> str:
    """The formats of all groups, for people."""
    return " and ".join(dict.fromkeys(group.title for group in _groups(settings)))


def find(tensors: TensorSet, settings: Settings) -> Found:
    """The quantised weights of a checkpoint.

    Raises:
        CheckpointError: The settings are malformed.
        UnsupportedModelError: Weights are sparse, or in a format that is not read.
    """
    groups = _groups(settings)
    found = Found()
    for stored in tensors:
        name = stored.removesuffix(_PACKED)
        kind = tensors.info(stored)[0]
        in_place = kind in ("I8", "F8_E4M3", "F8_E5M2") and not stored.endswith(("_scale", "_zero_point"))
        if stored == name and not (in_place and (kind != "I8" or f"{name}_scale" in tensors)):
            continue
        try:
            found.add(_weight(tensors, name, stored, _group_of(name, groups, settings), settings))
        except (CheckpointError, UnsupportedModelError) as problem:
            found.problems[name] = problem
            found.hidden.update({stored} - {name})
    return found


def _weight(tensors: TensorSet, name: str, stored: str, group: _Group, settings: Settings) -> PackedWeight:
    kind = tensors.info(stored)[0]
    roles = {"zero": "_zero_point", "shape": "_shape", "order": "_g_idx"}
    parts = {"codes": stored, "scale": f"{name}_scale"}
    whole = f"{name}_global_scale"
    if kind == "U8" and not (group.is_float and group.bits == 4):
        raise _contradiction(tensors, stored, group, settings)
    if kind == "U8" and (group.columns == 16 or whole in tensors):
        if group.columns not in (16, 0):
            raise _contradiction(tensors, whole, group, settings)
        return nvfp4_weight(tensors, name, {**parts, "global": whole}, settings.dtype, divides=True)
    if kind == "U8":
        return mxfp4_weight(tensors, name, parts, settings.dtype)
    if group.is_float != kind.startswith("F8"):
        raise _contradiction(tensors, stored, group, settings)
    if group.is_float:
        scale = parts["scale"] if parts["scale"] in tensors else None
        block = (1, group.columns) if group.columns else group.block
        return fp8_weight(tensors, name, scale, block, settings.dtype)
    parts |= {role: name + suffix for role, suffix in roles.items() if name + suffix in tensors}
    return integer_weight(tensors, name, parts, group.integers, settings.dtype)


def _contradiction(tensors: TensorSet, stored: str, group: _Group, settings: Settings) -> CheckpointError:
    return CheckpointError(
        f"{tensors.place(stored)} is {tensors.info(stored)[0]}, and {settings.where} says {group.title}",
        hint="config.json and tensors contradict each other: take both from the same repository",
    )


def _group_of(name: str, groups: list[_Group], settings: Settings) -> _Group:
    """The group of a weight: the only one, the first that names its module, else the first for classes."""
    if len(groups) == 1:
        return groups[0]
    module = name.removesuffix(".weight")
    for group in groups:
        for target in group.targets:
            pattern = target.removeprefix("re:")
            if target == module or (pattern != target and re.match(pattern, module)):
                return group
    for group in groups:
        if any(target in ("Linear", "FusedMoE") for target in group.targets):
            return group
    raise CheckpointError(f"{settings.where}: no group of config_groups names the module {module!r}")


def _groups(settings: Settings) -> list[_Group]:
    sparsity = settings.content.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in _SPARSE:
        raise UnsupportedModelError(
            f"{settings.where}: weights are stored sparse ({str(sparsity.get('format'))[:80]!r}), which "
            "moechat does not read"
        )
    groups = settings.content.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise settings.wrong("its quantization_config has no config_groups")
    return [_group(settings, name, group) for name, group in groups.items()]


def _group(settings: Settings, name: str, group: Any) -> _Group:
    weights: Any = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not isinstance(targets, list):
        raise settings.wrong(f"{name} of config_groups has no weights or targets")
    bits: Any
    columns: Any
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    columns, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "group" if is_positive(columns) else "channel" if columns == -1 else "tensor"
    block = weights.get("block_structure") if strategy == "block" else None
    pair = isinstance(block, list) and len(block) == 2 and all(is_positive(size) for size in block)
    if strategy == "block" and not pair:
        raise settings.wrong(f"block_structure of {name} is {str(block)[:80]}")
    sizes = {"int": (2, 3, 4, 5, 6, 7, 8), "float": (4, 8)}
    if kind not in sizes or bits not in sizes[kind] or strategy not in _STRATEGIES:
        raise UnsupportedModelError(
            f"{settings.where}: {name} has weights of {str(bits)[:20]} bits, type {str(kind)[:20]!r}, "
            f"strategy {str(strategy)[:20]!r}, which moechat does not read",
            hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
        )
    if strategy in ("group", "tensor_group") and not is_positive(columns):
        raise settings.wrong(f"group_size of {name} is {str(columns)[:80]}")
    if kind == "float" and bits == 4 and columns not in (16, 32):
        raise settings.wrong(f"group_size of {name} is {columns}; NVFP4 has blocks of 16, MXFP4 of 32")
    return _Group(
        targets=tuple(str(target) for target in targets),
        bits=bits,
        is_float=kind == "float",
        strategy=strategy,
        columns=columns if strategy in ("group", "tensor_group") else 0,
        block=None if block is None else (block[0], block[1]),
        symmetric=weights.get("symmetric", True) is not False,
    )
