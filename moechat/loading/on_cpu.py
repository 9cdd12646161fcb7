"""Loading for the CPU: plan the memory of the process, load the weights."""

from __future__ import annotations

import torch

from moechat import _native
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.hardware.memory import available_bytes, give_back_unused, resident_bytes
from moechat.loading.model import LoadedModel, Progress, Report, Trial, check_same_experts
from moechat.loading.packing import packed_file, packing_progress
from moechat.models.assets import context_length
from moechat.models.attention_cache import CacheShape, cache_shape
from moechat.models.decode import quicken
from moechat.models.dense import load_dense, loading_bytes, stored_types
from moechat.models.dense_form import DenseForm, choose_form, watched_weights
from moechat.models.footprint import (
    one_pass_bytes,
    pass_tokens,
    prefill_chunk,
    scratch_bytes,
    workspace_bytes,
)
from moechat.models.packed import pack_layers
from moechat.models.shape import configured_top_k
from moechat.models.skeleton import Skeleton, build_skeleton, load_config
from moechat.models.threads import steady_modules
from moechat.offload.budget import Needs, automatic_budget, plan_memory
from moechat.offload.cached import MIN_PAGES, NearTier, shape_of
from moechat.offload.experts import IMPLEMENTATION, ExpertCounters, attach, register
from moechat.offload.perfect import refuse_without_replay
from moechat.offload.planner import gather
from moechat.offload.settings import OffloadOptions
from moechat.offload.upkeep import REPLAN_TOKENS, Upkeep
from moechat.store.store import Store


def load_model(
    store: Store,
    *,
    dtype: torch.dtype,
    ctx: int | None,
    budget: int | None,
    settings: CacheSettings,
    offload: OffloadOptions,
    report: Report,
    replan_tokens: int = REPLAN_TOKENS,
    dense_bits: int = 16,
    activation_bits: int = 16,
) -> LoadedModel:
    """Plan the memory and load.

    Args:
        store: Verified.
        dtype: That the dense part computes in.
        ctx: Context length wanted; ``None`` leaves it to the model and the memory.
        budget: Bytes for the whole process; ``None`` takes what is available.
        settings: Of the near tier.
        offload: Link, pages, predictor and replay for tests and measurements.
        report: Progress.
        replan_tokens: Decoded tokens after which a new plan is due; 0: never.
        dense_bits: 16, 8 or 4 bits a dense weight.
        activation_bits: 8, 16 or 32: how inputs meet quantised weights.

    Raises:
        DoesNotFitError: The budget is too small, or the context is longer than the model allows.
        MoechatError: See :mod:`moechat.errors`.
    """
    refuse_without_replay(settings, offload.replay)
    report(Progress("load", 0, None, "dense weights"))
    register()
    config = load_config(store.path)
    own = context_length(config, None)
    wanted = None if ctx is None else context_length(config, ctx)
    skeleton = build_skeleton(config, dtype, IMPLEMENTATION)
    check_same_experts(skeleton, store)
    trial = Trial()
    for entry in skeleton.experts:
        attach(entry.module, trial)
    with watched_weights(skeleton.model) as reads:
        shape = cache_shape(skeleton.model, skeleton.model.config, dtype)
    form = choose_form(
        skeleton,
        stored_types(skeleton, store.dense),
        bits=dense_bits,
        activation_bits=activation_bits,
        reads=reads,
    )
    top_k = min(max(trial.top_k, default=configured_top_k(config)), store.geometry.num_experts)
    needs = _needs(store, skeleton, dtype, form, shape, top_k, own)
    limit = automatic_budget(available_bytes(), needs.base) if budget is None else budget
    plan = plan_memory(needs, limit, given=budget is not None, ctx=wanted, pages=offload.pages)

    load_dense(skeleton, store.dense, form)
    if form.packs:
        file = packed_file(store, form, dtype)
        pack_layers(skeleton, store.dense, form, file, packing_progress(form, report))
    # What conversions left in the heap, so that it does not stay beside the pages.
    give_back_unused()
    steady_modules(skeleton.model)
    quickened = quicken(skeleton.model)
    counters = ExpertCounters()
    near = upkeep = None
    if not plan.mapped:
        near, upkeep = _near_tier(
            store, skeleton, plan.pages, top_k, settings, offload, counters, dtype, form, replan_tokens
        )
    loaded = LoadedModel(
        store=store,
        config=config,
        model=skeleton.model,
        dtype=dtype,
        form=form,
        cache=shape,
        chunk=prefill_chunk(skeleton.model.config),
        plan=plan,
        near=near,
        counters=counters,
        top_k=top_k,
        parts=tuple(entry.module for entry in skeleton.experts),
        upkeep=upkeep,
        quickened=quickened,
    )
    if near is None:
        loaded.map_experts()
    else:
        loaded.page_experts()
    return loaded


