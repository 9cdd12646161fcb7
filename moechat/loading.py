"""From a name to a model that can run: open or convert the store, plan the memory, load the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moechat import _native
from moechat.config import parse_size, user_paths
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.errors import UnsupportedModelError, UsageError
from moechat.hardware.memory import available_bytes, give_back_unused, resident_bytes
from moechat.hub.names import ModelRef
from moechat.models.assets import context_length
from moechat.models.attention_cache import CacheShape, cache_shape
from moechat.models.decode import Quickened, quicken
from moechat.models.dense import load_dense, loading_bytes, stored_types
from moechat.models.dense_form import DenseForm, choose_form, watched_weights
from moechat.models.footprint import (
    one_pass_bytes,
    pass_tokens,
    prefill_chunk,
    scratch_bytes,
    workspace_bytes,
)
from moechat.models.mapping import plan_checkpoint
from moechat.models.packed import PackedFile, pack_layers
from moechat.models.shape import automatic_type, configured_top_k
from moechat.models.skeleton import Skeleton, build_skeleton, load_config
from moechat.models.threads import steady_modules
from moechat.offload.budget import MemoryPlan, Needs, automatic_budget, plan_memory
from moechat.offload.cached import MIN_PAGES, NearTier, shape_of
from moechat.offload.experts import IMPLEMENTATION, ExpertCounters, ExpertLayer, attach, register
from moechat.offload.perfect import refuse_without_replay
from moechat.offload.planner import gather
from moechat.offload.settings import OffloadOptions
from moechat.offload.upkeep import REPLAN_TOKENS, Upkeep
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.store import DENSE_PREFIX, Store

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_BITS = 4


@dataclass(frozen=True)
class Progress:
    """How far loading has come.

    Attributes:
        stage: ``convert``, ``wait``, ``verify`` or ``load``.
        done: Bytes done.
        total: Bytes in all, or ``None`` where unknown.
        detail: What is being worked on.
    """

    stage: str
    done: int
    total: int | None
    detail: str = ""


Report = Callable[[Progress], None]


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        store: Its block store.
        config: transformers' configuration.
        model: With its dense weights, and expert layers attached.
        dtype: Type that the dense part computes in.
        form: How its weights are kept.
        cache: Shape of its attention cache.
        chunk: Tokens of a prompt computed in one pass, where a prompt may come in parts.
        plan: How the memory is spent.
        near: Pages and link of the experts; ``None`` if they are mapped.
        counters: Of the expert layers.
        top_k: Experts a token.
        parts: The experts modules, in order.
        upkeep: What the near tier learns while it runs; ``None`` without one.
        quickened: What of the model is computed natively in decoding steps.
    """

    store: Store
    config: Any
    model: Any
    dtype: torch.dtype
    form: DenseForm
    cache: CacheShape
    chunk: int
    plan: MemoryPlan
    near: NearTier | None
    counters: ExpertCounters
    top_k: int
    parts: tuple[Any, ...]
    upkeep: Upkeep | None
    quickened: Quickened

    def map_experts(self) -> None:
        """Let the experts be computed from the mapped store, whatever computed them before."""
        for record, part in zip(self.store.layers, self.parts, strict=True):
            records = self.store.expert_layer(record.layer)
            attach(
                part,
                ExpertLayer(self.store.geometry, records, self.counters, self.form.activation_bits),
            )

    def page_experts(self) -> None:
        """Let the near tier compute the experts, whatever computed them before."""
        assert self.near is not None
        for ordinal, part in enumerate(self.parts):
            attach(part, self.near.layer(ordinal))


def parse_budget(ram: str | int | None) -> int | None:
    """Bytes of a memory budget.

    Raises:
        UsageError: It is neither a size nor a positive number of bytes, or larger than any memory.
    """
    if ram is None:
        return None
    size = parse_size(ram) if isinstance(ram, str) else ram
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise UsageError(f"ram is {ram!r}", hint="give a size such as '2G', or a number of bytes")
    if size >= 1 << 63:
        raise UsageError(f"ram is {size.bit_length()} bits long; no memory is larger than 2⁶³ - 1 bytes")
    return size


def dense_type(dtype: str) -> torch.dtype:
    """The torch type of a name; for ``auto`` see :func:`moechat.models.shape.automatic_type`."""
    if dtype != "auto":
        return DTYPES[dtype]
    return automatic_type()


def open_store(ref: ModelRef, bits: int | None, report: Report) -> Store:
    """The verified store of a model; a checkpoint is converted first, unless that was done before.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    store = _find_store(ref, bits, report)
    store.ensure_verified(
        user_paths().state,
        lambda done, total, name: report(Progress("verify", done, total, name)),
    )
    return store


def _find_store(ref: ModelRef, bits: int | None, report: Report) -> Store:
    if ref.store is not None:
        store = Store.open(ref.store)
        if bits is not None and bits != store.geometry.bits:
            raise UsageError(
                f"{ref.name} is stored with {store.geometry.bits} bits, not {bits}",
                hint="name the checkpoint that it was made from to convert it anew",
            )
        return store
    assert ref.checkpoint is not None
    wanted = _DEFAULT_BITS if bits is None else bits
    destination = ref.library_path(user_paths().models, wanted)
    checkpoint = Checkpoint.open(ref.checkpoint)
    manifest = destination / MANIFEST_NAME
    # When the checkpoint has changed since, the conversion below replaces the store once it is complete.
    if manifest.exists() and Manifest.read(manifest).source.fingerprint == checkpoint.fingerprint():
        return Store.open(destination)
    plan = plan_checkpoint(checkpoint)

    def on_convert(event: ConvertProgress) -> None:
        stage = "wait" if event.stage == "waiting" else "convert"
        report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))

    return convert(checkpoint, plan, destination, bits=wanted, source_name=ref.name, progress=on_convert)


@dataclass
class _Trial:
    """Stands in for an expert layer in the trial pass, and notes how many experts a token takes."""

    top_k: list[int] = field(default_factory=list)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        self.top_k.append(index.shape[-1])
        return torch.empty_like(hidden)


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
    _check_same_experts(skeleton, store)
    trial = _Trial()
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
        _pack_dense(store, skeleton, form, dtype, report)
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


def _pack_dense(
    store: Store, skeleton: Skeleton, form: DenseForm, dtype: torch.dtype, report: Report
) -> None:
    hashes = {
        name: record.sha256 for name, record in store.manifest.files.items() if name.startswith(DENSE_PREFIX)
    }
    file = PackedFile.of(user_paths().cache / "dense", hashes, form, dtype)
    detail = f"dense weights in {form.bits} bits"
    pack_layers(
        skeleton, store.dense, form, file, lambda done, total: report(Progress("load", done, total, detail))
    )


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


def _check_same_experts(skeleton: Skeleton, store: Store) -> None:
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
