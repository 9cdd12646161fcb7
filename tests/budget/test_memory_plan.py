"""The division of a memory budget, in pure numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.budget.memory_plan import (
    MEBI,
    Budget,
    MemoryPlan,
    Needs,
    automatic_budget,
    least_budget,
    plan_memory,
)
from moechat.errors import DoesNotFitError

NEEDS = Needs(
    base=400 * MEBI,
    dense=300 * MEBI,
    loading=100 * MEBI,
    kv=lambda tokens: tokens * (MEBI // 16),
    workspace=lambda tokens: 50 * MEBI + tokens * 4096,
    scratch=30 * MEBI,
    page_bytes=MEBI // 4,
    blocks=16_000,
    min_pages=2,
    own_context=32_768,
    threads=2,
)
EVERYTHING = NEEDS.blocks * NEEDS.page_bytes


def counted(plan: MemoryPlan) -> int:
    parts = (plan.base, plan.dense, plan.kv, plan.workspace, plan.scratch, plan.margin)
    return sum(parts) + plan.pages * plan.page_bytes + (EVERYTHING if plan.mapped else 0)


def test_pages_take_the_memory_that_other_parts_leave() -> None:
    plan = plan_memory(NEEDS, 2048 * MEBI, ctx=1024)
    assert (plan.base, plan.dense, plan.scratch) == (NEEDS.base, NEEDS.dense, NEEDS.scratch)
    assert plan.kv == 64 * MEBI
    assert plan.workspace == 54 * MEBI
    assert not plan.mapped
    assert counted(plan) == plan.total <= plan.budget
    assert plan.total > plan.budget - 2 * plan.page_bytes
    assert plan.margin >= 32 * MEBI


def test_the_loading_peak_must_fit_but_takes_no_pages() -> None:
    usual = plan_memory(NEEDS, 2048 * MEBI, ctx=1024)
    heavy = replace(NEEDS, loading=1200 * MEBI)
    assert plan_memory(heavy, 2048 * MEBI, ctx=1024) == usual
    with pytest.raises(DoesNotFitError) as caught:
        plan_memory(heavy, 1900 * MEBI, ctx=1024)
    least = caught.value.least_bytes
    assert least == least_budget(heavy, 1024)
    assert least is not None
    assert 1936 * MEBI <= least <= 1952 * MEBI  # 400 + 300 + 1200, and the margin
    assert plan_memory(heavy, least, ctx=1024).total <= least
    assert "loading 1200" in str(caught.value)
    assert "while the weights are loaded" in str(caught.value)
    # A shorter context does not help.
    assert "--ctx" not in str(caught.value.hint)


def test_all_experts_are_mapped_if_they_fit() -> None:
    budget = least_budget(NEEDS, 1024) + EVERYTHING + EVERYTHING // 50
    plan = plan_memory(NEEDS, budget, ctx=1024)
    assert (plan.mapped, plan.pages, plan.expert_bytes) == (True, 0, EVERYTHING)
    assert plan.total <= budget
    less = plan_memory(NEEDS, plan.total - MEBI, ctx=1024)
    assert not less.mapped
    assert less.pages <= NEEDS.blocks


def test_a_given_number_of_pages_overrides_the_budget() -> None:
    assert plan_memory(NEEDS, 1, ctx=1024, pages=7).pages == 7
    assert plan_memory(NEEDS, 1, ctx=1024, pages=0).mapped


def test_a_given_context_is_never_changed() -> None:
    plan = plan_memory(NEEDS, 2048 * MEBI, ctx=9999)
    assert (plan.context, plan.context_limited) == (9999, False)


@pytest.mark.parametrize("budget", [1600, 2048, 3000, 4000])
def test_the_default_context_takes_at_most_a_quarter_of_the_rest(budget: int) -> None:
    needs = replace(NEEDS, loading=0, workspace=lambda _: 50 * MEBI)
    plan = plan_memory(needs, budget * MEBI)
    left = budget * MEBI - (plan.base + plan.dense + plan.scratch + plan.workspace)
    assert plan.context % 256 == 0
    assert plan.context_limited
    assert plan.context == 4096 or left / 5 < plan.kv <= left / 4
    assert plan.context >= 4096
    assert plan_memory(needs, (budget + 500) * MEBI).context > plan.context


def test_a_short_context_of_the_model_is_kept() -> None:
    plan = plan_memory(replace(NEEDS, own_context=512), 2048 * MEBI)
    assert (plan.context, plan.context_limited) == (512, False)


def test_with_mapped_experts_the_context_can_take_the_whole_rest() -> None:
    plan = plan_memory(NEEDS, 10_000 * MEBI)
    assert (plan.mapped, plan.context) == (True, 32_768)
    tight = plan_memory(NEEDS, 5_500 * MEBI)
    assert tight.mapped
    assert 4096 <= tight.context < 32_768
    assert tight.total <= tight.budget


def test_the_error_for_a_small_budget_lists_the_parts_and_the_least() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_memory(NEEDS, 700 * MEBI, ctx=1024)
    error = caught.value
    assert error.exit_code == 4
    text = str(error)
    for said in (
        "budget is 700 MiB",
        "process 400",
        "dense weights 300",
        "attention cache 64",
        "workspace 54",
        "scratch 30",
        "margin",
        "1024 tokens",
    ):
        assert said in text
    assert error.least_bytes is not None
    assert f"{error.least_bytes // MEBI}M with --ram (ram=) or a context shorter than 1024" in str(error.hint)
    assert plan_memory(NEEDS, error.least_bytes, ctx=1024).pages >= NEEDS.min_pages


def test_the_error_for_little_free_memory_says_so() -> None:
    with pytest.raises(DoesNotFitError, match="the memory that is available is 700 MiB") as caught:
        plan_memory(NEEDS, Budget(700 * MEBI, False))
    assert "end other programs" in str(caught.value.hint)


_SIZES = st.integers(0, 64 << 30)


@given(
    base=_SIZES,
    dense=_SIZES,
    loading=_SIZES,
    token=st.integers(0, 1 << 20),
    work=st.integers(0, 1 << 20),
    page=st.integers(1, 1 << 12).map(lambda pages: pages * 4096),
    blocks=st.integers(2, 1 << 20),
    least=st.integers(2, 64),
    own=st.integers(2, 1 << 18),
    ctx=st.none() | st.integers(2, 1 << 18),
    threads=st.integers(1, 256),
    below=st.integers(0, 64 << 30),
    above=st.integers(0, 256 << 30),
    spare=st.integers(0, 1 << 30),
    parts=st.integers(1, 256),
)
def test_every_plan_fits_its_budget_and_the_least_works(
    base: int,
    dense: int,
    loading: int,
    token: int,
    work: int,
    page: int,
    blocks: int,
    least: int,
    own: int,
    ctx: int | None,
    threads: int,
    below: int,
    above: int,
    spare: int,
    parts: int,
) -> None:
    needs = Needs(
        base=base,
        dense=dense,
        loading=loading,
        kv=lambda tokens: tokens * token,
        workspace=lambda tokens: min(tokens, 1024) * work,
        scratch=36 * MEBI,
        page_bytes=page,
        blocks=blocks,
        expert_blocks=parts,
        min_pages=min(least, blocks),
        own_context=own,
        threads=threads,
    )
    smallest = least_budget(needs, ctx)
    assert smallest % (16 * MEBI) == 0
    if below:
        with pytest.raises(DoesNotFitError) as caught:
            # Nothing below the least but what its rounding up to a friendly figure has added.
            plan_memory(needs, max(1, smallest - 256 * MEBI - below), ctx=ctx)
        assert caught.value.least_bytes == smallest
    for budget in (smallest, smallest + above):
        plan = plan_memory(needs, budget, ctx=ctx)
        assert plan.total <= budget
        assert base + dense + loading < budget
        assert plan.mapped == (plan.pages == 0)
        assert plan.mapped or needs.min_pages <= plan.pages <= blocks
        assert plan.context == (ctx or plan.context)
        assert plan.context <= max(own, ctx or 0)
        assert plan.context >= (ctx or min(own, 4096))
        more = plan_memory(needs, Budget(budget, False, spare), ctx=ctx)
        assert more.total <= budget + (spare if more.mapped else 0)
        assert more.beyond_bytes <= spare
        assert more.mapped or more.pages == plan.pages
        assert more.total - more.expert_bytes <= budget
        assert more.near_pages < blocks + parts


def test_the_automatic_budget_leaves_a_tenth_within_half_a_gibibyte_and_a_whole_one() -> None:
    for available, base, budget, spare in (
        (20_000, 500, 19_476, 768),
        (8_000, 500, 7_700, 600),
        (2_000, 500, 1_988, 384),
        (600, 0, 300, 225),
    ):
        found = automatic_budget(available * MEBI, base * MEBI)
        assert found == Budget(budget * MEBI, False, spare * MEBI)


FEW = replace(NEEDS, expert_blocks=40)  # experts of 10 MiB


def test_experts_lie_in_what_is_spare_beside_the_pages() -> None:
    without = plan_memory(FEW, 2048 * MEBI, ctx=1024)
    plan = plan_memory(FEW, Budget(2048 * MEBI, False, 205 * MEBI), ctx=1024)
    assert (plan.pages, plan.total) == (without.pages, without.total)
    assert plan.cached_experts == 20
    assert plan.cached_bytes == plan.beyond_bytes == 200 * MEBI
    assert plan.near_pages == plan.pages + 20 * 40
    assert without.cached_experts == without.beyond_bytes == 0
    for other in (
        plan_memory(FEW, Budget(2048 * MEBI, False, 205 * MEBI), ctx=1024, keeps_experts=False),
        plan_memory(FEW, Budget(2048 * MEBI, False, 205 * MEBI), ctx=1024, pages=500),
    ):
        assert (other.cached_experts, other.spare) == (0, 0)


def test_pages_take_what_most_conversations_leave_of_the_attention_cache() -> None:
    needs = replace(FEW, kv_idle=lambda tokens: FEW.kv(tokens) - FEW.kv(min(4096, tokens)))
    without, plan = plan_memory(FEW, 3000 * MEBI), plan_memory(needs, 3000 * MEBI)
    assert replace(plan, lent_pages=0) == without
    assert plan.context > 4096
    left = FEW.kv(plan.context) - FEW.kv(4096)
    assert left - 8 * MEBI < plan.lent_bytes * 1.015 <= left
    assert plan.near_pages == plan.pages + plan.lent_pages
    for other in (
        plan_memory(needs, 3000 * MEBI, ctx=4096),
        plan_memory(needs, 3000 * MEBI, keeps_experts=False),
        plan_memory(needs, 3000 * MEBI, pages=50),
        plan_memory(needs, 9000 * MEBI),
    ):
        assert other.lent_pages == 0
    # Never more pages than blocks, with those in the page cache too.
    most = plan_memory(needs, Budget(4900 * MEBI, False, 500 * MEBI), ctx=16_384)
    assert not most.mapped
    assert most.lent_pages > 0
    assert most.near_pages < needs.blocks + needs.expert_blocks


def test_all_experts_are_mapped_where_they_fit_with_what_is_spare() -> None:
    whole = plan_memory(FEW, 8192 * MEBI, ctx=1024)
    short = Budget(whole.total - 150 * MEBI, False, 200 * MEBI)
    plan = plan_memory(FEW, short, ctx=1024)
    assert (plan.mapped, plan.pages, plan.cached_experts) == (True, 0, 0)
    assert plan.beyond_bytes == 150 * MEBI
    paged = plan_memory(FEW, replace(short, spare=100 * MEBI), ctx=1024)
    assert not paged.mapped
    # No more of them than the pages lack.
    most = plan_memory(FEW, replace(short, nbytes=whole.total - 30 * MEBI, spare=29 * MEBI), ctx=1024)
    lacking = FEW.blocks - most.pages
    assert 0 < most.cached_experts * FEW.expert_blocks < lacking + FEW.expert_blocks


WAVES = replace(NEEDS, chunk=1024, wave=lambda tokens, context: tokens * 16_384 + context * 1024)


def test_a_wave_is_as_long_as_its_share_of_the_memory_allows() -> None:
    found = [plan_memory(WAVES, size * MEBI, ctx=16_384).wave for size in (2048, 2560, 3072, 4096)]
    assert found[0] == 0, "two chunks would take more than their share"
    assert found == sorted(found)
    assert found[-1] == 4096
    for size, wave in zip((2048, 2560, 3072, 4096), found, strict=True):
        plan, without = (plan_memory(needs, size * MEBI, ctx=16_384) for needs in (WAVES, NEEDS))
        taken = plan.workspace - without.workspace
        assert taken == (wave * 16_384 + 16_384 * 1024 if wave else 0)
        assert taken <= 0.06 * (size * MEBI - (without.total - without.pages * without.page_bytes))
        assert counted(plan) <= plan.budget


def test_a_wave_is_no_longer_than_a_context_and_none_where_experts_are_mapped() -> None:
    assert plan_memory(WAVES, 4096 * MEBI, ctx=3000).wave == 4096, "3,000 tokens in chunks"
    assert plan_memory(WAVES, 4096 * MEBI, ctx=1024).wave == 0
    mapped = plan_memory(WAVES, 16_384 * MEBI, ctx=16_384)
    assert mapped.mapped
    assert mapped.wave == 0, "chunks of 1024 tokens give each expert enough"
    assert plan_memory(WAVES, 4096 * MEBI, ctx=16_384, pages=100).wave > 0
    # Of 4,000 MiB of experts 2,700 are missing: computing 1,350 tokens takes as long as moving them.
    fast = replace(WAVES, operations=2 * MEBI)
    assert plan_memory(fast, 3072 * MEBI, ctx=16_384).wave == 2048
    assert least_budget(WAVES, 4096) == least_budget(NEEDS, 4096), "a wave refuses no budget"


def test_short_chunks_of_mapped_experts_are_joined_to_waves_of_1024_tokens_where_they_fit() -> None:
    short = replace(WAVES, chunk=256, wave_scratch=lambda tokens: tokens * 512)
    plan = plan_memory(short, 16_384 * MEBI, ctx=16_384)
    without = plan_memory(replace(short, chunk=0), 16_384 * MEBI, ctx=16_384)
    assert plan.mapped
    assert (plan.wave, without.wave) == (1024, 0)
    taken = 1024 * (16_384 + 512) + 16_384 * 1024
    assert plan.workspace - without.workspace == taken
    assert plan_memory(short, 16_384 * MEBI, ctx=256).wave == 0, "no prompt has two chunks"
    assert plan_memory(short, 16_384 * MEBI, ctx=300).wave == 1024
    # A wave never takes so much that experts are no longer mapped, nor a budget beyond its end.
    for budget in range(4096 * MEBI, 8192 * MEBI, 8 * MEBI):
        tight, usual = plan_memory(short, budget, ctx=16_384), plan_memory(NEEDS, budget, ctx=16_384)
        assert tight.mapped == usual.mapped
        assert counted(tight) <= tight.budget


def test_waves_with_missing_experts_have_at_least_the_tokens_of_a_usual_pass() -> None:
    # Nearly all experts fit: two chunks would take longer to compute than the missing ones to be moved.
    needs = replace(WAVES, chunk=256, operations=1 << 40)
    plan = plan_memory(needs, 4096 * MEBI, ctx=16_384)
    assert not plan.mapped
    assert plan.wave == 1024
