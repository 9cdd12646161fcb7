"""Writes the tensors and metadata of a family as a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf_encoders import encode
from gguf_family import Family, Tensors, metadata_of

Choose = Callable[[str, tuple[int, ...]], Kind]


def all_as(kind: Kind) -> Choose:
    """Matrices in one type; vectors and routers in float32, and so what has no whole blocks even of Q8_0."""

    def chosen(name: str, shape: tuple[int, ...]) -> Kind:
        if "tid2eid" in name:
            return Kind.I32
        if len(shape) == 1 or re.search(
            r"ffn_gate_inp|conv1d|shortconv\.conv|_exps\.bias|ssm_[ad]$|ssm_norm|\.scale$", name
        ):
            return Kind.F32
        columns = shape[-1]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if columns % block == 0:
            return kind
        return Kind.Q8_0 if columns % 32 == 0 else Kind.F32

    return chosen


def write_family(
    family: Family,
    config: Any,
    tensors: Tensors,
    path: Path,
    choose: Choose,
    *,
    changes: Mapping[str, Any] | None = None,
    dequantised: bool = False,
    but_experts: bool = False,
    parts: int = 1,
) -> None:
    """Write a GGUF file.

    Args:
        family: The architecture.
        config: The model's.
        tensors: From :func:`gguf_tensors`.
        path: The file.
        choose: Type of a tensor.
        changes: Metadata to set instead; ``None`` removes a key. Keys with ``general.`` are whole.
        dequantised: Store the values that ``choose`` leaves, as float32.
        but_experts: Experts stay as ``choose`` says.
        parts: Number of files.
    """
    most = -(-len(tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, family.architecture, split_max_tensors=most)
    values = {f"{family.architecture}.{key}": value for key, value in metadata_of(family, config).items()}
    for key, value in (changes or {}).items():
        values[key if key.startswith("general.") else f"{family.architecture}.{key}"] = value
    for key, value in values.items():
        _add(writer, key, value)
    _add_words(writer, config.vocab_size)
    for name, array in tensors.items():
        kind = choose(name, array.shape)
        packed = encode(array, kind)
        if dequantised and kind is not Kind.I32 and not (but_experts and "_exps" in name):
            packed, kind = np.array(gguf.dequantize(packed, kind), np.float32), Kind.F32
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _add_words(writer: gguf.GGUFWriter, words: int) -> None:
    """Byte tokens and a few special ones."""
    bytes_ = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in bytes_] + [chr(256 + n) for n in range(256 - len(bytes_))]
    special = [f"<|{number}|>" for number in range(words - 257)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, letters[0] + letters[1], *special])
    writer.add_token_types([1] * 257 + [3] * len(special))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
