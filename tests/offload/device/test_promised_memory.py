"""The memory that a plan shows is the memory that loading takes, on the CPU and on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from plan_support import desktop
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat.budget.gpu_sizes import CONTEXT_BYTES
from moechat.budget.held_experts import HOST_BYTES
from moechat.budget.memory_plan import Part
from moechat.hardware.memory import resident_bytes
from moechat.offload.settings import OffloadOptions
from moechat.options import LoadOptions
from moechat.planning import Plan

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss", "granitemoe"]
MEBI = 1 << 20


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, moechat_home: Path
) -> Path:
    directory: Path = tmp_path_factory.mktemp("promised") / request.param
    write_tiny_checkpoint(directory, tiny_config(request.param, 0))
    return directory


def plans(checkpoint: Path, options: LoadOptions, tmp_path: Path, **machine) -> list[Plan]:
    """From the configuration alone, and from the checkpoint."""
    config = tmp_path / "only.json"
    config.write_text((checkpoint / "config.json").read_text())
    assert json.loads(config.read_text())["dtype"] == "bfloat16"
    return [moechat.plan(model, **options.given, **machine) for model in (config, checkpoint)]


def taken(engine: moechat.Engine) -> tuple[Part, ...]:
    return engine.loaded.plan.parts


@pytest.mark.parametrize("dense_bits", [16, 4])
def test_loading_on_the_cpu_takes_the_planned_memory(
    checkpoint: Path, dense_bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process grows and shrinks between two readings of its size, so both get the same reading.
    base = resident_bytes()
    for place in ("offload.host", "planning.machine"):
        monkeypatch.setattr(f"moechat.{place}.process_bytes", lambda: base)
    options = LoadOptions(ram=base + 128 * MEBI, ctx=96, dense_bits=dense_bits, threads=2)
    made = plans(checkpoint, options, tmp_path)
    with moechat.load(checkpoint, ram=options.ram, ctx=96, dense_bits=dense_bits, threads=2) as engine:
        parts = taken(engine)
        loading = engine.loaded.plan
    for plan in made:
        assert plan.tiers[0].parts == parts
        assert (plan.context, plan.pages, plan.far is None) == (96, loading.pages, loading.mapped)
        assert plan.tiers[0].budget == loading.budget


@pytest.mark.parametrize(("dense_bits", "dtype"), [(16, "bfloat16"), (8, "bfloat16"), (16, "float32")])
def test_loading_on_a_gpu_takes_the_planned_memory(
    checkpoint: Path, gpu, dense_bits: int, dtype: str, tmp_path: Path
) -> None:
    gpu.context_bytes = CONTEXT_BYTES
    options = LoadOptions(vram="1G", ctx=96, dense_bits=dense_bits, dtype=dtype, device="cuda")
    made = plans(checkpoint, options, tmp_path, profile=desktop())
    with moechat.load(
        checkpoint,
        device="cuda",
        vram="1G",
        ctx=96,
        dense_bits=dense_bits,
        dtype=dtype,
        offload=OffloadOptions(accelerator=gpu),
    ) as engine:
        parts = {part.name: part.nbytes for part in taken(engine)}
        loading, tier = engine.loaded.plan, engine.loaded.near
        assert tier is not None
        assert parts["experts"] == tier.pages * engine.loaded.store.geometry.record_bytes
        if dense_bits == 16:
            model = engine.loaded.model
            held = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
            routers = tier.placement.pages.routers
            assert all(router.weight.dtype == torch.float32 for router in routers)
            copies = sum(router.weight.nbytes for router in routers)
            assert parts["dense weights"] == sum(held.values()) + copies
    for plan in made:
        assert {part.name: part.nbytes for part in plan.tiers[0].parts} == parts
        assert (plan.context, plan.dtype, plan.near) == (96, dtype, "vram")
        assert plan.tiers[0].budget == loading.budget


@pytest.mark.parametrize("missing", [0, 3, None])
def test_ram_behind_a_gpu_holds_as_many_experts_as_planned(
    checkpoint: Path, gpu, missing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.context_bytes = CONTEXT_BYTES
    # The process of all tests together may be larger than one that has loaded a model.
    monkeypatch.setattr("moechat.offload.gpu.process_bytes", lambda: 700 * MEBI)
    keywords = {"vram": "880M", "ctx": 96, "dtype": "bfloat16"}
    whole = moechat.plan(checkpoint, profile=desktop(), **keywords)
    each = whole.all_expert_bytes // (whole.experts * whole.expert_layers)
    held = 0 if missing is None else whole.all_expert_bytes - missing * each
    # One byte less than another expert would take.
    keywords["ram"] = HOST_BYTES + held + each - 1
    plan = moechat.plan(checkpoint, profile=desktop(), **keywords)
    offload = OffloadOptions(accelerator=gpu, pages=4)
    with moechat.load(checkpoint, offload=offload, **keywords) as engine:
        assert engine.loaded.near is not None
        far = engine.loaded.near.placement.far
        assert far.pinned_bytes == far.held_bytes == held
    if plan.far is not None:
        parts = {part.name: part.nbytes for part in plan.tiers[1].parts}
        assert parts["experts, pinned"] == held
        assert plan.far.share == held / whole.all_expert_bytes
