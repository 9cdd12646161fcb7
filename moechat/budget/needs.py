"""The one account of memory: what a model takes of the memory that computes, for plans and for loading."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.budget.gpu_sizes import (
    ATTENTION_PROGRAMS,
    ATTENTION_SUMS,
    FEW_SUMS,
    MIN_PAGES,
    PAIR_BYTES,
    SHARED_TOKENS,
    WORK_PAIRS,
    few_splits,
)
from moechat.budget.memory_plan import Basis, Needs
from moechat.configurator.estimate import ModelShape
from moechat.geometry import ExpertGeometry
from moechat.sizes.footprint import split_sums, workspace_bytes
from moechat.sizes.model_outline import ModelOutline

# Tokens that a decoded token attends to, where its time is estimated.
SPEED_CONTEXT = 1024
# Tokens that most conversations do not exceed: the rest of the attention cache is lent to pages until then.
_USUAL_TOKENS = 4096
# Workspaces of the libraries of dense products, taken at first use; cuBLAS takes 8 to 32 MiB a stream.
LIBRARY_BYTES = 96 << 20
# Pieces of 2 to 20 MiB that torch's allocator rounds up to.
_ROUNDING_BYTES = 64 << 20
# CUDA graphs besides their tensors: 32 MiB for the libraries' workspace of the stream that they are
# recorded in; pieces of 20 MiB that their memory is rounded up to; the driver's own record of their kernels,
# 1 to 2 KiB each, some 4,300 a token of 48 layers with its experts, as single layers and as a whole; the
# table of pages, 0.3 to 2 MiB.
_GRAPH_BYTES = 64 << 20


# Operations that a fast machine computes in the time in which a byte of experts arrives: on an RTX 4090,
# 85 * 10^12 a second of products with quantised weights against 25 * 10^9 bytes over PCIe 4.0 x16; on 16
# cores with AVX-512, 0.75 * 10^12 against 3 * 10^9 of an SSD. A wave so long that computing it takes longer
# than moving its experts gains nothing by being longer.
_OPERATIONS_OF_GPU = 3400
_OPERATIONS_OF_CPU = 250


@dataclass(frozen=True)
class HostMemory:
    """The memory of a process that computes on the CPU.

    Attributes:
        base: Bytes that the process has when the plan is made.
        threads: Threads that compute.
        basis: Source of ``base``.
    """

    base: int
    threads: int
    basis: Basis = "measured"


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU that computes.

    Attributes:
        base: Bytes of the CUDA context: the driver's own, and the kernels that torch and the libraries load.
        graphs: Decoded tokens may be replayed from CUDA graphs, where the model's attention cache allows it.
        waves: Prompts may be computed in waves. How long they are depends on the budget, and on a GPU the
            rounding of the experts' sums depends on it.
        basis: Source of ``base``.
    """

    base: int
    graphs: bool = True
    waves: bool = True
    basis: Basis = "measured"


Memory = HostMemory | GpuMemory


