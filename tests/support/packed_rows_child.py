"""Run in a child with MOECHAT_ISA: packs rows, attends to them in a layer's step, and prints the outcome."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from moechat import _native
from moechat.models.packed_rows import pack, row_bytes, unpack

KV_HEADS, LARGEST = 2, 700
# Elements of a head: read in place, with a part of a group, with part of a vector, with more groups than are
# read at once.
DIMS = (16, 20, 32, 80, 96, 128, 544)
GROUPS = (1, 2, 3)


def main() -> None:
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dim in DIMS:
            rows = packed(drawn(1, KV_HEADS, 33, dim).to(dtype))
            digest.update(rows.numpy().tobytes())
    unlike = [
        f"{dtype}, {dim} elements, {group} queries a head, {context} tokens, {threads} threads"
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for dim in DIMS
        for group in GROUPS
        for context in (1, 16, 33, LARGEST)
        for threads in ((1, 3) if context == LARGEST else (1,))
        if not attends_as_to_unpacked_rows(dtype, dim, group, context, threads)
    ]
    print(json.dumps({"isa": _native.active_isa(), "digest": digest.hexdigest(), "unlike": unlike}))


def drawn(*sizes: int) -> torch.Tensor:
    """Numbers of many magnitudes, by a seed that depends on the sizes."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator) * torch.randn(sizes, generator=generator).exp()


def packed(states: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((*states.shape[:-1], row_bytes(states.shape[-1])), dtype=torch.uint8)
    pack(states, rows)
    return rows


def attends_as_to_unpacked_rows(dtype: Any, dim: int, group: int, context: int, threads: int) -> bool:
    """Whether a layer's step gives the bits of attention over the unpacked rows.

    Its products are their biases and its output projection is the identity, so its residual is what
    attention gives.
    """
    _native.set_num_threads(threads)
    name, heads = str(dtype).removeprefix("torch."), KV_HEADS * group
    query, key, value = (drawn(count * dim).mul(0.3) for count in (heads, KV_HEADS, KV_HEADS))
    hidden = heads * dim
    zeros = torch.zeros(hidden, dtype=dtype)

    def product(weights: torch.Tensor, bias: torch.Tensor | None) -> _native.DenseProduct:
        words = weights.to(torch.float16).view(torch.int16).numpy().view("uint16")
        return _native.rows16_product(words, True, None if bias is None else bias.numpy())

    ones, none = torch.ones(hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    norm = _native.RmsNorm(name, ones.data_ptr(), hidden, 1e-6, 0.0, True)
    attention = _native.Attention(name, KV_HEADS, group, dim, 0, dim, dim**-0.5, 0)
    step = _native.LayerStep(
        name,
        norm,
        *(product(torch.zeros(len(bias), hidden), bias) for bias in (query, key, value)),
        product(torch.eye(hidden), None),
        False,
        None,
        attention,
        dim,
        dim,
        _native.FeedStep(norm, None, None, None),
    )
    before = [drawn(1, KV_HEADS, context, dim).mul(0.3 + i).to(dtype) for i in range(2)]
    keys, values = map(packed, before)
    residual, normed = torch.empty_like(zeros), torch.empty_like(zeros)
    head = context * row_bytes(dim)
    step.normalise(
        zeros.data_ptr(), ones.data_ptr(), none.data_ptr(),
        [(keys.data_ptr(), head, values.data_ptr(), head, context - 1, True)],
        residual.data_ptr(), normed.data_ptr(),
    )  # fmt: skip
    for new, rows in ((key, keys), (value, values)):
        appended = packed(new.to(dtype).reshape(1, KV_HEADS, 1, dim))
        if not torch.equal(rows[:, :, -1:], appended):
            return False
    plain = [unpack(rows, dim, dtype) for rows in (keys, values)]
    wanted = torch.empty_like(zeros)
    turned = query.to(dtype)
    attention(
        turned.data_ptr(), dim, dim, 1, plain[0].data_ptr(), context * dim, dim, 0, 0, plain[1].data_ptr(),
        context * dim, dim, context, 0, 0, wanted.data_ptr(),
    )  # fmt: skip
    return torch.equal(residual, wanted) and bool(residual.abs().max() > 0)
