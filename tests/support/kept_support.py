"""Random weights in the formats of files, and experts of them in blocks that keep their values."""

from __future__ import annotations

import numpy as np
from gguf import dequantize
from gguf.constants import GGMLQuantizationType
from gguf_encoders import put_scales
from native_support import Call, empty_records

from moechat import _native
from moechat.store.quantised.number_formats import E2M1, E4M3

# By kept encoding of GGUF files: ggml's name, and the places of the fp16 scales in a block.
GGUF = {
    "q4_0": ("Q4_0", (0,)),
    "q4_1": ("Q4_1", (0, 2)),
    "q5_0": ("Q5_0", (0,)),
    "q5_1": ("Q5_1", (0, 2)),
    "q8_0": ("Q8_0", (0,)),
    "q2_k": ("Q2_K", (80, 82)),
    "q3_k": ("Q3_K", (108,)),
    "q4_k": ("Q4_K", (0, 2)),
    "q5_k": ("Q5_K", (0, 2)),
    "q6_k": ("Q6_K", (208,)),
    "iq4_nl": ("IQ4_NL", (0,)),
    "iq4_xs": ("IQ4_XS", (0,)),
    "mxfp4": ("MXFP4", ()),
    "iq2_xxs": ("IQ2_XXS", (0,)),
    "iq2_xs": ("IQ2_XS", (0,)),
    "iq2_s": ("IQ2_S", (0,)),
    "iq3_xxs": ("IQ3_XXS", (0,)),
    "iq3_s": ("IQ3_S", (0,)),
    "iq1_s": ("IQ1_S", (0,)),
    "iq1_m": ("IQ1_M", ()),
}
# Those of quantised checkpoints.
OWN = ("int4", "int4_32", "int8", "int8_32", "nvfp4")
ENCODINGS = (*GGUF, *OWN)
DENSE_ENCODINGS = (*ENCODINGS, "fp8")  # the last one not of experts
# Mean magnitude of the integers that the scales are multiplied with, so that weights are near 0.1.
_MAGNITUDE = {"q2_k": 12, "q3_k": 40, "q4_k": 240, "q5_k": 480, "q6_k": 1000, "iq4_xs": 800, "q8_0": 64}
FINITE_E4M3 = np.append(np.arange(0x7F), 0x80 + np.arange(0x7F)).astype(np.uint8)
_MAGNITUDE |= {
    "iq4_nl": 60,
    "int8": 80,
    "int8_32": 80,
    "iq2_xxs": 50,
    "iq2_xs": 50,
    "iq2_s": 50,
    "iq3_xxs": 130,
}
_MAGNITUDE |= {"iq3_s": 130}