def memory_needs(
    outline: ModelOutline,
    geometry: ExpertGeometry,
    memory: Memory,
    conversations: int = 1,
    *,
    learned: int = 0,
) -> Needs:
    """The bytes that a model takes, part by part, of the memory that its dense part and its pages lie in.

    Args:
        outline: The model's sizes.
        geometry: Shape and encoding of its experts.
        memory: The memory.
        conversations: Attention caches that are kept.
        learned: Bytes of the process for what a predictor learns.
    """
    on_gpu = isinstance(memory, GpuMemory)
    # Routers in float32, for prediction: on the CPU they are the model's own where that computes in float32.
    copies = outline.router_copies if on_gpu or outline.itemsize < 4 else 0
    replays = uses_graphs(outline, memory)

    def workspace(context: int) -> int:
        total = outline.workspace(context, on_gpu=on_gpu)
        if on_gpu:
            total += _expert_workspace(outline, geometry, outline.pass_tokens(context))
        if replays:
            # A pass of one token in memory of its own, beside the memory of a prompt's passes. Its attention
            # reads the cache in place, so nothing grows with the context.
            total += _GRAPH_BYTES + workspace_bytes(outline.sizes, outline.itemsize, 1, 1, on_gpu=True)
            total += split_sums(outline.sizes, ATTENTION_PROGRAMS, ATTENTION_SUMS)
            if outline.cache.has_states:
                # A replay that is compared needs two copies of the states. The cache counts one that waves
                # need, so this is one more, and as much for what torch makes of the states of a layer.
                total += 2 * outline.cache.state_bytes
        return total

    def wave(tokens: int, context: int) -> int:
        total = outline.wave(tokens, context, on_gpu=on_gpu)
        if on_gpu:
            total += _expert_workspace(outline, geometry, tokens)
            total -= _expert_workspace(outline, geometry, outline.pass_tokens(context))
        return total

    def wave_scratch(tokens: int) -> int:
        # The workspace of a GPU's experts is part of the wave.
        return 0 if on_gpu else outline.scratch_for(tokens) - outline.scratch

    def kv(tokens: int) -> int:
        return conversations * outline.cache.nbytes(tokens)

    def kv_idle(tokens: int) -> int:
        # A GPU's cache has its memory from the beginning, and so has one that the model makes itself.
        if on_gpu or not outline.cache.reserved:
            return 0
        return kv(tokens) - outline.cache.nbytes(min(_USUAL_TOKENS, tokens))

    return Needs(
        base=memory.base,
        base_name="CUDA context" if on_gpu else "process",
        basis=memory.basis,
        dense=outline.dense_bytes + copies,
        loading=0 if on_gpu else outline.loading,
        kv=kv,
        kv_idle=kv_idle,
        workspace=workspace,
        scratch=LIBRARY_BYTES + _ROUNDING_BYTES + outline.unpacked if on_gpu else outline.scratch + learned,
        page_bytes=geometry.record_bytes,
        blocks=len(outline.expert_layers) * geometry.num_experts * geometry.blocks_per_expert,
        # Targets leave a reserve of pages, so a GPU that holds all experts needs one more.
        expert_blocks=geometry.blocks_per_expert,
        spare_pages=1 if on_gpu else 0,
        min_pages=MIN_PAGES,
        own_context=outline.own_context,
        threads=memory.threads if isinstance(memory, HostMemory) else 0,
        chunk=0 if isinstance(memory, GpuMemory) and not memory.waves else outline.wave_chunk,
        wave=wave,
        wave_scratch=wave_scratch,
        operations=2 * outline.active_parameters,
        operations_per_byte=_OPERATIONS_OF_GPU if on_gpu else _OPERATIONS_OF_CPU,
    )


def uses_graphs(outline: ModelOutline, memory: Memory) -> bool:
    """Whether decoded tokens are replayed from CUDA graphs."""
    return isinstance(memory, GpuMemory) and memory.graphs and outline.can_replay


def model_shape(outline: ModelOutline, geometry: ExpertGeometry, memory: Memory | None = None) -> ModelShape:
    """The sizes that the time of a token depends on.

    Args:
        outline: The model's sizes.
        geometry: Shape and encoding of its experts.
        memory: The memory that computes; ``None``: decoded tokens are replayed if that is a GPU's.
    """
    graphs = not isinstance(memory, GpuMemory) or uses_graphs(outline, memory)
    return ModelShape(
        layers=len(outline.expert_layers),
        experts=geometry.num_experts,
        top_k=outline.top_k,
        bits=geometry.bits,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=outline.expert_weights,
        dense_bytes=outline.form.in_layers,
        head_bytes=outline.form.head_bytes,
        dense_itemsize=outline.form.itemsize,
        kv_bytes=outline.cache.read_bytes(SPEED_CONTEXT) // SPEED_CONTEXT,
        hidden_size=geometry.hidden_size,
        grids=geometry.grid_share,
        kernels=outline.kernels if graphs else outline.torch_kernels,
        graphs=graphs,
    )


def _expert_workspace(outline: ModelOutline, geometry: ExpertGeometry, tokens: int) -> int:
    """Bytes of the experts of one layer on a GPU: activations, outputs of every item (a token of one
    expert), inputs and outputs of the part that the CPU computes.
    """
    items = tokens * outline.top_k
    pairs = min(WORK_PAIRS, items * geometry.blocks_per_expert)
    # Passes of few tokens keep their outputs in several chains.
    chains = min(items * few_splits(geometry.blocks_per_expert), FEW_SUMS)
    outputs = max(items, chains) + 3 * min(tokens, SHARED_TOKENS)
    return pairs * PAIR_BYTES + outputs * geometry.layout.hidden_padded * 4
