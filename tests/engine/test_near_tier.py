"""Tests of an engine whose experts do not all fit: budgets, statistics, interrupts, disk errors, closing."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny import write_tiny_chat_model
from transformers.cache_utils import DynamicCache

import moechat
from moechat import Engine
from moechat.budget.memory_plan import Budget
from moechat.configurator.systems import SYSTEMS, CacheSettings, Prefetch, settings_of
from moechat.engine.at_work import Watcher
from moechat.errors import DoesNotFitError, MoechatError, PromptTooLongError, StoreDamagedError
from moechat.loading import load
from moechat.models.prompt_cache import CachedTokens, PromptCache
from moechat.offload import host
from moechat.offload.settings import LinkSettings, OffloadOptions

PROMPT = [5, 60, 7, 81, 9, 100, 11, 12]
TIGHT = OffloadOptions(pages=6)
# One byte a second: no transfer finishes.
STANDING = LinkSettings(kind="sim", bandwidth=1.0, stall_seconds=0.4)


def answer(engine: Engine, prompt: list[int] = PROMPT, count: int = 8) -> list[int]:
    return [step.token_id for step in engine.generate(prompt, max_new_tokens=count, temperature=0.0)]


@pytest.fixture
def paged(chat_model: Path, home: Path) -> Iterator[Engine]:
    with moechat.load(chat_model, offload=TIGHT) as engine:
        yield engine


def test_paging_changes_no_token_and_is_counted(paged: Engine, engine: Engine) -> None:
    assert answer(paged) == answer(engine)
    stats, all_mapped = paged.stats, engine.stats
    assert stats.pages == 6
    assert 0 < stats.pages_peak <= 6
    assert stats.expert_activations == all_mapped.expert_activations
    assert stats.expert_bytes == all_mapped.expert_bytes
    accesses = stats.hits_full + stats.hits_prefetched + stats.hits_top + stats.misses
    assert accesses == 7 * 2 * 2, "7 tokens of the answer were fed, in 2 layers with 2 experts each"
    assert sum(stats.hit_rates.values()) == pytest.approx(1)
    assert stats.demand_bytes > 0
    assert stats.demand_bytes % stats.page_bytes == 0
    assert 0 < stats.link_busy_share <= 1
    assert (all_mapped.pages, all_mapped.misses, all_mapped.demand_bytes) == (0, 0, 0)
    assert set(all_mapped.hit_rates.values()) == {None}, "nothing is cached"
    assert all_mapped.to_json()["hit_rate_full"] is None
    assert stats.to_json().keys() == all_mapped.to_json().keys()
    assert {"hit_rate_full", "hit_rate_miss", "link_busy_share"} <= stats.to_json().keys()


def test_statistics_cover_one_answer(paged: Engine) -> None:
    answer(paged)
    first = paged.stats
    answer(paged)
    again = paged.stats
    assert again.expert_activations == first.expert_activations
    assert sum((again.hits_full, again.hits_prefetched, again.hits_top, again.misses)) == 28


def test_description_lists_the_parts_of_the_plan(paged: Engine, engine: Engine) -> None:
    described = paged.describe().to_json()
    assert described["pages"] == 6
    assert described["memory_experts_bytes"] == 6 * described["page_bytes"]
    # auto chooses all but the policy.
    chosen = paged.loaded.near.settings
    assert described["policy"] == chosen.policy == settings_of("auto").policy
    assert (described["prefetch"], described["split"]) == (chosen.prefetch, chosen.split)
    assert described["strategy"] == paged.loaded.near.plan.strategy.strategy.title
    mapped = engine.describe().to_json()
    assert mapped["experts"].startswith("mapped")
    parts = ("process", "dense", "attention_cache", "workspace", "scratch", "margin", "experts")
    total = sum(mapped[f"memory_{part}_bytes"] for part in parts)
    assert total <= mapped["memory_budget_bytes"]
    assert not mapped["memory_budget_given"]
    assert mapped["system"] == "auto"


def with_experts_in_the_page_cache(chat_model: Path, monkeypatch: pytest.MonkeyPatch, experts: int) -> Engine:
    """A model without a budget on a machine whose memory has room for four pages, and for more experts where
    the system may take them back.
    """
    with moechat.load(chat_model) as whole:
        plan, geometry = whole.loaded.plan, whole.loaded.store.geometry
    own = plan.total - plan.base - plan.expert_bytes + 4 * geometry.record_bytes

    def budget(_available: int, base: int) -> Budget:
        return Budget(base + own, False, experts * geometry.expert_bytes)

    monkeypatch.setattr(host, "automatic_budget", budget)
    return moechat.load(chat_model, ctx=plan.context)


def test_experts_in_the_page_cache_are_computed_there_and_never_fetched(
    chat_model: Path, home: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_experts_in_the_page_cache(chat_model, monkeypatch, 3) as other:
        plan, near = other.loaded.plan, other.loaded.near
        assert near is not None
        assert near.cached is not None
        assert not plan.mapped
        assert plan.cached_experts == sum(map(len, near.cached)) == 3
        assert near.runner.pages == plan.pages
        assert near.pages == plan.near_pages == plan.pages + plan.cached_experts * plan.expert_blocks
        resident = near.runner.residency().reshape(near.layers, -1)
        for layer, experts in enumerate(near.cached):
            assert (resident[layer, experts] == plan.expert_blocks).all()
        assert resident.sum() == plan.cached_experts * plan.expert_blocks, "pages are empty at first"
        assert answer(other) == answer(engine)
        assert torch.equal(other.logits(PROMPT), engine.logits(PROMPT))
        assert near.runner.check() == ""
        assert other.stats.demand_bytes > 0
        facts = other.describe()
        assert facts.memory_beyond_bytes == 3 * near.geometry.expert_bytes
        assert "3 in the page cache" in facts.experts
        assert Watcher(other).look().used_bytes <= plan.expert_bytes


def test_the_experts_used_most_are_those_in_the_page_cache(
    chat_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = np.arange(2 * 8).reshape(2, 8)
    monkeypatch.setattr(load, "recorded_activations", lambda *_: used)
    with with_experts_in_the_page_cache(chat_model, monkeypatch, 3) as other:
        assert other.loaded.near is not None
        assert [list(experts) for experts in other.loaded.near.cached or ()] == [[], [5, 6, 7]]


def test_experts_that_are_read_from_a_damaged_mapping_end_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    write_tiny_chat_model(tmp_path / "model")
    with with_experts_in_the_page_cache(tmp_path / "model", monkeypatch, 5) as other:
        assert other.loaded.near is not None
        store = other.loaded.store
        for record in store.layers:
            path = store.expert_extent(record.layer).path
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 64)
        with pytest.raises(StoreDamagedError):
            answer(other)


@pytest.mark.parametrize("ram", ["64M", 64 << 20])
def test_too_small_budget_error_names_a_budget_that_works(ram: Any, chat_model: Path, home: Path) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        moechat.load(chat_model, ram=ram)
    assert caught.value.least_bytes is not None
    # The memory of the test process grows between the two loads.
    with moechat.load(chat_model, ram=caught.value.least_bytes + (64 << 20)) as engine:
        assert engine.describe().memory_budget_given
        assert len(answer(engine)) == 8


def test_context_shortened_by_memory_is_explained(chat_model: Path, home: Path) -> None:
    with moechat.load(chat_model, offload=TIGHT) as engine:
        object.__setattr__(engine.loaded.plan, "context_limited", True)
        with pytest.raises(PromptTooLongError) as caught:
            engine.generate([5] * 300)
    assert "memory made the context shorter" in str(caught.value.hint)
    assert "--ram" in str(caught.value.hint)


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "oracle"])  # which needs the future
def test_every_system_gives_the_same_tokens(
    system: str, chat_model: Path, home: Path, engine: Engine
) -> None:
    offload = OffloadOptions(pages=9, cache=settings_of(system))
    with moechat.load(chat_model, system=system, offload=offload) as other:
        assert answer(other) == answer(engine)
        assert torch.equal(other.logits(PROMPT), engine.logits(PROMPT))


@pytest.mark.parametrize("prefetch", [name for name in get_args(Prefetch) if name != "perfect"])
def test_every_way_to_prefetch_moves_blocks_and_changes_no_token(
    prefetch: str, home: Path, chat_model: Path, engine: Engine
) -> None:
    with moechat.load(
        chat_model, system=f"auto:prefetch={prefetch}", offload=OffloadOptions(pages=9)
    ) as other:
        near = other.loaded.near
        assert near is not None
        assert (near.predictor is not None) == near.settings.predicts
        assert answer(other) == answer(engine)
        assert (other.stats.prefetch_bytes > 0) == (prefetch != "none")


def test_a_closed_engine_raises_and_close_is_idempotent(chat_model: Path, home: Path) -> None:
    with moechat.load(chat_model, offload=TIGHT) as engine:
        steps = engine.generate(PROMPT, max_new_tokens=8, temperature=0.0)
        next(steps)
    engine.close()
    for use in (lambda: next(steps), lambda: engine.logits(PROMPT), lambda: engine.generate(PROMPT)):
        with pytest.raises(MoechatError, match="was closed"):
            use()
    assert engine.describe().pages == 6
    assert engine.stats.output_tokens == 1


def test_closing_from_another_thread_during_a_pass_raises(chat_model: Path, home: Path) -> None:
    engine = moechat.load(chat_model, offload=TIGHT)
    layer = engine.loaded.model.get_submodule("model.layers.1")

    def close(*_: object) -> None:
        other = threading.Thread(target=engine.close)
        other.start()
        other.join()

    hook = layer.register_forward_pre_hook(close)
    with pytest.raises(MoechatError, match="was closed") as caught:
        list(engine.generate(PROMPT, max_new_tokens=8, temperature=0.0))
    hook.remove()
    assert "expert cache is closed" in str(caught.value.__cause__)


def test_unrelated_error_of_a_pass_is_not_translated(engine: Engine) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("as wanted")

    hook = engine.loaded.model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="as wanted"):
            engine.logits(PROMPT)
    finally:
        hook.remove()


def test_a_partly_constructed_engine_can_be_deleted() -> None:
    Engine.__new__(Engine).__del__()


def test_truncated_file_raises_damaged_store_and_the_engine_recovers(home: Path, tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path / "model")
    with moechat.load(tmp_path / "model", offload=TIGHT) as engine:
        expected = answer(engine)
        kept = {path: path.read_bytes() for path in engine.loaded.store.path.glob("experts-*.safetensors")}
        for path, data in kept.items():
            with path.open("r+b") as file:
                file.truncate(len(data) // 4)
        with pytest.raises(StoreDamagedError, match="experts-") as caught:
            answer(engine)
        assert caught.value.exit_code == 6
        for path, data in kept.items():
            with path.open("r+b") as file:
                file.write(data)
        assert answer(engine) == expected


def test_a_stalled_link_raises_within_its_limit(chat_model: Path, home: Path) -> None:
    with moechat.load(chat_model, offload=OffloadOptions(pages=6, link=STANDING)) as engine:
        for _ in range(2):  # the engine stays usable and tries again
            with pytest.raises(MoechatError, match="cannot be read") as caught:
                answer(engine)
            assert caught.value.exit_code == 6
            assert "try again" in str(caught.value.hint)


def test_ctrl_c_ends_a_wait_for_the_link(chat_model: Path, home: Path) -> None:
    link = LinkSettings(kind="sim", bandwidth=1.0, stall_seconds=60.0)
    with moechat.load(chat_model, offload=OffloadOptions(pages=6, link=link)) as engine:
        timer = threading.Timer(0.3, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            answer(engine)
        timer.join()
        # The engine still encodes, describes itself and rejects input; nothing of the answer is kept.
        assert engine.describe().pages == 6
        assert engine.decoder.prompt_cache.empty


def test_prompts_are_computed_in_chunks_and_an_interrupt_between_them_leaves_the_engine_usable(
    chat_model: Path, home: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * i) % 200 + 3 for i in range(100)]
    # In bfloat16 a short chunk is computed more exactly than a long one.
    with moechat.load(chat_model, dtype="float32") as one:
        whole, expected = one.logits(prompt), answer(one, prompt)
    passes: list[int] = []
    with moechat.load(chat_model, dtype="float32", offload=TIGHT) as other:
        other.passes.loaded = replace(other.loaded, chunk=32)
        hook = other.loaded.model.register_forward_pre_hook(
            lambda _module, _arguments, named: passes.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        parts = other.logits(prompt)
        assert passes == [32, 32, 32, 4]
        assert float((parts - whole).norm() / whole.norm()) < 1e-5
        passes.clear()
        assert answer(other, prompt) == expected
        assert passes == [32, 32, 32, 4] + [1] * 7
        hook.remove()

        def interrupt(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
            passes.append(named["input_ids"].shape[1])
            if len(passes) == 3:
                raise KeyboardInterrupt

        passes.clear()
        other.drop_prompt_cache()
        hook = other.loaded.model.register_forward_pre_hook(interrupt, with_kwargs=True)
        with pytest.raises(KeyboardInterrupt):
            answer(other, prompt)
        hook.remove()
        assert answer(other, prompt) == expected
        assert other.stats.reused_tokens == 64, "it goes on from the two parts that were computed"


def test_an_unfinished_prompt_keeps_no_memory() -> None:
    cache = PromptCache()
    for tokens in ([1, 2], [1, 2, 3]):
        cache.keep(CachedTokens(DynamicCache()), tokens, prompt=3, copied=True)
        assert cache.empty
    assert cache.take([1, 2, 3, 4], 100).cache is None


def test_near_tier_settings_can_be_given(chat_model: Path, home: Path, engine: Engine) -> None:
    settings = CacheSettings(policy="lru", split=0.5, prefetch="none")
    with moechat.load(chat_model, offload=OffloadOptions(cache=settings, pages=9)) as other:
        described = other.describe().to_json()
        assert (described["system"], described["policy"], described["split"]) == ("custom", "lru", 0.5)
        assert answer(other) == answer(engine)
        assert other.stats.prefetch_bytes == 0


def test_loading_does_not_import_hqq() -> None:
    """transformers imports hqq if installed, which costs a third of a second and 40 MiB of the budget."""
    script = "import sys, moechat.engine; print([name for name in ('hqq',) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
