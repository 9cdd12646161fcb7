"""Loading for a graphics card: experts in the host's memory, the rest and a cache of blocks on the card."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from moechat.config import cuda_graphs_wanted
from moechat.configurator.estimate import ModelShape
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.errors import DoesNotFitError, MoechatWarning
from moechat.hardware.memory import available_bytes, give_back_unused
from moechat.loading.model import LoadedModel, Progress, Report, Trial, check_same_experts
from moechat.loading.packing import packed_file, packing_progress
from moechat.models.assets import context_length
from moechat.models.attention_cache import CacheShape, cache_shape
from moechat.models.decode import Quickened
from moechat.models.dense import load_dense, stored_types
from moechat.models.dense_form import DenseForm, choose_form, unpacked_bytes, watched_weights
from moechat.models.footprint import one_pass_bytes, pass_tokens, prefill_chunk, workspace_bytes
from moechat.models.packed import pack_layers
from moechat.models.routers import find_routers
from moechat.models.shape import configured_top_k
from moechat.models.skeleton import Skeleton, build_skeleton, load_config
from moechat.offload.accelerator import Accelerator
from moechat.offload.budget import Needs, Words, plan_memory
from moechat.offload.cached import MIN_PAGES, shape_of
from moechat.offload.experts import IMPLEMENTATION, ExpertCounters, attach, register
from moechat.offload.far_memory import FarMemory
from moechat.offload.graph_decoder import MOST_BUCKET, GraphDecoder
from moechat.offload.kernels.launch import FEW_TOKENS, SPLITS
from moechat.offload.on_device import PAIR_BYTES, SHARED_TOKENS, WORK_PAIRS, DeviceTier, routers_on
from moechat.offload.packed_on_card import CardMemory, warm_packed_layers
from moechat.offload.perfect import refuse_without_replay
from moechat.offload.planner import Knowledge, gather
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.upkeep import REPLAN_TOKENS, Upkeep
from moechat.routing import Replay
from moechat.store.files import format_bytes
from moechat.store.store import Store

_WORDS = Words("--vram (vram=)", "the budget of graphics memory", "the graphics memory that is free")
# The libraries of dense products set up their workspaces at first use; cuBLAS takes 8 to 32 MiB a stream.
_LIBRARY_BYTES = 96 << 20
# torch's allocator rounds what it takes from the card up to pieces of 2 to 20 MiB.
_ROUNDING_BYTES = 64 << 20
# What graphs take besides their tensors: 32 MiB for the libraries' workspace of the stream that they are
# recorded in; pieces of 20 MiB that their memory is rounded up to; the driver's own record of their kernels,
# 1 to 2 KiB each, some 2,000 a token of 48 layers, for each of six buckets.
_GRAPH_BYTES = 96 << 20
# Of free graphics memory, where no budget is given: the desktop's share may grow.
_FREE_SHARE = 0.95
# Of available host memory that experts may take.
_HOST_SHARE = 0.9


@dataclass(frozen=True)
class DeviceOptions:
    """What the card was asked for.

    Attributes:
        accelerator: The card.
        vram: Bytes of its memory for everything; ``None`` takes what is free, less a twentieth.
        ram: Bytes of the host's memory for experts; ``None`` takes what is available, less a tenth.
    """

    accelerator: Accelerator
    vram: int | None = None
    ram: int | None = None


def load_on_device(
    store: Store,
    options: DeviceOptions,
    *,
    dtype: torch.dtype,
    ctx: int | None,
    settings: CacheSettings,
    offload: OffloadOptions,
    report: Report,
    replan_tokens: int = REPLAN_TOKENS,
    activation_bits: int = 16,
    dense_bits: int = 16,
    deterministic: bool = False,
) -> LoadedModel:
    """Plan the card's memory and load.

    Args:
        store: Verified.
        options: The card and the budgets.
        dtype: That the dense part is computed in, and kept in where it is not packed.
        ctx: Context length wanted; ``None`` leaves it to the model and the memory.
        settings: Of the near tier.
        offload: Link, pages and replay for tests and measurements.
        report: Progress.
        replan_tokens: Decoded tokens after which a new plan is due; 0: never.
        activation_bits: How inputs meet quantised weights where the CPU computes a part: 8, 16 or 32.
        dense_bits: 16: dense weights in ``dtype``; 8 or 4: packed, but for embeddings and routers.
        deterministic: Decode by the model's own passes alone: which tokens graphs replay depends on more than
            the answer.

    Raises:
        DoesNotFitError: The budget is too small; the message says what is the least.
        MoechatError: See :mod:`moechat.errors`.
    """
    refuse_without_replay(settings, offload.replay)
    accelerator = options.accelerator
    accelerator.release()
    report(Progress("load", 0, None, "dense weights"))
    register()
    config = load_config(store.path)
    wanted = None if ctx is None else context_length(config, ctx)
    skeleton = build_skeleton(config, dtype, IMPLEMENTATION)
    check_same_experts(skeleton, store)
    trial = Trial()
    for entry in skeleton.experts:
        attach(entry.module, trial)
    with watched_weights(skeleton.model) as reads:
        shape = cache_shape(skeleton.model, skeleton.model.config, dtype)
    top_k = min(max(trial.top_k, default=configured_top_k(config)), store.geometry.num_experts)
    form = choose_form(
        skeleton,
        stored_types(skeleton, store.dense),
        bits=dense_bits,
        activation_bits=activation_bits,
        reads=reads,
        stored_rows=False,
    )
    own_context = context_length(config, None)
    # Masks and frequencies depend on nothing but the position.
    replays = cuda_graphs_wanted() and shape.reserved and shape.unlimited and not deterministic
    context_bytes = accelerator.context_bytes
    needs = _needs(store, skeleton, dtype, form, shape, top_k, own_context, context_bytes, replays)
    free, _ = accelerator.memory()
    most = accelerator.context_bytes + int(free * _FREE_SHARE)
    # A budget above what is free cannot be had: then it is the free memory that is too small, or not.
    given = options.vram is not None and options.vram <= most
    limit = most if options.vram is None else min(options.vram, most)
    if options.vram is not None and not given:
        warnings.warn(
            f"{format_bytes(options.vram)} of graphics memory are asked for, {format_bytes(most)} can be had:"
            " other programs have the rest",
            MoechatWarning,
            stacklevel=2,
        )
    plan = plan_memory(needs, limit, given=given, ctx=wanted, pages=offload.pages, words=_WORDS)
    # The libraries take their part by themselves.
    accelerator.limit(plan.budget - plan.base - _LIBRARY_BYTES)

    load_dense(skeleton, store.dense, form)
    routers: list[Any] = []
    if settings.prefetch == "next-router":
        routers = find_routers(skeleton.model, skeleton.experts)
    try:
        if form.packs:
            file = packed_file(store, form, dtype)
            memory = CardMemory(file.nbytes, form, dtype, accelerator.device)
            told = packing_progress(form, report)
            pack_layers(skeleton, store.dense, form, file, told, memory)
        # Buffers too: rotary frequencies and masks are made by the model on its own device.
        skeleton.model.to(accelerator.device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{format_bytes(form.nbytes)} of dense weights do not fit on the graphics card: {error}",
            hint="end other programs that use the card",
        ) from error
    give_back_unused()
    far = None
    if offload.link.kind == "file":
        far = _far_memory(store, accelerator, options.ram, report)
    loaded = LoadedModel(
        store=store,
        config=config,
        model=skeleton.model,
        dtype=dtype,
        form=form,
        cache=shape,
        chunk=prefill_chunk(skeleton.model.config),
        plan=plan,
        near=None,
        counters=ExpertCounters(),
        top_k=top_k,
        parts=tuple(entry.module for entry in skeleton.experts),
        upkeep=None,
        quickened=Quickened(),
        accelerator=accelerator,
        routers=tuple(routers_on(routers, accelerator.device)),
    )
    blocks = needs.blocks
    # With a page for every block one more, since targets leave a reserve.
    pages = blocks + 1 if plan.mapped else plan.pages
    near = tier_of(loaded, far, pages, settings, link=offload.link, replay=offload.replay)
    loaded.near = near
    near.warm(dtype)
    warm_packed_layers(accelerator, loaded.model, dtype)
    assert near.knowledge is not None  # it was made with it
    loaded.upkeep = Upkeep(
        near,
        _model_shape(loaded),
        model_type=store.manifest.model_type,
        fingerprint=store.manifest.source.fingerprint,
        knowledge=near.knowledge,
        every=replan_tokens,
    )
    loaded.page_experts()
    if replays:
        loaded.decoder = GraphDecoder(
            skeleton.model, loaded.parts, accelerator.graphs, dtype=dtype, tell=loaded.upkeep.tell
        )
    return loaded


def _far_memory(store: Store, accelerator: Accelerator, ram: int | None, report: Report) -> FarMemory:
    experts = len(store.layers) * store.geometry.layer_bytes
    room = int(available_bytes() * _HOST_SHARE) if ram is None else ram
    return FarMemory(
        store,
        ordinal=accelerator.ordinal,
        in_memory=experts <= room,
        progress=lambda done, total: report(Progress("load", done, total, "experts into memory")),
    )


def tier_of(
    loaded: LoadedModel,
    far: FarMemory | None,
    pages: int,
    settings: CacheSettings,
    *,
    link: LinkSettings | None = None,
    replay: Replay | None = None,
    owns_far: bool = True,
) -> DeviceTier:
    """A near tier for a loaded model; its layers are not attached.

    Args:
        loaded: On a card.
        far: Where the tier's link reads from; ``None``: a simulated one, as ``link`` says.
        pages: Of the tier.
        settings: Of the tier.
        link: See ``far``.
        replay: Chooses the experts in place of the routers.
        owns_far: Close ``far`` with the tier.
    """
    assert loaded.accelerator is not None
    return DeviceTier(
        loaded.store,
        loaded.accelerator,
        far,
        owns_far=owns_far,
        pages=pages,
        top_k=loaded.top_k,
        settings=settings,
        link=link,
        routers=loaded.routers,
        replay=replay,
        counters=loaded.counters,
        knowledge=_knowledge(loaded, settings, far_computes=far is not None and bool(far.records())),
        activation_bits=loaded.form.activation_bits,
    )


def _model_shape(loaded: LoadedModel) -> ModelShape:
    form = loaded.form
    return shape_of(
        loaded.store,
        loaded.top_k,
        dense_bytes=form.in_layers,
        head_bytes=form.head_bytes,
        itemsize=form.itemsize,
    )


def _knowledge(loaded: LoadedModel, settings: CacheSettings, *, far_computes: bool) -> Knowledge:
    manifest = loaded.store.manifest
    ranked_by = SYSTEMS["auto"].policy if settings.policy in ("static", "belady") else settings.policy
    return gather(
        _model_shape(loaded),
        manifest.model_type,
        manifest.source.fingerprint,
        ranked_by,
        dtype=str(loaded.dtype).removeprefix("torch."),
        threads=1,
        dense_bits=loaded.form.bits,
        near="gpu",
        far_computes=far_computes,
    )


def _needs(
    store: Store,
    skeleton: Skeleton,
    dtype: torch.dtype,
    form: DenseForm,
    shape: CacheShape,
    top_k: int,
    own_context: int,
    context_bytes: int,
    replays: bool,
) -> Needs:
    config, geometry = skeleton.model.config, store.geometry
    routers = len(skeleton.experts) * geometry.num_experts * geometry.hidden_size * 4
    layout = geometry.layout

    def workspace(context: int) -> int:
        tokens = pass_tokens(config, shape, context)
        items = tokens * top_k
        pairs = min(WORK_PAIRS, items * geometry.blocks_per_expert)
        # Where experts have few tokens their outputs are kept in several chains.
        few = min(items, FEW_TOKENS * geometry.num_experts)
        # Activations, outputs of every item; what the CPU is given twice, and its part of the sum.
        outputs = max(items, SPLITS * few) + 3 * min(tokens, SHARED_TOKENS)
        experts = pairs * PAIR_BYTES + outputs * layout.hidden_padded * 4
        if replays:
            # A pass of one token, in memory of its own beside that of a prompt's passes.
            experts += _GRAPH_BYTES + workspace_bytes(config, dtype, 1, min(context, MOST_BUCKET))
        if shape.appendable:
            return experts + workspace_bytes(config, dtype, tokens, context)
        return experts + one_pass_bytes(config, dtype, context)

    return Needs(
        base=context_bytes,
        dense=form.nbytes + routers,
        loading=0,
        kv=shape.nbytes,
        workspace=workspace,
        scratch=_LIBRARY_BYTES + _ROUNDING_BYTES + unpacked_bytes(form, dtype.itemsize),
        page_bytes=geometry.record_bytes,
        blocks=len(store.layers) * geometry.num_experts * geometry.blocks_per_expert,
        min_pages=MIN_PAGES,
        own_context=own_context,
        threads=0,
    )
