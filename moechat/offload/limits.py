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
# Programs that the attention of a decoded token is divided into: four on each multiprocessor of a large GPU.
# A constant, so that the bits of a result do not depend on the GPU.
ATTENTION_PROGRAMS = 512
# Most float32 sums of one of them, which its threads hold in registers.
ATTENTION_SUMS = 32 * 512
