"""What a decoded token does on a GPU beside reading weights: calls of the host, small copies, waits.

The engine's pattern stands here once. Plans and simulations take their times from it, and the model of a GPU in
``scripts/bench/cards`` takes the times of single calls; its test counts the calls that the engine really makes and
compares them with :data:`RESIDENT_LAYER` and :data:`LATE_PART`. So a change of the engine changes this file.

A layer of a token::

    host   graph of the layer's dense part ─ copy of the choice to the host ─ waits ─ Python, cache, link
           ─ lists to the GPU, two kernels over resident blocks ─ lists, two kernels over late ones ─ the sum
    GPU    dense part ────────── the choice ────────(idle)──────── kernels, each behind its lists and copies

Published times are of other programs and machines; none was measured with this engine on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

# Host: replaying a graph. 3.5 to 8 us of processor time (CUDA.jl's manual, usage/graphs).
GRAPH_CALL = 8e-6
# GPU: from one kernel of a graph to the next. A chain of empty kernels takes 15 us and 0.58 us for each, until the
# host knows (RTX 5070 Ti Laptop; https://github.com/ahrefs/ocannl/issues/488).
GRAPH_KERNEL = 0.6e-6
# GPU: from the call to the first kernel, on an idle GPU: those 15 us without the call and the wait.
LAUNCH_LATENCY = 4e-6
# Host: one kernel of Triton from Python: 8.7 us (GB200; https://github.com/vllm-project/vllm/pull/34838) to 11 us
# (https://github.com/meta-pytorch/tritonbench/pull/1002).
TRITON_CALL = 11e-6
# GPU: from one kernel of a stream to the next, if it was launched beforehand (RTX 3080;
# https://github.com/facebookincubator/velox/pull/6096).
STREAM_KERNEL = 3e-6
# Host: giving a copy to the driver, and from then to its first byte: 10 us, of which 5 to 7 are the host's (arXiv
# 2602.21548, section 5.2).
COPY_CALL = 6e-6
COPY_LATENCY = 4e-6
# Host: each copy of a batch beyond that: an estimate.
BATCH_COPY = 0.3e-6
# Host: to record or ask an event; GPU: from an event to what waits for it: 1 us
# (https://github.com/chelsea0x3b/cudarc/pull/335) and 3 us between two streams (the RTX 3080 above).
EVENT_CALL = 1e-6
EVENT_LATENCY = 3e-6
# Host: from an event to the thread that waits for it: the rest of the 15 us above if it spins; a thread that sleeps
# is woken by an interrupt, an estimate.
WAKE_SPINNING = 3e-6
WAKE_SLEEPING = 30e-6
# Host: the interpreter for a layer whose graphs are replayed, without all calls above (measured:
# scripts/bench/cards --host), and the native cache, link and lists (native_runner_test --bench).
LAYER_PYTHON = 60e-6
LAYER_NATIVE = 5e-6
# Host: sampling, text, the token's number and position to the GPU, for each token.
TOKEN_HOST = 200e-6
# Kernels of a decoder layer, counted in transformers' Mixtral and Qwen3-MoE: norms, projections, rotary, cache,
# attention, residuals, router, top-k, and the request; and of the head.
DENSE_KERNELS = 40
HEAD_KERNELS = 6
# Kernels that read the weights of the experts of a launch: gate and up, down.
EXPERT_KERNELS = 2


@dataclass(frozen=True)
class Calls:
    """Calls of the host that one part of a layer makes.

    Attributes:
        graphs: Graphs replayed.
        kernels: Kernels launched one by one.
        to_device: Small copies to the GPU, beside the link.
        to_host: Small copies to the host that it waits for.
    """

    graphs: int = 0
    kernels: int = 0
    to_device: int = 0
    to_host: int = 0

    @property
    def host(self) -> float:
        """Seconds of the host."""
        return (
            self.graphs * GRAPH_CALL
            + self.kernels * TRITON_CALL
            + (self.to_device + self.to_host) * COPY_CALL
            + self.to_host * (EVENT_CALL + WAKE_SPINNING)
        )


# A layer whose experts are all there: its graph, the choice to the host, lists and two kernels, the sum.
RESIDENT_LAYER = Calls(graphs=1, kernels=EXPERT_KERNELS + 1, to_device=1, to_host=1)
# Blocks that are on their way when the layer begins: one more launch, behind their copies.
LATE_PART = Calls(kernels=EXPERT_KERNELS, to_device=1)
# The CPU computes a part: the memory of the sums is cleared, its part is copied to the GPU.
FAR_PART = Calls(kernels=1, to_device=1)
