"""Checks a budget that the user gave before a conversion, which may take minutes, from headers alone."""

from __future__ import annotations

from dataclasses import replace

from moechat import _native
from moechat.budget.gpu_sizes import CONTEXT_BYTES
from moechat.budget.memory_plan import MEBI, RAM_LABELS, VRAM_LABELS, least_budget, plan_memory
from moechat.budget.needs import GpuMemory, HostMemory, Memory, memory_needs
from moechat.config import cuda_graphs_wanted, user_paths
from moechat.errors import MoechatError
from moechat.geometry import ExpertGeometry
from moechat.hardware.memory import give_back_unused, process_bytes
from moechat.options import LoadOptions
from moechat.outline.config_source import config_in
from moechat.outline.find_outline import find_outline
from moechat.sizes.context_length import context_length
from moechat.sizes.dense_types import resolve_type
from moechat.store.checkpoint import Checkpoint
from moechat.store.tensor_headers import HeaderTable

# What the process may have by now that it will not have when the model is loaded: the checkpoint's headers.
_TOLERANCE = 32 * MEBI


def refuse_small_budget(checkpoint: Checkpoint, geometry: ExpertGeometry, options: LoadOptions) -> None:
    """Refuse a given budget with which loading would fail; any doubt is left to loading.

    Args:
        checkpoint: The model that is about to be converted.
        geometry: Shape and encoding of the experts of its store.
        options: With the budget; without one nothing is refused.

    Raises:
        DoesNotFitError: As in loading.
    """
    on_gpu = options.gpu is not None
    budget = options.vram if on_gpu else options.ram
    if budget is None:
        return
    try:
        outline = find_outline(
            config_in(checkpoint.path),
            resolve_type(options.dtype, on_gpu=on_gpu),
            dense_bits=options.dense_bits,
            activation_bits=options.activation_bits,
            kv_bits=options.kv_bits,
            on_gpu=on_gpu,
            headers=HeaderTable.of(checkpoint),
            directory=user_paths().cache / "outlines",
            keep=False,
        )
    except MoechatError:  # loading says it in its own words
        return
    ctx = None if options.ctx is None else context_length(outline.stated_context, options.ctx)
    learned = options.settings.learned_bytes(
        len(outline.expert_layers), geometry.num_experts, geometry.hidden_size
    )
    needs = memory_needs(outline, geometry, _memory(options), options.conversations, learned=learned)
    # The least that the process, or the context of a GPU, which was not measured, may take then.
    sure = 0 if on_gpu else max(0, needs.base - _TOLERANCE)
    labels = VRAM_LABELS if on_gpu else RAM_LABELS
    if budget < least_budget(replace(needs, base=sure), ctx):
        plan_memory(needs, budget, ctx=ctx, labels=labels)  # names the usual parts


def _memory(options: LoadOptions) -> Memory:
    if options.gpu is not None:
        graphs = cuda_graphs_wanted() and not options.deterministic
        return GpuMemory(CONTEXT_BYTES, graphs, not options.deterministic, "estimate")
    give_back_unused()
    return HostMemory(process_bytes(), _native.num_threads())
