"""What is lost when experts of a quantised checkpoint are quantised again: the manual's table."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from quantised_support import Pack, awq, fp8, gptq, integers, mxfp4, nvfp4

from moechat.geometry import ExpertGeometry
from moechat.store.quantizer import make_packer, relative_loss

FORMATS: dict[str, Pack] = {
    "FP8, blocks of 128 x 128": fp8((128, 128)),
    "FP8, a scale for each row": fp8("row"),
    "8-bit integers, rows": integers(8, 0),
    "NVFP4": nvfp4(divides=False),
    "MXFP4": mxfp4(),
    "4-bit integers, groups of 32": integers(4, 32),
    "4-bit integers, groups of 128": integers(4, 128),
    "AWQ, groups of 128": awq(128),
    "GPTQ, groups of 128": gptq(4, 128),
}
BITS = (8, 4, 3)
_SHAPE = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}

# Relative root mean squares in percent: of what the format itself loses, then, for each of BITS, of what
# quantising again changes.
Row = tuple[float, ...]


def weights(seed: int) -> dict[str, torch.Tensor]:
    """An expert with weights like trained ones: rows of different scales, heavy tails, a few outliers."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (rows, columns) in _SHAPE.items():
        scale = 0.02 * np.exp(0.4 * rng.standard_normal((rows, 1)))
        body = rng.standard_normal((rows, columns))
        body = np.where(rng.random(body.shape) < 0.1, rng.standard_t(4, body.shape), body)
        body *= np.where(rng.random(body.shape) < 5e-4, 8.0, 1.0)
        found[name] = torch.from_numpy((scale * body).astype(np.float32))
    return found


def losses() -> Iterator[tuple[str, Row]]:
    """The rows of the table; the first is of a bf16 checkpoint."""
    original = weights(0)
    plain = {name: weight.bfloat16().float() for name, weight in original.items()}
    yield "bf16", (_distance(plain, original), *_again(plain))
    for title, pack in FORMATS.items():
        decoded = {name: pack("x.weight", weight)[1].bfloat16().float() for name, weight in original.items()}
        yield title, (_distance(decoded, original), *_again(decoded))


def _distance(changed: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> float:
    error = sum(float((changed[name] - weight).square().sum()) for name, weight in original.items())
    return 100 * math.sqrt(error / sum(float(weight.square().sum()) for weight in original.values()))


def _again(decoded: dict[str, torch.Tensor]) -> Iterator[float]:
    matrices = tuple(np.ascontiguousarray(decoded[name].numpy()) for name in ("gate", "up", "down"))
    for bits in BITS:
        geometry = ExpertGeometry(hidden_size=512, intermediate_size=256, num_experts=1, bits=bits)
        record = np.zeros((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
        make_packer(geometry, "least-squares")(matrices, None, record)  # type: ignore[arg-type]
        yield 100 * relative_loss(geometry, matrices, record)  # type: ignore[arg-type]


def table() -> str:
    """The rows as Markdown."""
    lines = [
        f"| {title} | " + " | ".join(f"{value:.2g} %" for value in row) + " |" for title, row in losses()
    ]
    head = "| format of the checkpoint | its own loss | 8 bits | 4 bits | 3 bits |\n|---|---|---|---|---|"
    return "\n".join([head, *lines])


if __name__ == "__main__":
    print(table())
