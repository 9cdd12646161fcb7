"""What a decoded token does on a GPU beside reading weights: calls of the host, small copies, waits.

The engine's pattern stands here once: :func:`gpu_calls`. Plans and simulations take their times from it. The
model of a GPU in ``scripts/bench/cards`` takes only the times of single calls, and counts those that the
engine makes, so the two disagree where the pattern is not the engine's any more.

Where every block is on the GPU (:func:`runs_ahead`), a token is two graphs::

    host   graph of all layers, graph of the head ─ waits ─ accounts for the layers ─ waits for the token
    GPU    layer ─ lookup ─ experts ─ sum ─ layer ─ ... ────── head ──────────────── the token

Else a layer of a token::

    host   graph of the layer's dense part ─ waits ─ cache, link
           ─ lists to the GPU, a kernel over resident blocks ─ lists, a kernel over late ones ─ the sum
    GPU    dense part ─ copy of the choice ─────(idle)──────── kernels, each behind its lists and copies

Published times are of other programs and machines. One was measured with this engine, on an H100 whose host
is a virtual machine: the time of a kernel in a graph. Numbers of kernels are those of recorded passes
(tests/offload/device/test_fused_layers.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moechat.hardware.profile import Figure, GpuFigures

# Host: replaying a graph. 3.5 to 8 us of processor time (CUDA.jl's manual, usage/graphs).
GRAPH_CALL = 8e-6
# GPU: from one small kernel of a graph to the next. Norms, casts, additions and the like run for 1.0 to 2.7
# us, and the next begins 0.3 to 0.6 us later (H100, torch's profiler over recorded passes of Qwen3-30B-A3B).
# Empty ones take 0.58 us each (RTX 5070 Ti Laptop; https://github.com/ahrefs/ocannl/issues/488).
GRAPH_KERNEL = 1.9e-6
# GPU: from the call to the first kernel, on an idle GPU. A chain of those empty ones takes 15 us besides,
# until the host knows: without the call and the wait.
LAUNCH_LATENCY = 4e-6
# Host: one kernel, launched by native code: 4.9 us from C, nearly all of it in the driver
# (https://github.com/JuliaGPU/CUDAdrv.jl/pull/15). By Triton it would take 8.7 us (GB200;
# https://github.com/vllm-project/vllm/pull/34838) to 11 us
# (https://github.com/meta-pytorch/tritonbench/pull/1002).
KERNEL_CALL = 4.9e-6
# GPU: from one kernel of a stream to the next, if it was launched beforehand (RTX 3080;
# https://github.com/facebookincubator/velox/pull/6096).
STREAM_KERNEL = 3e-6
# Host: giving a copy to the driver, and from then to its first byte: 10 us, of which 5 to 7 are the host's
# (arXiv 2602.21548, section 5.2).
COPY_CALL = 6e-6
COPY_LATENCY = 4e-6
# Host: each copy of a batch beyond that: an estimate.
BATCH_COPY = 0.3e-6
# Host: to record or ask an event; GPU: from an event to what waits for it: 1 us
# (https://github.com/chelsea0x3b/cudarc/pull/335) and 3 us between two streams (the RTX 3080 above).
EVENT_CALL = 1e-6
EVENT_LATENCY = 3e-6
# Host: from an event to the thread that waits for it: the rest of the 15 us above if it spins. The link's
# thread looks every 10 us while there is work (native/src/link/cuda_link.cc), and a timer wakes it some 5 us
# late: an estimate.
WAKE_SPINNING = 3e-6
WAKE_POLLING = 10e-6
# The host's own work for a layer that is replayed from graphs, without the calls above: what the cache
# decides, its lists, and one call from Python (moechat/offload/launched_layers.py). Measured as 27 us where
# all is there and 35 us where one layer of ten lacks an expert, on a server's core
# (tests/support/host_time.py; launched from Python, the same layers take 122 and 134 us there).
LAYER_HOST = 30e-6
# Host: accounting for a layer that the GPU has computed by itself: measured as 3 us with 8 experts a layer
# and 6.4 us with 128 on a server's core (tests/support/host_time.py).
LAYER_ACCOUNT = 6.5e-6
# Host: sampling, text, the token's number and position to the GPU, for each token.
TOKEN_HOST = 200e-6
# Kernels of a decoder layer of plain attention behind norms (moechat/offload/fused_layers.py), without its
# experts; a copy of the request is counted with the wait for the choice. Other layers have others
# (moechat/sizes/layer_kernels.py). And of the head.
DENSE_KERNELS = 9
HEAD_KERNELS = 6
# Host: a kernel that torch launches from Python, where tokens are not replayed: an estimate, at the lower end
# of 5 to 25 us for an operation (jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html).
EAGER_CALL = 8e-6
# Kernels of a layer that torch launches, at least: those of plain attention, counted on an H100.
EAGER_KERNELS = 25
# Kernels of a decoded token that read the weights of the experts of a launch.
EXPERT_KERNELS = 1
# And of a layer that the GPU runs by itself: the lookup of its blocks.
LOOKUP_KERNELS = 1
# Fields that plans alone need.
_NOT_OF_TIMELINES = (
    *("kernels", "graph_kernel", "triton", "account", "start", "finish"),
    *("dense_kernels", "eager"),
)


@dataclass(frozen=True)
class GpuCalls:
    """Seconds of the host's thread, of the GPU between kernels, of small copies. All 0: they take no time.

    The names are those of ``CallCosts`` in ``native/src/simulate/clocks.h``.

    Attributes:
        dense: Host: from the last call of a layer to the first kernel of the next layer's dense part.
        choice: From the end of a dense part until the host knows the choice and begins the layer.
        clear: Host: of a layer that the CPU may compute a part of, to clear the memory of the sums.
        lists: Host: to give the lists of a launch to the GPU.
        list_latency: From there until they may move.
        list_copy: Time of the link that they take.
        launch: From there until the first kernel of a launch may begin.
        launch_host: Host: the kernels of a launch.
        event: GPU: from the end of a copy to the kernel that waits for it.
        sum: Host: the sum of a layer.
        sum_gpu: GPU: the same.
        kernels: GPU: between the kernels of a launch, for any number of blocks.
        graph_kernel: GPU: from one kernel of a graph to the next.
        triton: Host: one kernel of Triton.
        link_call: Host: a batch of copies.
        link_copy: Host: each copy of it.
        link_wake: From the end of a batch until the link's thread begins the next prefetch.
        account: Of a token whose layers do not wait for the host. Host: from the end of the layers until it
            has accounted for all of them, while the GPU computes the head. 0: the layers wait for the host.
        start: Of such a token: until the GPU begins.
        finish: Of such a token: from the end of the head until the host knows it.
        dense_kernels: Kernels of a layer without its experts.
        eager: Host: to launch one of them by torch; 0: they are replayed.
    """

    dense: float = 0.0
    choice: float = 0.0
    clear: float = 0.0
    lists: float = 0.0
    list_latency: float = 0.0
    list_copy: float = 0.0
    launch: float = 0.0
    launch_host: float = 0.0
    event: float = 0.0
    sum: float = 0.0
    sum_gpu: float = 0.0
    kernels: float = 0.0
    graph_kernel: float = 0.0
    triton: float = 0.0
    link_call: float = 0.0
    link_copy: float = 0.0
    link_wake: float = 0.0
    account: float = 0.0
    start: float = 0.0
    finish: float = 0.0
    dense_kernels: float = DENSE_KERNELS
    eager: float = 0.0

    @property
    def ahead(self) -> bool:
        """Whether they are of tokens that are two graphs."""
        return self.account > 0

    def layer(self, reading: float) -> float:
        """Seconds of a layer without its experts, whose kernels read weights for so long."""
        return self._computed(reading, self.dense_kernels) + self.dense + self.choice

    def head(self, reading: float) -> float:
        """Seconds of the head and of everything else of a token."""
        computed = self._computed(reading, HEAD_KERNELS)
        if self.ahead:
            return self.start + max(computed, self.account) + self.finish + TOKEN_HOST
        return computed + self.dense + self.choice - LAYER_HOST + TOKEN_HOST

    def _computed(self, reading: float, kernels: float) -> float:
        """Seconds of kernels that read weights for so long; the host launches them meanwhile, or before."""
        return max(reading + kernels * self.graph_kernel, kernels * self.eager)

    def experts(self, reading: float) -> float:
        """Seconds of a layer's experts, all there, whose kernels read weights for so long.

        The GPU works while the host launches the rest.
        """
        host = self.launch_host - self.triton + self.sum
        return self.lists + self.launch + max(self.kernels + reading + self.sum_gpu, host)

    def timeline(self) -> dict[str, float]:
        """As the native timeline takes them."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_OF_TIMELINES}


