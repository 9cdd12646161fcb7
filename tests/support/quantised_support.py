"""Writes checkpoints with quantised weights, and the plain ones that they decode to.

The formats are computed here with torch from their published definitions, apart from the code under test.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

# The tensors that one weight is stored in, by their full names, and the weight that they stand for.
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Pack = Callable[[str, torch.Tensor], Packed]

TOKENS = [5, 17, 30, 42, 77, 12, 9, 33]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_source(
    directory: Path,
    family: str = "qwen3_moe",
    shape: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Path:
    """A tiny random model as transformers writes it."""
    tiny.write_tiny_checkpoint(directory, tiny.tiny_config(family, shape, **changes), dtype=dtype)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: part
        for file in sorted(directory.glob("*.safetensors"))
        for name, part in load_file(file).items()
    }


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """The matrices that quantisers take: linear layers, without router, head and embedding."""
    plain = re.search(r"lm_head|embed|\.gate\.weight$|router", name)
    return tensor.dim() == 2 and name.endswith(".weight") and not plain


def is_expert(name: str, tensor: torch.Tensor) -> bool:
    return is_linear(name, tensor) and ".experts." in name


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of each layer in two tensors, as newer families store them."""
    kept, layers = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            kept[name] = tensor
    for prefix, experts in layers.items():
        parts = [experts[number] for number in sorted(experts)]
        kept[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in parts])
        kept[f"{prefix}.down_proj"] = torch.stack([one["down"] for one in parts])
    return kept


def unstacked(
    tensors: Mapping[str, torch.Tensor], *, transposed: bool = False, alternating: bool = False
) -> dict[str, torch.Tensor]:
    """Experts as linear layers of their own, as quantisers write families that stack them.

    Args:
        tensors: Of a checkpoint with stacked experts.
        transposed: They are ``[experts, in, out]``.
        alternating: Rows of gate and up alternate.
    """
    result = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.(gate_up|down)_proj(_bias)?", name)
        if not match:
            result[name] = tensor
            continue
        kind = "bias" if match[3] else "weight"
        for number, stored in enumerate(tensor):
            one = stored.T if transposed and kind == "weight" else stored
            half = len(one) // 2
            parts = {"gate": one[:half], "up": one[half:]}
            if alternating:
                parts = {"gate": one[::2], "up": one[1::2]}
            if match[2] == "down":
                parts = {"down": one}
            for part, rows in parts.items():
                result[f"{match[1]}.{number}.{part}_proj.{kind}"] = rows
    return result


def write_pair(
    source: Path,
    packed: Path,
    decoded: Path,
    pack: Pack,
    settings: Mapping[str, Any] | None,
    *,
    choose: Callable[[str, torch.Tensor], bool] = is_linear,
    tensors: Mapping[str, torch.Tensor] | None = None,
    shard_of: Callable[[str], int] | None = None,
) -> None:
    """Write a quantised checkpoint and the plain one that it decodes to.

    Args:
        source: A checkpoint.
        packed: Directory of the quantised one.
        decoded: Directory of the plain one.
        pack: Quantises one weight; one of three dimensions expert by expert.
        settings: Becomes ``quantization_config``; ``None`` leaves it away.
        choose: The weights to quantise.
        tensors: Taken instead of those in ``source``.
        shard_of: Number of the shard of each tensor; ``None`` writes one file.
    """
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in (tensors_of(source) if tensors is None else tensors).items():
        if not choose(name, tensor):
            stored[name] = plain[name] = tensor
            continue
        if tensor.dim() == 3:
            parts = [pack(name, one.float()) for one in tensor]
            for part in parts[0][0]:
                stored[part] = torch.stack([one[0][part] for one in parts])
            plain[name] = torch.stack([one[1] for one in parts]).to(tensor.dtype)
        else:
            found, values = pack(name, tensor.float())
            stored.update(found)
            plain[name] = values.to(tensor.dtype)
    for directory, content in ((packed, stored), (decoded, plain)):
        directory.mkdir()
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja") and "index" not in file.name:
                shutil.copy(file, directory)
        split = shard_of if directory is packed else None
        write_shards(directory, content, split)
    change_config(packed, **({} if settings is None else {"quantization_config": dict(settings)}))


