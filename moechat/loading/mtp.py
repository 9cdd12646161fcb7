"""Loads the head for multi-token prediction of a model whose experts are all mapped, where memory is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moechat.budget.memory_plan import MemoryPlan
from moechat.errors import MoechatError
from moechat.loading.model import Progress, Report
from moechat.loading.weights import load_weights
from moechat.models.decode import install_native_modules
from moechat.models.decode.together import TogetherPass
from moechat.models.mtp import build_mtp_skeleton, mtp_names
from moechat.models.mtp_head import MOST_GUESSES, MtpHead
from moechat.models.mtp_tensors import MtpTensors
from moechat.models.mtp_types import MTP_TYPES
from moechat.models.outlining import outline_skeleton
from moechat.models.threads import make_thread_invariant
from moechat.offload.experts import IMPLEMENTATION, ExpertCounters, ExpertLayer, attach
from moechat.offload.placement import ModelPlacement
from moechat.options import LoadOptions
from moechat.sizes.cache_shape import CacheShape
from moechat.store.store import Store

# Of the head's weights and cache, for what is not counted one by one.
_MARGIN = 1.05


def load_mtp(
    store: Store,
    config: Any,
    main: Any,
    main_cache: CacheShape,
    dtype: torch.dtype,
    options: LoadOptions,
    plan: MemoryPlan,
    placement: ModelPlacement,
    report: Report,
) -> tuple[MtpHead | None, MemoryPlan]:
    """Load the head of a model.

    Args:
        store: The model's store.
        config: The model's configuration.
        main: The model, with its weights and native modules.
        main_cache: Shape of its attention cache.
        dtype: Type that the dense part computes in.
        options: Types and bits, and how many conversations there are.
        plan: Of the model.
        placement: Owner of the memory of packed layers.
        report: Called with the progress of packing.

    Returns:
        The head, and the plan with it; ``None`` and ``plan`` if the store has no head, it does not fit into
        what the plan has left, its layer is not recognised, or, with a notice, its weights cannot be read.
    """
    record = store.manifest.mtp
    if record is None or config.model_type not in MTP_TYPES:
        return None, plan
    skeleton = build_mtp_skeleton(config, dtype, IMPLEMENTATION)
    depth = config.get_text_config().num_hidden_layers
    names = mtp_names(skeleton, store.dense.keys(), depth)
    tensors = MtpTensors(store.dense, names)
    outline, form = outline_skeleton(
        skeleton,
        dtype,
        source=tensors,
        dense_bits=options.dense_bits,
        activation_bits=options.activation_bits,
        kv_bits=options.kv_bits,
    )
    held = outline.form.nbytes + store.geometry.layer_bytes
    held += options.conversations * outline.cache.nbytes(plan.context)
    held += (MOST_GUESSES - 1) * main_cache.state_bytes  # one copy is planned without a head
    nbytes = int(_MARGIN * held)
    if nbytes > plan.budget - plan.total:
        return None, plan
    (entry,) = skeleton.experts
    try:
        load_weights(store, skeleton, form, dtype, placement, report, source=tensors)
        records = store.expert_layer(record.layer)
    except MoechatError as error:
        report(Progress("notice", 0, None, f"the head for multi-token prediction is not used: {error}"))
        return None, plan
    attach(
        entry.module,
        ExpertLayer(
            store.geometry, records, ExpertCounters(), form.activation_bits, store.manifest.mtp_ordinal
        ),
    )
    make_thread_invariant(skeleton.model)

    def install(head: Any) -> TogetherPass | None:
        return install_native_modules(head).together

    try:
        head = MtpHead(skeleton.model, main, outline.cache, install)
    except ValueError:
        return None, plan
    return head, replace(plan, mtp=nbytes)
