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
# For few tokens, chains that the blocks of an expert are added in, at most. Each is a program, and two
# experts of 224 blocks (Mixtral) make enough of them for the 132 multiprocessors of an H100. Sums round
# differently with another number, so it depends on the experts' shape alone.
MOST_SPLITS = 64
# Pairs of an item and a chain up to which a pass is computed in chains; passes with more have enough programs
# without, and would need much memory.
FEW_SUMS = 2048
# Programs that the attention of a decoded token is divided into: four on each multiprocessor of a large GPU.
# A constant, so that the bits of a result do not depend on the GPU.
ATTENTION_PROGRAMS = 512
# Most float32 sums of one of them, which its threads hold in registers.
ATTENTION_SUMS = 32 * 512


def few_splits(blocks: int) -> int:
    """Chains that the blocks of an expert are added in when its tokens are few."""
    return min(MOST_SPLITS, blocks)


def takes_few(most_items: int, items: int, blocks: int) -> bool:
    """Whether a pass is computed by the kernel for few tokens.

    Args:
        most_items: Of an expert.
        items: (token, expert) pairs of the pass.
        blocks: Of an expert.
    """
    return most_items <= FEW_TOKENS and items * few_splits(blocks) <= FEW_SUMS
