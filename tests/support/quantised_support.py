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


def write_source(directory: Path, family: str = "qwen3_moe", shape: int = 0, **changes: Any) -> Path:
    """A tiny random bf16 model as transformers writes it."""
    tiny.write_tiny_checkpoint(directory, tiny.tiny_config(family, shape, **changes))
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
