"""Writes GGUF files with random weights. Needs numpy and gguf only, so that it runs where llama.cpp does.

    PYTHON scripts/bench/gguf_files.py PLAN.json FILE.gguf

Blocks are drawn, not quantised: every bit pattern of their codes is valid, and the scales are such that the
weights have mean 0 and the variance ``1 / inputs``, as in moechat's synthetic stores; embeddings that are not
the head too have 1, for the reason given there. A few blocks are drawn for each number of inputs, and tensors
are put together from them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf_shapes import BLOCKS, GgufPlan, Tensor

_POOL_BYTES = 1 << 24
_KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q5_k": gguf.GGMLQuantizationType.Q5_K,
    "q6_k": gguf.GGMLQuantizationType.Q6_K,
    "mxfp4": gguf.GGMLQuantizationType.MXFP4,
}
# Q4_K scales of 6 bits: from these, so that the fp16 factor stays a normal number for every size of model.
_SCALES = (8, 24)
_E2M1_SPREAD = float(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6]))) ** 0.5
_MIDDLE_SCALE = float(np.mean(np.arange(*_SCALES, dtype=float) ** 2)) ** 0.5


def _spread(bits: int) -> float:
    """Standard deviation of codes that are all as likely."""
    return float(((1 << 2 * bits) - 1) / 12) ** 0.5


def q4_0_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 18]`` of ``d * (q - 8)``; the sign of d is drawn, so that the mean is 0."""
    blocks = generator.integers(0, 256, (count, 18), dtype=np.uint8)
    size = generator.uniform(0.75, 1.25, count) / (_spread(4) * inputs**0.5)
    scale = (size * generator.choice((-1.0, 1.0), count)).astype(np.float16)
    blocks[:, :2] = scale.view(np.uint8).reshape(count, 2)
    return blocks


def q5_0_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 22]`` of ``d * (q - 16)``; the sign of d is drawn, so that the mean is 0."""
    blocks = generator.integers(0, 256, (count, 22), dtype=np.uint8)
    size = generator.uniform(0.75, 1.25, count) / (_spread(5) * inputs**0.5)
    scale = (size * generator.choice((-1.0, 1.0), count)).astype(np.float16)
    blocks[:, :2] = scale.view(np.uint8).reshape(count, 2)
    return blocks


def q8_0_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 34]`` of ``d * q`` with q -128 to 127."""
    blocks = generator.integers(0, 256, (count, 34), dtype=np.uint8)
    size = generator.uniform(0.75, 1.25, count) / (_spread(8) * inputs**0.5)
    blocks[:, :2] = size.astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks


def q6_k_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 210]`` of ``d * scale * (q - 32)``; signs of scales are drawn."""
    blocks = generator.integers(0, 256, (count, 210), dtype=np.uint8)
    scales = generator.integers(*_SCALES, (count, 16)) * generator.choice((-1, 1), (count, 16))
    blocks[:, 192:208] = scales.astype(np.int8).view(np.uint8)
    size = generator.uniform(0.75, 1.25, count) / (_spread(6) * _MIDDLE_SCALE * inputs**0.5)
    blocks[:, 208:] = size.astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks


def q4_k_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 144]`` of ``d * scale * q - dmin * min``, with ``dmin * min`` at the mean."""
    return _scaled_blocks(count, inputs, generator, bits=4)


def q5_k_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 176]``; like Q4_K with a fifth bit."""
    return _scaled_blocks(count, inputs, generator, bits=5)


def _scaled_blocks(
    count: int, inputs: int, generator: np.random.Generator, *, bits: int
) -> npt.NDArray[np.uint8]:
    blocks = generator.integers(0, 256, (count, 16 + 32 * bits), dtype=np.uint8)
    scales = generator.integers(*_SCALES, (count, 8), dtype=np.uint8)
    d = generator.uniform(0.75, 1.25, count) / (_spread(bits) * _MIDDLE_SCALE * inputs**0.5)
    factors = np.stack([d, ((1 << bits) - 1) / 2 * d], axis=1).astype(np.float16)
    blocks[:, :4] = factors.view(np.uint8)
    # Twelve bytes hold eight 6-bit scales and eight 6-bit minima, here equal to them: bytes 0..3 and 4..7 the
    # first four of each with two upper bits of the last four, bytes 8..11 the lower four bits of those.
    blocks[:, 4:8] = blocks[:, 8:12] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | ((scales[:, 4:] & 15) << 4)
    return blocks


def mxfp4_blocks(count: int, inputs: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks ``[count, 17]``: an exponent and 32 codes of e2m1, whose mean is 0."""
    blocks = generator.integers(0, 256, (count, 17), dtype=np.uint8)
    middle = 127 - round(np.log2(_E2M1_SPREAD * inputs**0.5))
    blocks[:, 0] = generator.integers(middle - 1, middle + 1, count, endpoint=True)
    return blocks


RANDOM_BLOCKS = {
    "q4_0": q4_0_blocks,
    "q5_0": q5_0_blocks,
    "q8_0": q8_0_blocks,
    "q4_k": q4_k_blocks,
    "q5_k": q5_k_blocks,
    "q6_k": q6_k_blocks,
    "mxfp4": mxfp4_blocks,
}


class _Weights:
    """Draws tensors."""

    def __init__(self, plan: GgufPlan, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._untied = any(tensor.name == "output.weight" for tensor in plan.tensors)
        self._pools: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}

    def draw(self, tensor: Tensor) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
        if tensor.kind == "f32":
            if len(tensor.shape) == 1:
                # Norms; rates of decay are negative.
                sign = -1.0 if tensor.name.endswith("ssm_a") else 1.0
                return np.full(tensor.shape, sign, dtype=np.float32)
            values = self._generator.standard_normal(tensor.shape, dtype=np.float32)
            return values * np.float32(tensor.shape[-1] ** -0.5)
        weights, size = BLOCKS[tensor.kind]
        is_embedding = self._untied and tensor.name == "token_embd.weight"
        pool = self._pool(tensor.kind, 1 if is_embedding else tensor.shape[-1])
        out = np.empty((tensor.nbytes // size, size), dtype=np.uint8)
        done = 0
        while done < len(out):
            at = int(self._generator.integers(len(pool)))
            part = pool[at : at + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out.reshape(*tensor.shape[:-1], tensor.shape[-1] // weights * size)

    def _pool(self, kind: str, inputs: int) -> npt.NDArray[np.uint8]:
        key = kind, inputs
        if key not in self._pools:
            make = RANDOM_BLOCKS[kind]
            # An odd number of them: equal tensors do not come to lie on each other.
            self._pools[key] = make(_POOL_BYTES // BLOCKS[kind][1] | 1, inputs, self._generator)
        return self._pools[key]


def write_gguf(plan: GgufPlan, path: Path, *, seed: int = 0) -> Iterator[int]:
    """Write the file of a plan; it appears under its name when it is complete.

    Args:
        plan: What to write.
        path: Where to; a file that is there is replaced.
        seed: Of the weights.

    Yields:
        Bytes of each tensor once it is written.
    """
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, plan.architecture)
    for key, value in plan.metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in plan.tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=_KINDS[tensor.kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    weights = _Weights(plan, seed)
    for tensor in plan.tensors:
        writer.write_tensor_data(weights.draw(tensor))
        yield tensor.nbytes
    writer.close()
    os.replace(part, path)


def main() -> None:
    """See the module; prints the bytes written so far after each tensor."""
    plan = GgufPlan.from_json(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    done = 0
    for nbytes in write_gguf(plan, Path(sys.argv[2])):
        done += nbytes
        print(done, flush=True)


if __name__ == "__main__":
    main()
