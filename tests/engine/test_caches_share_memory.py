"""Attention caches of several conversations in the memory of one whole context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_family
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiny import SHAPES, UNLISTED, tiny_config, write_tiny_checkpoint
from transformers.cache_utils import DynamicCache

import moechat
from moechat import Engine
from moechat.budget.memory_plan import Budget
from moechat.configurator.systems import settings_of
from moechat.models.attention_cache import reserve_tokens
from moechat.models.cache_layers import ReservedLayer
from moechat.models.prompt_cache import CachedTokens, CacheRoom, PromptCache
from moechat.offload import host
from moechat.offload.host import HostPlacement
from moechat.offload.tier import ExpertTier, TierConfig

CONTEXT = 16_384


def tokens(seed: int, count: int) -> list[int]:
    found: list[int] = torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Path:
    directory: Path = tmp_path_factory.mktemp("caches") / "qwen3"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0, max_position_embeddings=CONTEXT))
    return directory


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with moechat.load(checkpoint, ctx=CONTEXT) as loaded:
        yield loaded


def answer(engine: Engine, prompt: list[int], count: int = 4) -> list[int]:
    return [step.token_id for step in engine.generate(prompt, max_new_tokens=count, temperature=0.0)]


def test_a_short_request_leaves_the_cache_of_a_long_conversation(engine: Engine) -> None:
    long = tokens(1, 6000)
    said = answer(engine, long)
    for seed in range(2, 5):
        answer(engine, tokens(seed, 300))
        assert engine.stats.reused_tokens == 0
    assert len(engine.decoder.prompt_cache) == 4
    answer(engine, [*long, *said, 5, 6, 7])
    assert engine.stats.reused_tokens == len(long) + len(said) - 1


def test_the_conversation_that_costs_least_to_compute_again_makes_room(engine: Engine) -> None:
    long = [tokens(seed, 6000) for seed in range(3)]  # two of them fit in the context
    for prompt in long:
        answer(engine, prompt)
    assert len(engine.decoder.prompt_cache) == 2
    answer(engine, [*long[1], 5])
    assert engine.stats.reused_tokens > 5000
    answer(engine, [*long[0], 5])
    assert engine.stats.reused_tokens == 0


def test_an_abandoned_long_conversation_is_evicted_in_time(engine: Engine) -> None:
    long = tokens(1, 9000)
    answer(engine, long)
    for seed in range(2, 12):
        answer(engine, tokens(seed, 3500))
    answer(engine, [*long, 5])
    assert engine.stats.reused_tokens == 0


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_conversation_that_grows_keeps_its_bits(
    checkpoint: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [tokens(seed, count) for seed, count in enumerate((500, 1200, 1300, 2500, 9000))]

    def conversation(engine: Engine) -> tuple[list[list[int]], list[int]]:
        said, capacities, whole = [], [], list[int]()
        for turn in turns:
            whole += turn
            said.append(answer(engine, whole, 40))
            whole += said[-1]
            latest = engine.decoder.prompt_cache.latest
            assert latest is not None
            capacities.append(latest.capacity)
        return said, capacities

    with moechat.load(checkpoint, ctx=CONTEXT, kv_bits=kv_bits) as engine:
        found, capacities = conversation(engine)
    assert capacities == sorted(capacities)
    assert len(set(capacities)) >= 3
    assert capacities[-1] == CONTEXT
    monkeypatch.setattr("moechat.engine.decoder._room", lambda _loaded: None)
    with moechat.load(checkpoint, ctx=CONTEXT, kv_bits=kv_bits) as engine:
        wanted, _ = conversation(engine)
    assert found == wanted


def test_an_answer_that_outgrows_its_cache_while_it_is_written_keeps_its_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moechat.models.prompt_cache._STEP", 16)
    monkeypatch.setattr("moechat.models.prompt_cache._ANSWER", 4)
    prompt = tokens(9, 20)
    found = answer(engine, prompt, 100)
    latest = engine.decoder.prompt_cache.latest
    assert latest is not None
    assert 119 <= latest.capacity < 200
    engine.drop_prompt_cache()
    monkeypatch.setattr("moechat.models.prompt_cache._STEP", 2048)
    assert answer(engine, prompt, 100) == found


def test_a_conversation_whose_beginning_another_shares_stays_where_both_fit(engine: Engine) -> None:
    system = tokens(1, 2100)
    first = [*system, *tokens(2, 8000)]
    answer(engine, first)
    answer(engine, [*system, *tokens(3, 50)])
    assert engine.stats.reused_tokens == 2048, "a whole part"
    latest = engine.decoder.prompt_cache.latest
    assert latest is not None
    assert latest.capacity == 4096, "as many as it needs, not as the other"
    answer(engine, [*first, 5])
    assert engine.stats.reused_tokens > 9000, "the first conversation is still there"


def test_a_conversation_beside_which_nothing_fits_gives_its_beginning_and_goes(engine: Engine) -> None:
    longer = tokens(4, 11_000)
    answer(engine, longer)
    answer(engine, [*longer[:3000], *tokens(5, 50)])
    assert engine.stats.reused_tokens == 2048
    (latest,) = engine.decoder.prompt_cache._held
    assert latest.capacity == 4096


def test_pages_of_experts_have_the_memory_that_conversations_do_not_use(
    engine: Engine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, geometry = engine.loaded.plan, engine.loaded.store.geometry
    own = plan.total - plan.base - plan.expert_bytes + 6 * geometry.record_bytes
    monkeypatch.setattr(host, "automatic_budget", lambda _, base: Budget(base + own, False))
    long, short = tokens(1, 12_000), tokens(2, 300)
    expected = [answer(engine, prompt, 20) for prompt in (short, long)]
    with moechat.load(checkpoint, ctx=CONTEXT) as paged:
        near, found = paged.loaded.near, paged.loaded.plan
        assert near is not None
        assert 0 < found.lent_pages == near.lent
        assert near.runner.pages == found.pages + found.lent_pages == near.pages
        assert found.total <= found.budget
        assert found.lent_bytes <= found.kv
        assert near.withheld == 0
        for _ in range(2):
            assert answer(paged, short, 20) == expected[0]
            assert near.withheld == 0
            full = near.runner.residency().sum()
            assert full > found.pages
            assert answer(paged, long, 20) == expected[1]
            assert near.withheld == near.lent, "the cache has its memory back"
            assert near.runner.residency().sum() <= found.pages
            assert near.targets.prod(axis=1).sum() > found.pages - near.reserve, "the plan stays"
            assert near.runner.check() == ""
        paged.logits(short)
        assert near.withheld == near.lent, "a cache of the whole context"
        assert paged.describe().memory_lent_bytes == found.lent_bytes


def test_withheld_pages_take_no_memory(engine: Engine) -> None:
    store = engine.loaded.store
    blocks = len(store.layers) * store.geometry.num_experts * store.geometry.blocks_per_expert
    tier = ExpertTier(
        TierConfig(store, 2), HostPlacement(), pages=8, settings=settings_of("auto"), lent=blocks - 8
    )
    with closing(tier):
        everything = [
            (layer, expert) for layer in range(tier.layers) for expert in range(store.geometry.num_experts)
        ]
        tier.runner.preload(np.array(everything, np.int32), 1 << 30)
        tier.drain()
        full = tier.runner.resident_bytes
        half = tier.lent // 2
        tier.lend(half * store.geometry.record_bytes)
        assert tier.withheld == tier.lent - half
        assert (
            tier.runner.resident_bytes <= full - (tier.withheld - tier.reserve) * store.geometry.record_bytes
        )
        assert tier.runner.check() == ""
        # An interrupted pass has left a layer that has begun.
        tier.runner.begin(0, np.array([[0, 1]]), np.ones((1, 2), np.float32))
        tier.lend(0)
        assert tier.withheld == tier.lent
        assert tier.runner.residency().sum() <= 8
        tier.lend(1 << 40)
        assert tier.withheld == 0
        assert tier.runner.check() == ""


def test_other_caches_are_gone_before_a_beginning_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, alive = CachedTokens.copy_to, []

    def counted(held: CachedTokens, other: CachedTokens, position: int) -> None:
        alive.append([len(one.tokens) for one in cache._held])
        copy(held, other, position)

    monkeypatch.setattr(CachedTokens, "copy_to", counted)
    for room in (None, CacheRoom(lambda capacity: capacity, 13_000, 1)):
        cache = PromptCache(2, room)
        for text, count in ((1, 4000), (2, 4000)):
            kept(cache, [text] * count)
        held = cache.take([1] * 1500 + [7] * 400, 1 << 40)
        assert len(held.tokens) == 1500
    assert alive == [[4000], [4000]], "that which is copied, alone"


def test_the_conversation_that_was_kept_last_stays() -> None:
    room = CacheRoom(lambda capacity: capacity, 40_000, 1)
    cache = PromptCache(1, room)
    for text in range(16):
        kept(cache, [text + 1] * 1000)
    kept(cache, [99] * 10)
    assert len(cache) == 16
    assert cache.latest is not None
    assert cache.latest.tokens == [99] * 10
    many = PromptCache(40, CacheRoom(lambda capacity: capacity, 40_000, 40))
    for text in range(30):
        kept(many, [text + 1] * 10)
    assert len(many) == 30, "as many as there is memory for whole contexts"


def kept(cache: PromptCache, text: list[int]) -> None:
    """A conversation of this text has ended."""
    held = cache.take(text, 1 << 40)
    held.cache = DynamicCache()
    held.cache.layers = [ReservedLayer(len(text))]
    rows = torch.zeros(1, 1, len(text), 1)
    held.begin([1500] if len(text) > 1500 else [], 0)
    held.cache.layers[0].update(rows, rows)
    held.reached(1500)
    cache.keep(held, text, len(text) - 1, copied=True)


def test_a_conversation_read_from_a_file_stays_and_goes_on(engine: Engine, tmp_path: Path) -> None:
    short, long = tokens(1, 700), tokens(2, 5000)
    said = answer(engine, short)
    assert engine.save_conversation(tmp_path / "kept") == len(short) + len(said) - 1
    engine.drop_prompt_cache()
    answer(engine, long)
    assert engine.load_conversation(tmp_path / "kept") == len(short) + len(said) - 1
    answer(engine, [*short, *said, 5])
    assert engine.stats.reused_tokens == len(short) + len(said) - 1


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "lfm2_moe", "deepseek_v32", "deepseek_v3"])
def test_families_with_other_layers_grow_and_are_copied_too(
    family: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(family) if family in {*SHAPES, *UNLISTED} else tiny_family(family)
    config.max_position_embeddings = 4096
    write_tiny_checkpoint(tmp_path / family, config)
    monkeypatch.setattr("moechat.models.prompt_cache._STEP", 16)
    monkeypatch.setattr("moechat.models.prompt_cache._ANSWER", 4)
    turns = [tokens(seed, count) for seed, count in enumerate((40, 70, 30, 200))]

    def conversations(engine: Engine) -> list[list[int]]:
        engine.passes.loaded = replace(engine.loaded, chunk=16, plan=replace(engine.loaded.plan, wave=0))
        said, whole = [], list[int]()
        for turn in turns:
            whole += turn
            said.append(answer(engine, whole, 30))
            whole += said[-1]
            said.append(answer(engine, [*whole[:33], *tokens(9, 20)], 5))
        return said

    with moechat.load(tmp_path / family, ctx=4096) as engine:
        found = conversations(engine)
        assert engine.decoder.prompt_cache._room is not None
        assert max(held.capacity for held in engine.decoder.prompt_cache._held) < 1024
    monkeypatch.setattr("moechat.engine.decoder._room", lambda _loaded: None)
    with moechat.load(tmp_path / family, ctx=4096, conversations=4) as engine:
        wanted = conversations(engine)
    assert found == wanted


ROOM = CacheRoom(lambda capacity: 1000 + 10 * capacity, 10_000, 2)


def test_a_cache_reserves_a_little_more_than_it_needs_or_the_whole_context() -> None:
    assert ROOM.capacity(1) == 2048
    assert ROOM.capacity(1500) == 4096
    assert ROOM.capacity(4300) == 6144
    assert ROOM.capacity(7200) == 10_000
    assert ROOM.capacity(10_000) == 10_000
    small = CacheRoom(ROOM.nbytes, 1024, 1)
    assert small.capacity(1) == 1024


@torch.inference_mode()
def test_layers_keep_their_tokens_when_they_reserve_more() -> None:
    for packed in (False, True):
        cache = DynamicCache()
        layer = ReservedLayer(8, packed=packed)
        cache.layers = [layer]
        states = torch.randn(1, 2, 8, 64)
        before = [rows.clone() for rows in layer.update(states, states + 1)]
        assert not layer.takes_token(2, 64, torch.float32)
        reserve_tokens(cache, 20)
        assert layer.takes_token(2, 64, torch.float32)
        more = torch.randn(1, 2, 3, 64)
        for rows, first in zip(layer.update(more, more), before, strict=True):
            assert torch.equal(rows[:, :, :8], first)
            assert rows.shape[-2] == 11
        reserve_tokens(cache, 10)
        assert layer.get_seq_length() == 11


class Sharing(RuleBasedStateMachine):
    """Answers begin, grow and end in any order, at most two at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = ROOM.total
        self.cache = PromptCache(2, ROOM, self.lend)
        self.running: list[tuple[CachedTokens, list[int]]] = []

    def lend(self, nbytes: int) -> None:
        self.lent = nbytes

    @rule(text=st.integers(0, 5), count=st.integers(1, 9000))
    def begin(self, text: int, count: int) -> None:
        if len(self.running) == 2:
            return
        prompt = [text] * count
        held = self.cache.take(prompt, 1 << 40)
        assert held.tokens == prompt[: len(held.tokens)]
        assert len(held.tokens) < count
        self.the_memory_holds_them([held])
        if held.cache is None:
            held.cache = DynamicCache()
            held.cache.layers = [ReservedLayer(held.capacity)]
        assert all(held is not other for other, _ in self.running)
        self.running.append((held, prompt))

    @rule(place=st.integers(0, 1), count=st.integers(1, 3000), kept=st.booleans())
    def end(self, place: int, count: int, kept: bool) -> None:
        if place >= len(self.running):
            return
        held, prompt = self.running.pop(place)
        whole = (prompt + [9] * count)[: ROOM.context]
        self.cache.grow(held, len(whole))
        assert held.capacity >= len(whole)
        self.the_memory_holds_them([held])
        fresh = torch.zeros(1, 1, len(whole) - held.cache.layers[0].get_seq_length(), 1)
        held.cache.layers[0].update(fresh, fresh)
        if kept:
            self.cache.keep(held, whole, len(prompt), copied=True)
        else:
            self.cache.give_up(held)

    @invariant()
    def the_memory_holds_them(self, more: Sequence[CachedTokens] = ()) -> None:
        kept = [*self.cache._held, *(held for held, _ in self.running), *more]
        used = sum(ROOM.nbytes(held.capacity) for held in kept)
        assert used <= ROOM.total
        assert 0 <= self.lent <= ROOM.total - used, "lent memory is back before a cache reserves it"
        assert len({id(held) for held in kept}) == len(kept)
        assert all(len(held.tokens) <= held.capacity for held in kept)
        assert len(self.cache) <= 16


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