def file_rows(rng: np.random.Generator, encoding: str, rows: int, columns: int) -> np.ndarray:
    """Random packed rows, uint8 [rows, bytes]: all codes and scales occur."""
    _, block, size = _native.kept_encodings()[encoding]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    spread = 0.1 / _MAGNITUDE.get(encoding, 8)
    if encoding == "nvfp4":
        data[:, :, :4] = np.full((rows, 1, 1), 0.0007, np.float32).view(np.uint8)
        data[:, :, 4:8] = rng.choice(FINITE_E4M3, (rows, columns // block, 4))
    elif encoding == "fp8":
        data[:, :, 4:] = rng.choice(FINITE_E4M3, data[:, :, 4:].shape)
        data[:, :, :4] = (
            (rng.standard_normal((rows, columns // block, 1)) * 1e-3).astype("<f4").view(np.uint8)
        )
    elif encoding in OWN:
        scales = (rng.standard_normal((rows, columns // block)) * spread).astype(np.float32)
        words = scales.view(np.uint32) & 0xFFFFFF00 | rng.integers(0, 256, scales.shape, dtype=np.uint32)
        if encoding.startswith("int4"):
            words &= 0xFFFFFF0F
        data[:, :, :4] = words.view(np.uint8).reshape(rows, -1, 4)
    for place in GGUF[encoding][1] if encoding in GGUF else ():
        scales = (rng.standard_normal((rows, columns // block)) * spread).astype(np.float16)
        data[:, :, place : place + 2] = scales.view(np.uint8).reshape(rows, -1, 2)
    if encoding == "iq1_m":  # the scale is in the highest four bits of four words
        scales = (rng.standard_normal((rows, columns // block)) * spread).astype(np.float16)
        put_scales(data, scales, in_nibbles=True)
    if encoding == "mxfp4":
        data[:, :, 0] = rng.integers(119, 124, (rows, columns // block))
    return data.reshape(rows, -1)


def values(encoding: str, rows: np.ndarray) -> np.ndarray:
    """float32 [rows, columns], by the gguf package or by the description in ``kept_encodings.h``."""
    if encoding in GGUF:
        return dequantize(rows, GGMLQuantizationType[GGUF[encoding][0]])
    size = _native.kept_encodings()[encoding][2]
    blocks = rows.reshape(len(rows), -1, size)
    if encoding == "nvfp4":
        scales = blocks[..., :4].copy().view(np.float32) * E4M3[blocks[..., 4:8]]
        twice = scales.repeat(16, axis=2) * np.float32(0.5)
        # Step times code less min: how far a float32 is from the product depends on the order.
        codes = (2 * E2M1[_nibbles(blocks[..., 8:])] + 12).astype(np.float32)
        return (twice * codes - twice * np.float32(12)).reshape(len(rows), -1)
    if encoding == "fp8":
        return (E4M3[blocks[..., 4:]] * blocks[..., :4].copy().view(np.float32)).reshape(len(rows), -1)
    words = blocks[..., :4].copy().view(np.uint32)
    codes = blocks[..., 4:] if encoding.startswith("int8") else _nibbles(blocks[..., 4:])
    scales = (words & 0xFFFFFF00).view(np.float32)
    return (scales * (codes.astype(np.float32) - (words & 255).astype(np.float32))).reshape(len(rows), -1)


def _nibbles(pairs: np.ndarray) -> np.ndarray:
    """Codes of 4 bits: byte i of 16 has columns i and i + 16."""
    runs = pairs.reshape(*pairs.shape[:-1], -1, 16)
    return np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def random_records(
    rng: np.random.Generator, layout: _native.BlockLayout, experts: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray | None, np.ndarray]]]:
    """Records of experts, and their rows as in a file."""
    records = empty_records(layout, experts)
    sources = []
    hidden, neurons = layout.hidden_size, layout.intermediate_size
    for expert in range(experts):
        rows = (
            file_rows(rng, layout.encoding, neurons, hidden),
            file_rows(rng, layout.encoding, neurons, hidden) if layout.gated else None,
            file_rows(rng, layout.down_encoding, hidden, neurons),
        )
        biases = None
        if layout.has_bias:
            biases = tuple(rng.standard_normal(n).astype(np.float32) for n in (neurons, neurons, hidden))
        _native.pack_kept(layout, *rows, biases, records[expert])
        sources.append(rows)
    return records, sources


def kept_call(
    seed: int,
    gate_up: str,
    down: str,
    *,
    counts: tuple[int, ...] = (5, 3, 0),
    bias: bool = False,
    gated: bool = True,
) -> Call:
    """A call over random experts with the given numbers of tokens each.

    Of blocks of 32 columns, hidden size and neurons are not multiples of 64; of others, a few blocks.
    """
    rng = np.random.default_rng(seed)
    blocks = [_native.kept_encodings()[name][1] for name in (gate_up, down)]
    hidden, neurons = {32: 160, 64: 192, 256: 512}[blocks[0]], {32: 96, 64: 192, 256: 256}[blocks[1]]
    layout = _native.kept_layout(hidden, neurons, gate_up, down, bias, gated=gated)
    records, _ = random_records(rng, layout, len(counts))
    tokens = max(counts)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    tokens_of = [rng.permutation(tokens)[:count].astype(np.int32) for count in counts]
    weights_of = [rng.standard_normal(count).astype(np.float32) for count in counts]
    entries = [(expert, block) for expert in range(len(counts)) for block in range(layout.blocks)]
    return Call(layout, records, x, tokens_of, weights_of, entries)