def _near_tier(
    store: Store,
    skeleton: Skeleton,
    pages: int,
    top_k: int,
    settings: CacheSettings,
    offload: OffloadOptions,
    counters: ExpertCounters,
    dtype: torch.dtype,
    form: DenseForm,
    replan_tokens: int,
) -> tuple[NearTier, Upkeep]:
    predictor = offload.predictor
    if predictor is None and settings.prefetch == "next-router":
        from moechat.models.routers import find_routers
        from moechat.predict import NextRouterPredictor

        predictor = NextRouterPredictor(find_routers(skeleton.model, skeleton.experts))
    shape = shape_of(
        store,
        top_k,
        dense_bytes=form.in_layers,
        head_bytes=form.head_bytes,
        itemsize=form.itemsize,
    )
    family = store.manifest.model_type
    fingerprint = store.manifest.source.fingerprint
    # A set that never changes is chosen by how popular experts are, which auto has counted.
    ranked_by = SYSTEMS["auto"].policy if settings.policy in ("static", "belady") else settings.policy
    knowledge = gather(
        shape,
        family,
        fingerprint,
        ranked_by,
        dtype=str(dtype).removeprefix("torch."),
        threads=_native.num_threads(),
        dense_bits=form.bits,
        activation_bits=form.activation_bits,
    )
    near = NearTier(
        store,
        pages=pages,
        top_k=top_k,
        settings=settings,
        link=offload.link,
        predictor=predictor,
        replay=offload.replay,
        counters=counters,
        knowledge=knowledge,
        activation_bits=form.activation_bits,
    )
    upkeep = Upkeep(
        near, shape, model_type=family, fingerprint=fingerprint, knowledge=knowledge, every=replan_tokens
    )
    return near, upkeep


def _needs(
    store: Store,
    skeleton: Skeleton,
    dtype: torch.dtype,
    form: DenseForm,
    shape: CacheShape,
    top_k: int,
    own_context: int,
) -> Needs:
    config = skeleton.model.config
    geometry = store.geometry
    routers = 0
    if dtype != torch.float32:
        # Prediction keeps the routers in float32.
        routers = len(skeleton.experts) * geometry.num_experts * geometry.hidden_size * 4

    def workspace(context: int) -> int:
        tokens = pass_tokens(config, shape, context)
        if shape.appendable:
            return workspace_bytes(config, dtype, tokens, context)
        return one_pass_bytes(config, dtype, context)

    longest = pass_tokens(config, shape, own_context)
    give_back_unused()
    return Needs(
        base=resident_bytes(),
        dense=form.nbytes + routers,
        loading=loading_bytes(skeleton, store.dense, form),
        kv=shape.nbytes,
        workspace=workspace,
        scratch=scratch_bytes(geometry.hidden_size, geometry.blocks_per_expert, top_k, longest),
        page_bytes=geometry.record_bytes,
        blocks=len(store.layers) * geometry.num_experts * geometry.blocks_per_expert,
        min_pages=MIN_PAGES,
        own_context=own_context,
        threads=_native.num_threads(),
    )
