"""Rates of a GPU: what was measured on it, else what is assumed of every GPU.

Each function gives a figure whose origin and source say which of the two it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from moechat.hardware.profile import Figure, GpuFigures

# Share of a GPU's streaming bandwidth that matrix-vector products reach: with 16-bit weights, and with
# quantised ones (llama.cpp reads 4.68 GB of 4-bit weights 150 times a second on an RTX 3090 that streams
# 856 GB/s, which is 0.82; https://github.com/danielesalpietro/kickstart-berlin/issues/58).
DENSE_SHARE = 0.9
EXPERT_SHARE = 0.8
# Share of a GPU's dense 16-bit rate that products with quantised weights reach at hundreds of tokens.
QUANTISED_SHARE = 0.5


def dense_rate(gpu: GpuFigures, itemsize: float) -> Figure:
    """Bytes of dense weights a second at one token.

    Args:
        gpu: The GPU.
        itemsize: Mean bytes of a dense weight.
    """
    if gpu.dense_rate:
        return _nearest(8 * itemsize, gpu.dense_rate)
    return _share(gpu.bandwidth, DENSE_SHARE, "of its memory's rate, as dense weights are read")


def dense_flops(gpu: GpuFigures, itemsize: float) -> Figure:
    """Operations a second with dense weights and hundreds of tokens."""
    return _nearest(8 * itemsize, gpu.dense_flops) if gpu.dense_flops else gpu.flops


def expert_rate(gpu: GpuFigures, bits: int, tokens: float = 1) -> Figure:
    """Bytes of blocks a second with so many tokens for each expert."""
    if gpu.expert_rate:
        known = _nearest_key(bits, gpu.expert_rate)
        return _as_with(known, bits, _between(tokens, gpu.expert_rate[known]))
    return _share(gpu.bandwidth, EXPERT_SHARE, "of its memory's rate, as quantised experts are read")


def expert_flops(gpu: GpuFigures, bits: int, tokens: float = math.inf) -> Figure:
    """Operations a second with so many tokens for each expert."""
    if gpu.expert_flops:
        known = _nearest_key(bits, gpu.expert_flops)
        return _as_with(known, bits, _between(tokens, gpu.expert_flops[known]))
    if bits >= 16:
        return gpu.flops
    return _share(gpu.flops, QUANTISED_SHARE, "of its 16-bit rate, as with quantised weights")


def _share(figure: Figure, share: float, what: str) -> Figure:
    return Figure(share * figure.value, "estimate", f"{share:g} {what}: {figure.source}")


def _nearest_key(bits: float, known: Mapping[int, object]) -> int:
    return min(known, key=lambda key: abs(math.log2(key / bits)))


def _nearest(bits: float, known: Mapping[int, Figure]) -> Figure:
    return known[_nearest_key(bits, known)]


def _as_with(known: int, bits: int, figure: Figure) -> Figure:
    if known == bits:
        return figure
    return Figure(figure.value, "estimate", f"as with {known} bits: {figure.source}")


def _between(tokens: float, known: Mapping[int, Figure]) -> Figure:
    """The figure for a number of tokens: linear in its logarithm between measured ones, constant beyond."""
    counts = sorted(known)
    if tokens <= counts[0]:
        return known[counts[0]]
    for low, high in pairwise(counts):
        if tokens < high:
            share = math.log(tokens / low) / math.log(high / low)
            return known[low].derived((1 - share) * known[low].value + share * known[high].value)
    return known[counts[-1]]
