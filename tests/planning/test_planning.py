"""Plans through the API: memory that adds up, budgets that mean something, and what is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plan_support import GIB, desktop, without_disk
from tiny import tiny_config

import moechat
from moechat import _native
from moechat.budget import tier_targets
from moechat.budget.held_experts import choose_experts
from moechat.budget.knowledge import gather
from moechat.budget.memory_plan import Budget, plan_memory
from moechat.cli.commands.plan import render
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.configurator.systems import SYSTEMS, settings_of
from moechat.errors import (
    DoesNotFitError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from moechat.hardware.identity import this_machine
from moechat.hardware.measured_file import Measurement, save_measurement
from moechat.hardware.memory import resident_bytes
from moechat.hardware.profile import Figure, ModelTimes
from moechat.hardware.profile_file import reference_names
from moechat.hardware.times_file import TimesKey, save_times
from moechat.offload.host import HostPlacement
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.options import LoadOptions
from moechat.planning import Plan
from moechat.planning.cases import Cases
from moechat.planning.machine import Machine, find_machine
from moechat.planning.result import Speed
from moechat.planning.source import find_model
from moechat.store.store import Store

# Beside the process as it is, which other tests make larger: enough for the demo.
ROOM = 150 << 20
DEMO = Path(moechat.__file__).parent / "hub" / "demo"

pytestmark = pytest.mark.usefixtures("short_simulations")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 layers and 57 MiB of experts: quick to plan for."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 16, "num_hidden_layers": 4}
    path = tmp_path_factory.mktemp("config") / "small.json"
    tiny_config("qwen3_moe", 0, **sizes).to_json_file(path)
    return path


@pytest.fixture(scope="module")
def olmoe(short_simulations: None) -> Plan:
    return moechat.plan("olmoe", vram="3500M", profile=desktop())


def part(plan: Plan, name: str, tier: int = 0) -> int:
    return next(part.nbytes for part in plan.tiers[tier].parts if part.name == name)


def test_the_parts_fill_the_budget_without_exceeding_it(olmoe: Plan) -> None:
    near, far = olmoe.tiers
    assert (near.name, near.budget, near.given) == ("vram", 3500 << 20, True)
    assert near.budget - near.used in range(16 << 20)
    # Attention, norms, embedding, head and routers in 16 bits; rotary frequencies; routers in float32.
    assert part(olmoe, "dense weights") == 2 * 476_710_912 + 512 + 4 * 16 * 64 * 2048
    assert part(olmoe, "attention cache") == olmoe.context * 131072
    assert part(olmoe, "experts") == olmoe.pages * (olmoe.all_expert_bytes // (16 * 64 * 16))
    assert (far.name, far.given) == ("ram", False)
    assert part(olmoe, "experts, pinned", 1) == olmoe.all_expert_bytes
    assert olmoe.far is not None
    assert (olmoe.far.kind, olmoe.far.share) == ("ram", 1.0)


def test_targets_stay_within_the_pages(olmoe: Plan) -> None:
    assert [entry.layer for entry in olmoe.layers] == list(range(16))
    assert 0 < sum(entry.experts * entry.blocks for entry in olmoe.layers) <= olmoe.pages
    for entry in olmoe.layers:
        assert 0 <= entry.experts <= 64
        assert 0 <= entry.blocks <= 16
        assert entry.split == entry.blocks / 16
        assert 0 <= entry.hit_rate <= 1
    assert olmoe.speed is not None
    decode = olmoe.speed.decode
    assert decode.hit_rate == pytest.approx(sum(entry.hit_rate for entry in olmoe.layers) / 16)
    assert decode.waiting == pytest.approx(sum(entry.exposed_s for entry in olmoe.layers))
    assert decode.seconds == pytest.approx(decode.dense + decode.experts + decode.waiting + decode.head)


def test_more_memory_is_never_slower(small: Path) -> None:
    rates = []
    for vram in ("816M", "826M", "836M", "846M", "856M", "1100M"):
        made = moechat.plan(small, vram=vram, profile=desktop(), ctx=128)
        assert made.speed is not None
        rates.append(made.speed.tokens_per_s)
    # But for what the search leaves: it looks at the time of expected amounts, a speed at expected times.
    assert all(more >= 0.99 * less for less, more in pairwise(rates))
    assert rates[-1] > rates[0]


def test_other_budgets_match_their_own_plans(olmoe: Plan) -> None:
    names = [entry.name for entry in olmoe.other_budgets]
    assert names == ["half", "less", "more", "much_more", "all_experts"]
    half, *rest = olmoe.other_budgets
    assert (half.nbytes, half.tokens_per_s) == (1750 << 20, None)  # dense weights and context take more
    for entry in rest:
        again = moechat.plan("olmoe", vram=entry.nbytes, profile=desktop(), ctx=olmoe.context)
        assert again.speed is not None
        assert entry.tokens_per_s is not None
        # A plan of its own may choose another strategy, which can only be faster.
        assert entry.tokens_per_s <= again.speed.tokens_per_s * 1.005
        assert entry.tokens_per_s > again.speed.tokens_per_s * 0.97
        assert bool(again.layers) == (entry.name != "all_experts")


def test_with_room_for_all_experts_all_are_near() -> None:
    made = moechat.plan("olmoe", vram="10G", profile=desktop())
    assert (made.far, made.layers, made.pages, made.resident_share) == (None, (), 0, 1.0)
    assert made.context == 4096
    assert not made.context_limited
    assert [tier.name for tier in made.tiers] == ["vram"]
    assert made.speed is not None
    assert made.speed.decode.hit_rate == 1.0
    assert [figure.name for figure in made.speed.figures] == [
        "graphics memory, bytes/s",
        "dense weights on the GPU, bytes/s",
        "experts on the GPU, bytes/s",
        "GPU, operations/s",
        "experts on the GPU, operations/s",
        "starting a kernel, s",
    ]
    assert sorted(figure.name for figure in made.speed.costs) == ["attention", "head", "moe"]
    assert [entry.name for entry in made.other_budgets if entry.nbytes > 10 * GIB] == []
    # Where all of them fit only beside a context shorter than the model's own, too.
    tight = moechat.plan("deepseek-v2-lite", vram="13G", profile=desktop(vram=24 * GIB))
    assert (tight.far, tight.context_limited) == (None, True)
    assert [entry.name for entry in tight.other_budgets] == ["half", "less"]


def test_too_little_graphics_memory_is_refused_and_the_least_is_named() -> None:
    with pytest.raises(DoesNotFitError, match="CUDA context 448, dense weights") as caught:
        moechat.plan("olmoe", vram="1G", profile=desktop(), ctx=512)
    least = caught.value.least_bytes
    assert least is not None
    assert f"{least >> 20}M with --vram" in str(caught.value.hint)
    moechat.plan("olmoe", vram=least, profile=desktop(), ctx=512)
    with pytest.raises(DoesNotFitError):
        moechat.plan("olmoe", vram=least - (16 << 20), profile=desktop(), ctx=512)
    # No budget would do on a GPU that has less.
    with pytest.raises(DoesNotFitError) as caught:
        moechat.plan("olmoe", profile=desktop(vram=GIB), ctx=512)
    assert "a GPU with more memory with --gpu" in str(caught.value.hint)
    assert "--vram" not in str(caught.value.hint)


def test_little_ram_adds_the_disk_behind_it() -> None:
    plenty = moechat.plan("olmoe", vram="2G", profile=desktop(), ctx=512)
    made = moechat.plan("olmoe", vram="2G", ram="2G", profile=desktop(), ctx=512)
    assert made.far is not None
    assert made.far.kind == "ram+disk"
    held, each = part(made, "experts, pinned", 1), made.all_expert_bytes / (made.experts * made.expert_layers)
    assert made.far.share == held / made.all_expert_bytes
    assert 0 <= 2 * GIB - part(made, "process", 1) - held < each  # whole experts, as many as fit
    assert any("read from the disk" in note for note in made.notes)
    assert made.speed is not None
    assert plenty.speed is not None
    assert made.speed.tokens_per_s < plenty.speed.tokens_per_s
    assert "RAM and the disk" in made.speed.bottleneck
    assert "disk to RAM, bytes/s" in [figure.name for figure in made.speed.figures]
    none = moechat.plan("olmoe", vram="2G", ram="1G", profile=desktop(), ctx=512)
    assert none.far is not None
    assert (none.far.kind, none.far.share) == ("disk", 0.0)
    with pytest.raises(DoesNotFitError, match="has 32768 MiB of RAM"):
        moechat.plan("olmoe", vram="2G", ram="64G", profile=desktop(), ctx=512)


def test_without_a_gpu_ram_is_near_and_the_disk_is_far() -> None:
    made = moechat.plan("mixtral", profile=desktop(gpu=False, ram=16 * GIB))
    assert made.near == "ram"
    assert made.far is not None
    assert made.far.kind == "disk"
    assert made.tiers[0].budget < 14 * GIB  # the system keeps something
    assert made.speed is not None
    assert "disk" in made.speed.bottleneck
    with pytest.raises(UsageError, match="A desktop has no GPU"):
        moechat.plan("mixtral", vram="12G", profile=desktop(gpu=False))


def test_a_machine_of_unknown_speed_still_has_a_plan() -> None:
    made = moechat.plan("mixtral", profile=without_disk(desktop(gpu=False, ram=16 * GIB)))
    assert made.speed is None
    assert made.other_budgets == ()
    assert len(made.layers) == 32
    assert any("speed of the disk" in note for note in made.notes)
    here = moechat.plan("olmoe", ram=resident_bytes() + 2 * GIB, ctx=512)
    assert (here.machine, here.tiers[0].parts[0].basis) == ("this machine", "measured")
    assert here.speed is None
    assert any("moechat profile" in note for note in here.notes)


def test_more_ram_than_this_machine_has_gives_a_remark() -> None:
    said = moechat.plan("olmoe", ram=1 << 50, ctx=512).notes
    assert any("1073741824 MiB were given" in note for note in said)
    assert not any("were given" in note for note in moechat.plan("olmoe", ram="4G", ctx=512).notes)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a measurement of this machine, as if it had a GPU."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    machine = desktop()
    links = {"file": machine.links["file"]}
    profile = replace(machine, links=links, key=this_machine().key, created="2026-11-21")
    return save_measurement(Measurement(profile))


def test_an_unusable_measurement_is_named(kept: Path) -> None:
    whole = moechat.plan("olmoe", ram="4G", ctx=512)
    assert whole.speed is not None
    assert not any(str(kept) in note for note in whole.notes)
    kept.write_text(kept.read_text().replace('"format": 2', '"format": 99'))
    made = moechat.plan("olmoe", ram="4G", ctx=512)
    assert made.speed is None
    assert any(f"{kept} was written by another version" in note for note in made.notes)


def test_without_a_measured_link_a_plan_assumes_it_and_says_so(kept: Path) -> None:
    made = moechat.plan("olmoe", vram="3G", ctx=512)
    assert made.near == "vram"
    assert made.speed is not None
    (note,) = (note for note in made.notes if note.startswith("assumed, not measured: "))
    assert "RAM to GPU" in note
    assert "`moechat profile --refresh` measures this GPU" in note
    found = made.to_json()["speed"]["figure_origins"]
    assert set(found) == {"measured", "published", "assumed"}
    assert "RAM to GPU, bytes/s" in found["assumed"]
    named = [name for names in found.values() for name in names]
    assert sorted(named) == sorted(figure.name for figure in made.speed.figures)


def test_targets_that_rest_on_assumed_costs_say_so(kept: Path) -> None:
    said = "C and θ rest on assumed costs"
    assert said not in render(moechat.plan("olmoe", ram="4G", ctx=512))  # the disk was measured
    kept.unlink()
    assert said in render(moechat.plan("olmoe", ram="4G", ctx=512))


def test_graphics_memory_needs_a_profile_or_a_gpu() -> None:
    with pytest.raises(UsageError, match="--vram needs a GPU") as caught:
        moechat.plan("olmoe", vram="12G")
    assert "--gpu" in str(caught.value.hint)


def test_budgets_are_limited_by_the_memory_of_the_gpu() -> None:
    with pytest.raises(DoesNotFitError, match="Test GPU has 12288 MiB"):
        moechat.plan("olmoe", vram="16G", profile=desktop())
    made = moechat.plan("olmoe", profile=desktop(vram=2.5 * GIB))
    context = part(made, "CUDA context")
    assert made.tiers[0].budget == context + int(0.95 * (int(2.5 * GIB) - context))
    assert not made.tiers[0].given
    # A budget that loading would not get is no promise either.
    made = moechat.plan("olmoe", vram="12G", profile=desktop())
    assert made.tiers[0].budget == context + int(0.95 * (12 * GIB - context))
    assert any("12 GiB of graphics memory were given" in note for note in made.notes)


def test_every_reference_machine_can_be_planned_for(small: Path) -> None:
    names = reference_names()
    assert len(names) >= 10
    for name in names:
        made = moechat.plan(small, profile=name)
        assert made.speed is not None
        assert 10 < made.speed.tokens_per_s < 20_000, name
        assert made.machine == name
        assert made.speed.ttft_s is not None
        assert all(figure.source for figure in made.speed.figures)


@pytest.mark.parametrize(("dense_bits", "kv_bits"), [(16, 16), (8, 16), (4, 16), (16, 8)])
def test_loading_takes_what_the_plan_shows(
    monkeypatch: pytest.MonkeyPatch, dense_bits: int, kv_bits: int
) -> None:
    # A process grows and shrinks between two readings of its size, so both are given the same reading.
    base = resident_bytes()
    monkeypatch.setattr("moechat.offload.host.process_bytes", lambda: base)
    monkeypatch.setattr("moechat.planning.machine.process_bytes", lambda: base)
    options: Any = {"ram": base + ROOM, "ctx": 256, "dense_bits": dense_bits, "kv_bits": kv_bits}
    with moechat.load("demo", **options) as engine:
        facts = engine.describe().to_json()
    made = moechat.plan("demo", **options)
    assert made.weights == "store"
    assert part(made, "process") == facts["memory_process_bytes"] == base
    assert made.tiers[0].parts[-1].nbytes == facts["memory_experts_bytes"]
    assert part(made, "dense weights") == facts["memory_dense_bytes"]
    assert part(made, "attention cache") == facts["memory_attention_cache_bytes"]
    assert part(made, "workspace") == facts["memory_workspace_bytes"] + facts["memory_scratch_bytes"]
    assert made.dtype == facts["dense_dtype"]
    assert made.dense_bits == facts["dense_bits"] == dense_bits
    assert made.dense_weights == facts["dense_weights"]
    assert made.kv_bits == facts["kv_bits"] == made.to_json()["model"]["kv_bits"] == kv_bits
    assert made.all_expert_bytes == facts["expert_bytes"]
    assert made.blocks_per_expert == facts["blocks_per_expert"]


@pytest.mark.parametrize("vram", [12 * GIB, 8 * GIB])
def test_mixtral_fits_desktop_gpus_and_fewer_dense_bits_leave_more_for_experts(
    vram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moechat.budget.memory_plan._WAVE_SHARE", 0)  # waves are longer where more is left
    plans = {
        bits: moechat.plan("mixtral", vram=vram, profile=desktop(vram=vram), ctx=4096, dense_bits=bits)
        for bits in (16, 8, 4)
    }
    # Weights that are packed: four projections of 32 layers, and the head; 4.5 bits each.
    packed = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096) + 32000 * 4096
    for bits, made in plans.items():
        assert (made.dense_bits, made.dtype, made.context) == (bits, "bfloat16", 4096)
        assert made.far is not None
        assert (made.far.kind, made.far.share) == ("ram", 1.0)
        assert made.tiers[0].used <= vram
        expected = 0 if bits == 16 else packed * 2 - packed * (64 * bits // 8 + 4) // 64
        assert part(plans[16], "dense weights") - part(made, "dense weights") == expected
        # What they are unpacked in.
        unpacked = part(made, "workspace") - part(plans[16], "workspace")
        assert unpacked == (0 if bits == 16 else 32 << 20)
        saved = expected - unpacked
        assert part(made, "experts") - part(plans[16], "experts") == pytest.approx(saved, rel=0.03)
    speeds = [made.speed.tokens_per_s for made in plans.values() if made.speed is not None]
    assert speeds == sorted(speeds)
    assert speeds[2] > 1.1 * speeds[0]


@pytest.mark.parametrize("system", sorted(SYSTEMS.keys() - {"oracle"}))  # which the engine refuses here
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("spare", [0, 3 << 20])
def test_pages_are_divided_as_in_the_engine(kept: Path, system: str, known: bool, spare: int) -> None:
    if not known:
        kept.unlink()
    store, settings = Store.open(DEMO), settings_of(system)
    model = Cases(
        find_model("demo", None), find_machine(None, gpu=False), LoadOptions(system=system, ctx=1024)
    )
    everything = plan_memory(replace(model.needs, loading=0), 8 * GIB, ctx=1024)
    budget = everything.total - everything.expert_bytes // 2
    case = model.case(Budget(budget, False, spare), ctx=1024, ram_share=0.0)
    assert (case.memory.cached_experts > 0) == (spare > 0 and settings.keep > 0)
    assert case.allocation is not None
    knowledge = gather(
        model.shape,
        store.manifest.model_type,
        store.manifest.source.fingerprint,
        settings.policy,
        dtype=model.dtype,
        threads=_native.num_threads(),
        dense_bits=model.outline.form.bits,
        dense_bytes=model.outline.form.nbytes,
        activation_bits=model.outline.form.activation_bits,
        kv_bits=model.outline.cache.bits,
    )
    assert (knowledge.costs_from == "assumed") is not known
    assert knowledge.costs == case.costs
    config = TierConfig(store, model.outline.top_k)
    tier = ExpertTier(
        config,
        HostPlacement(),
        pages=case.memory.pages,
        settings=settings,
        cached=choose_experts(model.shape.layers, model.shape.experts, case.memory.cached_experts, None),
        knowledge=knowledge,
    )
    with closing(tier):
        planned = case.allocation.targets
        if settings.allocation == "shared":
            # The engine protects no expert; plans take the one pool to be divided evenly.
            assert not tier.targets[:, 0].any()
            assert tier.plan.method == "shared"
            assert planned[:, 0].max() - planned[:, 0].min() <= 1
            assert 0 < planned.prod(axis=1).sum() <= case.memory.near_pages
        else:
            assert tier.targets.tolist() == planned.tolist()


def test_a_failed_allocation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("a flaw")

    monkeypatch.setattr(tier_targets, "allocate", fail)
    made = moechat.plan("mixtral", profile=desktop(gpu=False, ram=16 * GIB))
    assert len(made.layers) == 32
    assert made.speed is not None
    assert any("no auto plan could be made" in note and "a flaw" in note for note in made.notes)


def test_a_configuration_is_enough_to_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "Tiny.Config.JSON"
    tiny_config("qwen2_moe", 0).to_json_file(config)
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(config, directory / "config.json")
    by_file = moechat.plan(config, profile=desktop())
    by_directory = moechat.plan(directory, profile=desktop())
    assert by_file.weights == by_directory.weights == "none"
    assert by_file.model == "Tiny.Config.JSON"
    assert by_file.parameters == by_directory.parameters > 0
    monkeypatch.chdir(directory)
    here = moechat.plan("config.json", profile=desktop())
    assert (here.model, here.parameters) == ("model", by_file.parameters)
    assert moechat.plan(".", profile=desktop()).parameters == by_file.parameters


def test_a_store_can_be_planned_with_its_own_bits_and_with_others() -> None:
    bits = Store.open(DEMO).geometry.bits
    assert moechat.plan("demo", profile=desktop()).bits == bits
    other = moechat.plan("demo", profile=desktop(), bits=8)
    assert (other.bits, other.weights) == (8, "none")
    assert any(f"stored with {bits} bits" in note for note in other.notes)
    with pytest.raises(UsageError, match="bits is 5"):
        moechat.plan("demo", profile=desktop(), bits=5)


def test_recorded_routing_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.configurator.warm_start import default_statistics
    from moechat.routing.statistics_file import add_statistics, model_key

    # A home of its own: other tests of this process record the demo model's routing as well.
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    before = moechat.plan("demo", ram=resident_bytes() + ROOM, ctx=256)
    assert (before.statistics_tokens, before.statistics_basis, before.weights) == (0, "assumed", "store")
    store = Store.open(DEMO)
    key = model_key(store.manifest.source.fingerprint, layers=8, experts=16, top_k=2)
    made_up = default_statistics("mixtral", 8, 16, 2, policy=settings_of("auto").policy)
    seen = {name: getattr(made_up, name) for name in made_up.__dataclass_fields__}
    assert add_statistics(key, type(made_up)(**{**seen, "tokens": 321}))
    after = moechat.plan("demo", ram=resident_bytes() + ROOM, ctx=256)
    assert after.statistics_tokens == 321
    assert "321 recorded tokens" in after.statistics_source
    assert after.statistics_basis == "recorded"


def test_unreadable_recorded_routing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.configurator.warm_start import default_statistics
    from moechat.routing.statistics_file import add_statistics, model_key

    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    key = model_key(Store.open(DEMO).manifest.source.fingerprint, layers=8, experts=16, top_k=2)
    seen = replace(default_statistics("mixtral", 8, 16, 2, policy=settings_of("auto").policy), tokens=321)
    assert add_statistics(key, seen)
    (file,) = (path for path in tmp_path.rglob(f"*{key}*") if path.suffix == ".npz")
    file.write_bytes(b"no statistics")
    made = moechat.plan("demo", ram=resident_bytes() + ROOM, ctx=256)
    assert made.statistics_tokens == 0
    assert "none recorded" in made.statistics_source
    assert any(f"{file} are not used" in note for note in made.notes)


def test_measured_times_of_the_model_are_used(kept: Path) -> None:
    before = moechat.plan("demo", ram=resident_bytes() + ROOM, ctx=256)
    assert before.speed is not None
    assert before.speed.times == "estimate"
    parts = {"attention": 1e-3, "moe": 2e-3, "head": 3e-3}
    times = ModelTimes(**{name: Figure(value, "measured", "a test") for name, value in parts.items()})
    store = Store.open(DEMO)
    key = TimesKey(
        this_machine().key,
        store.manifest.source.fingerprint,
        before.dtype,
        _native.num_threads(),
        store.geometry.bits,
        before.dense_bits,
        Cases(find_model("demo", None), find_machine(None, gpu=False), LoadOptions()).outline.form.nbytes,
        LoadOptions.activation_bits,
        before.kv_bits,
    )
    save_times(key, times)
    made = moechat.plan("demo", ram=resident_bytes() + ROOM, ctx=256)
    assert made.speed is not None
    assert made.speed.times == "measured"
    decode = made.speed.decode
    assert (decode.dense, decode.experts, decode.head) == pytest.approx((8e-3, 16e-3, 3e-3))
    # The figures of this machine here are not all measured ones, and a plan says so.
    assert "expected speed: estimate, not measured" in render(made)
    figures = tuple(replace(figure, origin="measured") for figure in made.speed.figures)
    measured = replace(made, speed=replace(made.speed, figures=figures))
    assert "estimate from measurements of this machine, including this model's layers" in render(measured)
    # With other bits they mean nothing.
    other = moechat.plan("demo", ram=resident_bytes() + ROOM, ctx=256, bits=8)
    assert other.speed is not None
    assert other.speed.times == "estimate"


@pytest.mark.parametrize(
    ("model", "arguments", "error", "reason"),
    [
        ("mixtrl", {}, ModelNotFoundError, "there is no model 'mixtrl'"),
        ("./nowhere", {}, ModelNotFoundError, "no directory"),
        ("some/model", {}, ModelNotFoundError, "not in the library, and its shape is not"),
        ("", {}, ModelNotFoundError, "not a model name"),
        ("olmoe", {"ctx": 4097}, DoesNotFitError, "the model was made for 4096"),
        ("olmoe", {"ctx": 1}, UsageError, "at least 2"),
        ("olmoe", {"system": "best"}, UsageError, "system is 'best'"),
        ("olmoe", {"vram": "lots"}, UsageError, "'lots' is not a size"),
        ("olmoe", {"vram": 0}, UsageError, "vram is 0"),
        ("olmoe", {"ram": -5}, UsageError, "ram is -5"),
        ("olmoe", {"vram": 1 << 70}, UsageError, "vram is"),
        ("olmoe", {"profile": "rtx9999-12g"}, UsageError, "no hardware profile 'rtx9999-12g'"),
        ("olmoe", {"profile": "./no.toml"}, UsageError, "no.toml"),
    ],
)
def test_errors_explain_why_a_plan_is_impossible(
    model: str, arguments: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        moechat.plan(model, **{"profile": desktop(), **arguments})


def test_similar_names_are_suggested() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        moechat.plan("mixtrl")
    assert "mixtral" in str(caught.value.hint)
    with pytest.raises(UsageError) as unknown:
        moechat.plan("olmoe", profile="rtx3060-12")
    assert "rtx3060-12g" in str(unknown.value.hint)


def test_files_that_are_not_configurations_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"broken\.json"):
        moechat.plan(broken, profile=desktop())
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}))
    with pytest.raises(UnsupportedModelError, match="no routed experts"):
        moechat.plan(dense, profile=desktop())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "model_type"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -64}, "hidden_size is -64, less than 0"),
        ({"hidden_size": "large"}, "hidden_size is 'large', not a whole number"),
        ({"num_experts_per_tok": 99}, "99 experts per token of 8"),
        ({"num_experts_per_tok": 0}, "0 experts per token of 8"),
        ({"moe_intermediate_size": 0}, "intermediate_size is 0"),
        (
            {"num_attention_heads": 0},
            "cannot build a model of type 'qwen3_moe' from this config.json: [^A-Z]",
        ),
        ({"model_type": "nonsense"}, "nonsense"),
    ],
)
def test_the_error_for_a_broken_configuration_has_a_hint(
    tmp_path: Path, changes: dict[str, Any] | None, reason: str
) -> None:
    config = {} if changes is None else {**tiny_config("qwen3_moe", 0).to_dict(), **changes}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for name in (file, tmp_path):
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            moechat.plan(name, profile=desktop())
        assert "compare" in str(caught.value.hint)
        assert "config.json" in f"{caught.value} {caught.value.hint}"


def test_every_system_can_be_planned(small: Path) -> None:
    rates = {}
    for system in SYSTEMS:
        made = moechat.plan(small, vram="804M", profile=desktop(), ctx=128, system=system)
        assert 0 < made.resident_share < 1
        assert made.speed is not None, system
        rates[system] = made.speed.tokens_per_s
    # The time of auto is simulated; those of the others are of their allocation, a lower bound, which is some
    # per cent less where a layer takes no longer than the calls of the host.
    assert rates["auto"] >= 0.96 * max(
        rates[name] for name in ("mixtral-offloading", "on-demand", "pregated")
    )


def test_a_speed_names_the_figures_it_is_based_on(olmoe: Plan) -> None:
    assert olmoe.speed is not None
    found = {figure.name: figure.value for figure in olmoe.speed.figures}
    assert found == {
        "graphics memory, bytes/s": 300e9,
        "dense weights on the GPU, bytes/s": 270e9,
        "experts on the GPU, bytes/s": 240e9,
        "GPU, operations/s": 30e12,
        "experts on the GPU, operations/s": 15e12,
        "starting a kernel, s": 5e-6,
        "RAM to GPU, bytes/s": 20e9,
        "experts on the CPU, bytes/s": 30e9,
        "RAM to GPU while the CPU computes, bytes/s": 18e9,
        "experts on the CPU while that link is busy, bytes/s": 15e9,
    }
    near_ram = moechat.plan("olmoe", profile=desktop(gpu=False, ram=6 * GIB)).speed
    assert near_ram is not None
    assert {figure.name: figure.value for figure in near_ram.figures} == {
        "experts on the CPU, bytes/s": 30e9,
        "experts on the CPU, operations/s": 200e9,
        "RAM, bytes/s": 40e9,
        "disk to RAM, bytes/s": 4e9,
    }


def test_json_has_only_plain_values_and_every_field(olmoe: Plan) -> None:
    plain = json.loads(json.dumps(olmoe.to_json(), allow_nan=False))
    assert set(plain) == {
        "model",
        "machine",
        "system",
        "strategy",
        "context",
        "memory",
        "layers",
        "statistics",
        "speed",
        "other_budgets",
        "notes",
    }
    assert plain["model"]["experts"] == 64
    assert plain["memory"]["tiers"][0]["used_bytes"] == olmoe.tiers[0].used
    assert plain["speed"]["tokens_per_s"] == olmoe.speed.tokens_per_s if olmoe.speed else False
    assert {figure["origin"] for figure in plain["speed"]["figures"]} == {"datasheet", "estimate"}
    assert "GPU, operations/s" in plain["speed"]["figure_origins"]["published"]
    assert "experts on the GPU, bytes/s" in plain["speed"]["figure_origins"]["assumed"]
    assert plain["speed"]["figure_origins"]["measured"] == []
    assert {figure["name"] for figure in plain["speed"]["costs_s"]} >= {"attention", "moe", "head", "load"}
    assert list(plain["speed"]["ttft_s"]) == ["128", "1024"]


def test_a_plan_for_wsl2_says_that_less_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.planning import words

    machine = Machine(desktop(), True, "gpu")
    monkeypatch.setattr(words, "in_wsl2", lambda: True)
    monkeypatch.setattr(words, "total_bytes", lambda: 16 * GIB)
    (note,) = (note for note in words.notes(machine, None, None, [], {}, pinned=9 * GIB) if "WSL2" in note)
    assert "WSL2 pins about 8192 MiB of the 9216 MiB of experts in RAM" in note
    assert ".wslconfig" in note
    for pinned, here, wsl in ((8 * GIB, True, True), (9 * GIB, False, True), (9 * GIB, True, False)):
        monkeypatch.setattr(words, "in_wsl2", lambda wsl=wsl: wsl)
        other = Machine(desktop(), here, "gpu")
        assert not any("WSL2" in note for note in words.notes(other, None, None, [], {}, pinned=pinned))


def test_a_wave_takes_a_small_share_of_the_memory_and_moves_missing_experts_once() -> None:
    made = moechat.plan("mixtral", vram="12G", profile="rtx3060-12g", ctx=8192)
    assert made.wave_tokens == 4096
    assert made.speed is not None
    assert made.speed.ttft_s is not None
    roomy = moechat.plan("mixtral", vram="20G", profile="rtx4090-24g", ctx=8192)
    assert roomy.wave_tokens == 2048, "less is missing: computing soon takes longer than moving it"
    # How long a wave is depends on the budget, and on a GPU the rounding on how long it is.
    same_bits = moechat.plan("mixtral", vram="12G", profile="rtx3060-12g", ctx=8192, deterministic=True)
    assert same_bits.wave_tokens == 0
    # Without a second chunk there is nothing to be saved.
    assert moechat.plan("mixtral", vram="12G", profile="rtx3060-12g", ctx=1024).wave_tokens == 0
    # Experts that are all near are moved no more.
    assert moechat.plan("olmoe", profile=desktop(gpu=False), ctx=4096).wave_tokens == 0


def test_tokens_of_a_gpu_that_holds_every_expert_do_not_wait_for_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speed(**options: Any) -> Speed:
        found = moechat.plan("qwen3-30b-a3b", profile="rtx4090-24g", **options).speed
        assert found is not None
        return found

    monkeypatch.delenv(RUN_AHEAD_VARIABLE, raising=False)
    usual, without_graphs = speed(), speed(deterministic=True)
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    behind = speed()
    assert usual.tokens_per_s > 1.3 * behind.tokens_per_s
    assert without_graphs.tokens_per_s < 0.8 * behind.tokens_per_s, "torch launches every kernel"
    assert usual.ttft_s is not None
    assert usual.ttft_s == behind.ttft_s, "the host launches every layer of a prompt"
    costs = {figure.name: figure.value for figure in usual.costs}
    token = 48 * (costs["attention"] + costs["moe"]) + costs["head"]
    assert usual.decode.seconds == pytest.approx(token)


def test_scores_that_are_materialised_make_chunks_short_but_not_waves() -> None:
    made = moechat.plan("gpt-oss-120b", profile="rtx3060-12g", ctx=8192)
    assert made.wave_tokens >= 2048
    assert made.speed is not None
    assert made.speed.ttft_s is not None
    # A pass has 256 tokens: it would move nearly all experts, and four passes four times as much.
    assert made.speed.ttft_s[1024] < 1.1 * made.speed.ttft_s[128]
