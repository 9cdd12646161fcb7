"""Sizes that the tier on a GPU is built with; the memory account counts with them, without Triton."""

from __future__ import annotations

# A CUDA context with torch's libraries, where it cannot be measured: the driver's own, and the kernels that
# torch and the libraries load into it. 300 to 500 MiB are usual with recent drivers.
CONTEXT_BYTES = 448 << 20
# One page to compute from while another one is filled.
MIN_PAGES = 2
# (token, block) pairs of one launch: their activations take at most 64 MiB.
WORK_PAIRS = 1 << 18
PAIR_BYTES = 64 * 4
# In longer passes nearly every expert has too many tokens for the CPU to compute a part of it.
SHARED_TOKENS = 256
# Tokens of an expert up to which products are made without tensor cores.
FEW_TOKENS = 8
# Chains that the blocks of an expert are added in, so that a decoded token has enough programs. A constant:
# with another number sums round differently.
SPLITS = 4
# Slots of the attention cache that one set of graphs reads: powers of two between these.
LEAST_BUCKET = 256
# Longer contexts are left to passes of the model: torch's attention with a mask walks a head's keys from
# first to last with one block of threads, while the one without a mask divides them. An estimate.
MOST_BUCKET = 2048
