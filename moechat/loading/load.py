"""Loads a model in stages, which are the same for CPU and GPU; only the placement differs.

The stages: configuration, skeleton, outline, needs, memory plan, dense weights, far memory, tier, attached
layers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.budget.held_experts import choose_experts
from moechat.budget.knowledge import Knowledge, gather, saved_statistics
from moechat.budget.memory_plan import plan_memory
from moechat.budget.needs import Memory, memory_needs, model_shape, uses_graphs
from moechat.config import user_paths
from moechat.configurator.systems import SYSTEMS, CacheSettings, Policy
from moechat.errors import UnsupportedModelError
from moechat.loading.learned import requests_for
from moechat.loading.model import LoadedModel, Progress, Report
from moechat.loading.mtp import load_mtp
from moechat.loading.weights import load_weights
from moechat.models.outlining import outline_skeleton
from moechat.models.skeleton import Skeleton, build_skeleton, config_from
from moechat.models.waves import Waves
from moechat.offload.accelerator import Accelerator
from moechat.offload.experts import IMPLEMENTATION, ExpertCounters, register
from moechat.offload.host import HostPlacement
from moechat.offload.perfect import refuse_without_replay
from moechat.offload.placement import ModelPlacement
from moechat.offload.settings import OffloadOptions
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.offload.upkeep import Upkeep
from moechat.options import LoadOptions
from moechat.sizes.context_length import context_length, stated_context
from moechat.sizes.model_outline import ModelOutline
from moechat.store.background_check import BackgroundCheck
from moechat.store.checkpoint_files import CONFIG_FILE, config_of
from moechat.store.store import Store
from moechat.store.verified_inputs import verified_bytes


def load_model(store: Store, options: LoadOptions, *, offload: OffloadOptions, report: Report) -> LoadedModel:
    """Plan the memory and load.

    Args:
        store: Verified.
        options: Device, budgets, types and system.
        offload: Settings, link, pages, predictor and replay for tests and measurements.
        report: Called with the progress.

    Raises:
        DoesNotFitError: The budget is too small, or the context is longer than the model allows.
        DeviceUnavailableError: There is no such GPU, or its kernels cannot be built.
        MoechatError: See :mod:`moechat.errors`.
    """
    if options.gpu is None:
        return _load(store, options, offload, report, HostPlacement(), None)
    gpu: Accelerator = offload.accelerator or Accelerator(options.gpu)
    # Only with a GPU: it imports Triton, which machines without one may lack.
    from moechat.offload.gpu import GpuPlacement

    with gpu.active():
        placement = GpuPlacement(gpu, store.geometry)
        try:
            return _load(store, options, offload, report, placement, gpu)
        except BaseException:
            placement.close()
            raise


def _load(
    store: Store,
    options: LoadOptions,
    offload: OffloadOptions,
    report: Report,
    placement: ModelPlacement,
    gpu: Accelerator | None,
) -> LoadedModel:
    settings = _settings(options, offload)
    refuse_without_replay(settings, offload.replay)
    report(Progress("load", 0, None, "dense weights"))
    config = config_from(config_of(store.path / CONFIG_FILE, verified_bytes(store, CONFIG_FILE)), store.path)
    ctx = None if options.ctx is None else context_length(stated_context(config), options.ctx)
    dtype = placement.dtype(options.dtype)
    register()
    skeleton = build_skeleton(config, dtype, IMPLEMENTATION)
    _check_same_experts(skeleton, store)
    outline, form = outline_skeleton(
        skeleton,
        dtype,
        source=store.dense,
        dense_bits=options.dense_bits,
        activation_bits=options.activation_bits,
        kv_bits=options.kv_bits,
        on_gpu=gpu is not None,
    )

    memory = placement.memory(options)
    learned = settings.learned_bytes(
        len(store.layers), store.geometry.num_experts, store.geometry.hidden_size
    )
    needs = memory_needs(outline, store.geometry, memory, options.conversations, learned=learned)
    plan = plan_memory(
        needs,
        placement.budget(options, needs.base),
        ctx=ctx,
        pages=offload.pages,
        labels=placement.labels,
        keeps_experts=settings.keeps_experts and offload.link.kind == "file",
    )
    placement.reserve(plan)
    mapped = plan.mapped and placement.maps_experts

    load_weights(store, skeleton, form, dtype, placement, report)
    predict = settings.predicts and offload.predictor is None and not mapped
    native_modules, predictor = placement.adopt(
        skeleton, form, prefetch=settings.prefetch if predict else "none"
    )
    activations = recorded_activations(store, outline, settings)
    if offload.link.kind == "file":
        placement.read_far(
            store,
            options,
            activations,
            lambda done, total: report(Progress("load", done, total, "experts into memory")),
        )

    counters = ExpertCounters()
    parts = tuple(entry.module for entry in skeleton.experts)
    tier = upkeep = decoder = None
    notes: list[str] = []
    if not mapped:
        tier = ExpertTier(
            TierConfig(
                store,
                outline.top_k,
                link=offload.link,
                predictor=offload.predictor or predictor,
                requests=requests_for(
                    store,
                    skeleton.model,
                    skeleton.experts,
                    settings,
                    outline.top_k,
                    on_gpu=gpu is not None,
                    warn=notes.append,
                ),
                replay=offload.replay,
                activation_bits=options.activation_bits,
            ),
            placement,
            pages=needs.blocks + needs.spare_pages if plan.mapped else plan.pages,
            lent=plan.lent_pages,
            cached=choose_experts(
                len(store.layers), store.geometry.num_experts, plan.cached_experts, activations
            ),
            settings=settings,
            counters=counters,
            knowledge=gather_knowledge(store, outline, settings, placement, memory),
        )
        upkeep = _upkeep(tier, store, outline, memory, options.replan_tokens)
        for note in notes:
            upkeep.notify(note)
        try:
            placement.warm(skeleton.model, outline.top_k, dtype)
            if gpu is not None and tier.pages >= tier.blocks:
                tier.fill(lambda done, total: report(Progress("load", done, total, "experts to the GPU")))
        except BaseException:
            tier.close()
            raise
        decoder = placement.decoder(
            skeleton.model, parts, dtype, upkeep.notify, graphs=uses_graphs(outline, memory)
        )
    head = None
    if mapped and gpu is None and native_modules.together is not None:
        head, plan = load_mtp(
            store, config, skeleton.model, outline.cache, dtype, options, plan, placement, report
        )
    loaded = LoadedModel(
        store=store,
        config=config,
        model=skeleton.model,
        outline=outline,
        form=form,
        chunk=outline.chunk,
        waves=Waves(skeleton.model, skeleton.layers_name, parts),
        plan=plan,
        near=tier,
        counters=counters,
        parts=parts,
        upkeep=upkeep,
        native_modules=native_modules,
        accelerator=gpu,
        decoder=decoder,
        conversations=options.conversations,
        check=BackgroundCheck(store, user_paths().state, mapped=tier is None or tier.cached is not None),
        mtp=head,
    )
    if tier is None:
        loaded.map_experts()
    else:
        loaded.page_experts()
    return loaded


def gather_knowledge(
    store: Store,
    outline: ModelOutline,
    settings: CacheSettings,
    placement: ModelPlacement,
    memory: Memory | None = None,
) -> Knowledge:
    """Statistics and costs that the targets of a tier are made from; ``memory`` as of :func:`model_shape`."""
    return gather(
        model_shape(outline, store.geometry, memory),
        store.manifest.model_type,
        store.manifest.source.fingerprint,
        _ranked_by(settings),
        dtype=outline.dtype,
        threads=_native.num_threads(),
        dense_bits=outline.form.bits,
        dense_bytes=outline.form.nbytes,
        activation_bits=outline.form.activation_bits,
        kv_bits=outline.cache.bits,
        near=placement.near,
        in_ram=placement.in_ram,
    )


def recorded_activations(
    store: Store, outline: ModelOutline, settings: CacheSettings
) -> npt.NDArray[np.int64] | None:
    """How often each expert was activated in earlier runs, ``[layers, experts]``; ``None``: nothing usable
    was recorded.
    """
    shape, fingerprint = model_shape(outline, store.geometry), store.manifest.source.fingerprint
    seen = saved_statistics(shape, fingerprint, _ranked_by(settings), [])
    return None if seen is None else seen.activations


def _ranked_by(settings: CacheSettings) -> Policy:
    """The policy whose statistics are used."""
    # Systems with a static set choose it by the popularity of experts, which auto records.
    return SYSTEMS["auto"].policy if settings.policy in ("static", "belady") else settings.policy


def _upkeep(
    tier: ExpertTier, store: Store, outline: ModelOutline, memory: Memory, replan_tokens: int
) -> Upkeep:
    assert tier.knowledge is not None  # the tier was made with it
    return Upkeep(
        tier,
        model_shape(outline, store.geometry, memory),
        model_type=store.manifest.model_type,
        fingerprint=store.manifest.source.fingerprint,
        knowledge=tier.knowledge,
        every=replan_tokens,
    )


def _settings(options: LoadOptions, offload: OffloadOptions) -> CacheSettings:
    if offload.cache is None:
        return options.settings
    return replace(offload.cache, miss="fetch") if options.deterministic else offload.cache


def _check_same_experts(skeleton: Skeleton, store: Store) -> None:
    """Check that a store has the expert layers of its configuration.

    Raises:
        UnsupportedModelError: They differ in number or shape.
    """
    built = [
        (entry.layer, entry.num_experts, entry.hidden_size, entry.intermediate_size)
        for entry in skeleton.experts
    ]
    geometry = store.geometry
    shape = (geometry.num_experts, geometry.hidden_size, geometry.intermediate_size)
    stored = [(record.layer, *shape) for record in store.manifest.layers]
    if built != stored:
        raise UnsupportedModelError(
            f"{store.path} holds {len(stored)} expert layers unlike the {len(built)} of its configuration",
            hint="it was made with another version of transformers; convert the checkpoint again",
        )