def runs_ahead(pages: int, blocks: int, *, graphs: bool, wanted: bool | None) -> bool:
    """Whether a token waits for the host at no layer: it is two graphs, of all layers and of the head.

    Args:
        pages: On the GPU.
        blocks: Of all experts of the model: each needs a page.
        graphs: Decoded tokens are replayed from graphs.
        wanted: By the user: ``False`` switches it off (:func:`moechat.config.run_ahead_wanted`).
    """
    return graphs and wanted is not False and pages >= blocks


def gpu_calls(
    copy_overhead: float,
    gpu: GpuFigures | None = None,
    *,
    ahead_layers: int = 0,
    dense_kernels: float = DENSE_KERNELS,
    graphs: bool = True,
) -> GpuCalls:
    """The engine's calls.

    Args:
        copy_overhead: Seconds that a copy takes besides its bytes.
        gpu: The GPU; what was measured on it replaces the published times.
        ahead_layers: Layers of a token that waits for the host at none of them (:func:`runs_ahead`); 0: it
            waits.
        dense_kernels: Kernels of a layer without its experts.
        graphs: Tokens are replayed from CUDA graphs.
    """

    def measured(name: str, published: float) -> float:
        figure: Figure | None = getattr(gpu, name, None)
        return published if figure is None else figure.value

    # The figure is for all kernels of a layer, the sum's included.
    triton = measured("call", (EXPERT_KERNELS + 1) * KERNEL_CALL) / (EXPERT_KERNELS + 1)
    # The copy has been given to the GPU meanwhile.
    waiting = copy_overhead + WAKE_SPINNING
    node = measured("graph_node", GRAPH_KERNEL)
    if ahead_layers > 0:
        return GpuCalls(
            sum_gpu=node,
            kernels=(LOOKUP_KERNELS + EXPERT_KERNELS) * node,
            graph_kernel=node,
            account=WAKE_SPINNING + ahead_layers * LAYER_ACCOUNT,
            start=measured("graph_launch", GRAPH_CALL) + LAUNCH_LATENCY,
            finish=measured("round_trip", waiting),
            dense_kernels=dense_kernels,
        )
    return GpuCalls(
        dense=(measured("graph_launch", GRAPH_CALL) if graphs else EAGER_CALL) + LAUNCH_LATENCY,
        choice=measured("round_trip", waiting) + LAYER_HOST,
        # The first launch of a layer clears what it does not write.
        clear=0.0,
        lists=COPY_CALL,
        list_latency=COPY_LATENCY,
        list_copy=copy_overhead,
        launch=triton + LAUNCH_LATENCY,
        launch_host=EXPERT_KERNELS * triton,
        event=EVENT_LATENCY,
        sum=triton,
        sum_gpu=STREAM_KERNEL,
        kernels=EXPERT_KERNELS * STREAM_KERNEL,
        graph_kernel=node if graphs else STREAM_KERNEL,
        dense_kernels=dense_kernels if graphs else max(dense_kernels, EAGER_KERNELS),
        eager=0.0 if graphs else EAGER_CALL,
        triton=triton,
        link_call=COPY_CALL + 2 * EVENT_CALL,
        link_copy=BATCH_COPY,
        link_wake=WAKE_POLLING,
    )