def write_shards(
    directory: Path, tensors: Mapping[str, torch.Tensor], shard_of: Callable[[str], int] | None = None
) -> None:
    """Write one file, or several with an index."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shard_of is None:
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
        return
    index = {name: f"model-{shard_of(name):05d}.safetensors" for name in whole}
    for file in set(index.values()):
        part = {name: tensor for name, tensor in whole.items() if index[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    content = {"metadata": {}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Alter the tensors of a checkpoint of one file in place."""
    tensors = tensors_of(directory)
    change(tensors)
    write_shards(directory, tensors)


def fp8(
    block: tuple[int, int] | str, *, scale: str = "_scale_inv", dtype: torch.dtype = torch.float32
) -> Pack:
    """FP8 with a scale for each block, ``row`` or ``tensor``, as DeepSeek's ``weight_dequant`` reads it."""

    def pack(name: str, weight: torch.Tensor) -> Packed:
        rows, columns = weight.shape
        high, wide = {"row": (1, columns), "tensor": (rows, columns)}.get(str(block), block)
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(-(-rows // high), -(-columns // wide), dtype=dtype)
        decoded = torch.zeros(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                largest = weight[place].abs().max()
                if dtype is torch.float8_e8m0fnu:
                    scales[i, j] = torch.exp2(torch.ceil(torch.log2(largest / 448)))
                else:
                    scales[i, j] = largest / 448
                codes[place] = (weight[place] / scales[i, j].float()).to(torch.float8_e4m3fn)
                decoded[place] = codes[place].float() * scales[i, j].float()
        if block == "tensor":
            scales = scales.reshape(())
        return {name: codes, name + scale: scales}, decoded

    return pack


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers along the last dimension in 32-bit words, the first in the lowest bits."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % count))
    parts = padded.reshape(*padded.shape[:-1], -1, count)
    whole = sum(parts[..., i] << (bits * i) for i in range(count))
    return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32)  # type: ignore[union-attr]


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """``[rows, groups, columns]``; 0 makes a row one group, -1 the matrix."""
    if group == -1:
        return weight.reshape(1, 1, -1)
    return weight.reshape(len(weight), -1, group or weight.shape[1])


def integers(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    packed: bool = True,
    plain_zeros: bool = False,
    order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Pack:
    """compressed-tensors' integers: ``pack-quantized``, or ``int-quantized`` without ``packed``.

    Args:
        bits: Bits of a weight.
        group: Columns of a group; 0: a row; -1: the matrix.
        symmetric: Without zeros.
        packed: Codes in words of 32 bits, else int8.
        plain_zeros: Zeros as int8, as older versions wrote them.
        order: Columns belong to groups out of order.
        dtype: Of the scales.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def pack(name: str, weight: torch.Tensor) -> Packed:
        rows, columns = weight.shape
        # Position of each column among those sorted by their group.
        turn = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if order else None
        sorted_weight = weight if turn is None else weight[:, turn.argsort()]
        parts = grouped(sorted_weight, group)
        if symmetric:
            scale = (parts.abs().amax(2) / high).to(dtype)
            zero = torch.zeros_like(scale)
        else:
            top, bottom = parts.amax(2).clamp(min=0), parts.amin(2).clamp(max=0)
            scale = ((top - bottom) / (high - low)).to(dtype)
            zero = (low - bottom / scale.float()).round().clamp(low, high)
        codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(low, high)
        codes = codes.to(torch.int32)  # without negative zeros
        decoded = ((codes - zero.float()[..., None]) * scale.float()[..., None]).reshape(rows, columns)
        codes = codes.reshape(rows, columns)
        stored = {f"{name}_scale": scale.reshape(()) if group == -1 else scale}
        if turn is not None:
            codes, decoded = codes[:, turn], decoded[:, turn]
            stored[f"{name}_g_idx"] = (turn // group).to(torch.int32)
        if packed:
            stored[f"{name}_packed"] = words(codes - low, bits)
            stored[f"{name}_shape"] = torch.tensor([rows, columns])
        else:
            stored[name] = codes.to(torch.int8)
        if not symmetric and packed and not plain_zeros:
            stored[f"{name}_zero_point"] = words((zero - low).T, bits).T.contiguous()
        elif not symmetric:
            stored[f"{name}_zero_point"] = zero.to(torch.int8)
        return stored, decoded.to(dtype)

    return pack


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The code of the nearest e2m1 value."""
    magnitude = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    return magnitude + 8 * (values < 0)


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first in the low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    return E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def nvfp4(*, divides: bool) -> Pack:
    """NVFP4 of compressed-tensors, whose global scale divides, or of ModelOpt, whose multiplies."""

    def pack(name: str, weight: torch.Tensor) -> Packed:
        parts = weight.reshape(len(weight), -1, 16)
        whole = 448 * 6 / weight.abs().max() if divides else weight.abs().max() / (448 * 6)
        wanted = parts.abs().amax(2) / 6
        scale = (wanted * whole if divides else wanted / whole).to(torch.float8_e4m3fn)
        factor = scale.float() / whole if divides else scale.float() * whole
        codes = to_e2m1(parts / factor[..., None])
        decoded = from_e2m1(codes) * factor[..., None]
        packed = halves(codes.reshape(weight.shape))
        if divides:
            stored = {f"{name}_packed": packed, f"{name}_global_scale": whole.reshape(1)}
        else:
            stored = {name: packed, f"{name}_scale_2": whole.reshape(())}
        return {**stored, f"{name}_scale": scale}, decoded.reshape(weight.shape)

    return pack


def mxfp4(*, codes_suffix: str = "_packed", scale_suffix: str = "_scale", deepseek: bool = False) -> Pack:
    """MXFP4 of compressed-tensors, or of DeepSeek-V4's experts (int8, and a scale called ``scale``)."""

    def pack(name: str, weight: torch.Tensor) -> Packed:
        parts = weight.reshape(len(weight), -1, 32)
        exponent = torch.floor(torch.log2(parts.abs().amax(2))) - 2
        scale = torch.exp2(exponent)[..., None]
        codes = to_e2m1(parts / scale)
        packed = halves(codes.reshape(weight.shape))
        stored = (exponent + 127).to(torch.uint8)
        decoded = (from_e2m1(codes) * scale).reshape(weight.shape)
        if deepseek:
            sibling = name.removesuffix("weight") + "scale"
            return {name: packed.view(torch.int8), sibling: stored.view(torch.float8_e8m0fnu)}, decoded
        return {name + codes_suffix: packed, name + scale_suffix: stored}, decoded

    return pack


def affine(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, *, symmetric: bool = False
) -> tuple[torch.Tensor, ...]:
    """Codes ``[rows, columns]``, zeros and scales ``[rows, groups]``, and what they stand for."""
    parts = grouped(weight, group)
    top, bottom = parts.amax(2).clamp(min=0), parts.amin(2).clamp(max=0)
    most = (1 << bits) - 1
    if symmetric:
        top = parts.abs().amax(2)
        bottom = -top
    scale = ((top - bottom) / most).to(dtype)
    zero = (-bottom / scale.float()).round().clamp(0, most).int()
    if symmetric:
        zero = torch.full_like(zero, 1 << (bits - 1))
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, most).int()
    decoded = ((codes - zero[..., None]) * scale.float()[..., None]).reshape(weight.shape)
    return codes.reshape(weight.shape), zero, scale, decoded.to(dtype)


def awq(group: int, dtype: torch.dtype = torch.bfloat16) -> Pack:
    """AWQ as AutoAWQ packs it for its kernel ``gemm``."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def turned(codes: torch.Tensor) -> torch.Tensor:
        return words(codes.T.reshape(codes.shape[1], -1, 8)[..., order].reshape(codes.shape[1], -1), 4)

    def pack(name: str, weight: torch.Tensor) -> Packed:
        codes, zero, scale, decoded = affine(weight, 4, group, dtype)
        stem = name.removesuffix("weight")
        stored = {"qweight": turned(codes), "qzeros": turned(zero), "scales": scale.T}
        return {stem + part: tensor for part, tensor in stored.items()}, decoded

    return pack


def gptq(
    bits: int,
    group: int,
    *,
    version: int = 1,
    order: bool = False,
    index: bool = True,
    symmetric: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Pack:
    """GPTQ: columns packed in words, zeros less one in version 1, columns in any ``order``."""

    def pack(name: str, weight: torch.Tensor) -> Packed:
        columns = weight.shape[1]
        turn = torch.arange(columns)
        if order:
            turn = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        codes, zero, scale, decoded = affine(
            weight[:, turn.argsort()], bits, group, dtype, symmetric=symmetric
        )
        stem = name.removesuffix("weight")
        stored = {
            "qweight": words(codes[:, turn], bits).T,
            "qzeros": words((zero - int(version == 1)).T % (1 << bits), bits),
            "scales": scale.T,
        }
        if index:
            stored["g_idx"] = (turn // (group or columns)).to(torch.int32)
        return {stem + part: tensor for part, tensor in stored.items()}, decoded[:, turn]

    return pack
