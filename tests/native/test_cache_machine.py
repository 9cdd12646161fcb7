"""The split-expert cache against a model made of dictionaries, and each rule by itself.

The machine takes random steps in the cache and in the model, compares both after every step, and checks
from outside that a page that is being filled or that a pinned expert relies on does not change hands, that
resident blocks are a prefix, and that all pages are accounted for.
"""

from __future__ import annotations

import errno
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from native_support import POLICIES

from moechat._native import EvictionPolicy, SplitExpertCache

ORPHAN, STAGING = "orphan", "staging"


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_cache(
    layers: int,
    experts: int,
    blocks: int,
    pages: int,
    targets: list[tuple[int, int]],
    reserve: int = 1,
    policy: str = "lru",
    **rules: str,
) -> SplitExpertCache:
    made = EvictionPolicy(policy, layers, experts, omega=4.0)
    given = np.array(targets, np.int32)
    return SplitExpertCache(layers, experts, blocks, pages, 4096, made, given, reserve, **rules)


@dataclass
class Block:
    page: int
    filling: bool
    fresh: bool  # a prefetch has brought it, and it was not used
    prefetch: bool  # it was fetched by a prefetch
    preload: bool = False  # by one that is none of the prefetches that are counted


def counter_of(block: Block) -> str:
    """Where it counts when it has landed."""
    return "preloaded" if block.preload else "fetched_prefetch" if block.prefetch else "fetched_demand"


@dataclass
class Trial:
    """What a layer would hold by either rule of admission, and how many more hits ``always`` has had."""

    held: dict[str, set[int]] = field(default_factory=lambda: {"key": set(), "always": set()})
    lead: float = 0.0

    def access(self, experts: list[int], keys: np.ndarray, room: int) -> None:
        hits = {name: len(held & set(experts)) for name, held in self.held.items()}
        self.lead = 0.5 ** (1 / 256) * self.lead + hits["always"] - hits["key"]
        for name, held in self.held.items():
            first = set(experts) if name == "always" else set()
            ranked = sorted((expert in first, keys[expert], expert) for expert in held | set(experts))
            self.held[name] = {expert for *_, expert in ranked[max(0, len(ranked) - room) :]}


@dataclass
class Model:
    """Reference model of the cache: lists of blocks by expert, and sets."""

    layers: int
    experts: int
    blocks: int
    pages: int
    targets: list[tuple[int, int]]
    comparable: bool = False  # keys of different layers are
    admit: str = "key"
    lowest: bool = False  # victims have the lowest key of all layers
    latest: dict[int, set[int]] = field(default_factory=dict)  # experts of each layer's latest access
    trials: dict[int, Trial] = field(default_factory=lambda: defaultdict(Trial))
    held: dict[tuple[int, int], list[Block]] = field(default_factory=dict)
    pins: Counter[tuple[int, int]] = field(default_factory=Counter)
    kept: set[tuple[int, int]] = field(default_factory=set)
    # page: kind, filling, counter of its landing
    loose: dict[int, tuple[str, bool, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.held = {(layer, e): [] for layer in range(self.layers) for e in range(self.experts)}

    def free(self) -> int:
        return self.pages - sum(map(len, self.held.values())) - len(self.loose)

    def resident(self, who: tuple[int, int]) -> int:
        return next((i for i, b in enumerate(self.held[who]) if b.filling), len(self.held[who]))

    def surplus(self, who: tuple[int, int]) -> int:
        if self.pins[who] or any(block.filling for block in self.held[who]):
            return 0
        return max(0, len(self.held[who]) - (self.targets[who[0]][1] if who in self.kept else 0))

    def in_flight(self) -> int:
        ours = sum(block.filling for blocks in self.held.values() for block in blocks)
        return ours + sum(filling for _, filling, _ in self.loose.values())

    def find(self, page: int) -> tuple[tuple[int, int], int] | None:
        for who, blocks in self.held.items():
            for number, block in enumerate(blocks):
                if block.page == page:
                    return who, number
        return None

    def drop(self, who: tuple[int, int], count: int) -> None:
        for block in reversed(self.held[who][count:]):
            self.counts["prefetch_wasted"] += block.fresh and not block.preload
            if block.filling:
                self.loose[block.page] = (ORPHAN, True, counter_of(block))
        del self.held[who][count:]

    def victims(
        self, keys: list[np.ndarray], at: int, need: int, spared: set[tuple[int, int]], to: int | None
    ) -> list[tuple[int, int, int]]:
        """The ``need`` cheapest surplus blocks; ``to``: the layer that a prefetch is for."""
        order: dict[int, list[int]] = {}
        for step in range(self.layers):
            layer = (at - step) % self.layers
            order[layer] = [
                expert
                for expert in sorted(range(self.experts), key=lambda e, of=layer: (keys[of][e], e))
                if self.surplus((layer, expert))
                and not (
                    layer == to
                    and ((layer, expert) in spared or any(block.fresh for block in self.held[layer, expert]))
                )
            ]
            if layer == to:
                break
        chosen: list[tuple[int, int, int]] = []
        while need > 0 and any(order.values()):
            lowest = {layer: keys[layer][experts[0]] for layer, experts in order.items() if experts}
            layer = next(iter(lowest))  # whose turn is farthest away
            cheapest = min(lowest, key=lowest.__getitem__)
            if self.lowest:
                if lowest[cheapest] < lowest[layer]:
                    layer = cheapest
            elif self.comparable and lowest[cheapest] + 1 < lowest[layer]:
                layer = cheapest
            expert = order[layer].pop(0)
            taken = min(need, self.surplus((layer, expert)))
            chosen.append((layer, expert, taken))
            need -= taken
        return chosen

    def plan(
        self,
        keys: list[np.ndarray],
        layer: int,
        experts: list[int],
        at: int,
        *,
        prefetch: bool,
        most: int | None,
        whole: bool,
        preload: bool = False,
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], int]:
        """(victims, fetches as (layer, expert, block), satisfied)."""
        spared = {(layer, expert) for expert in experts}
        to = layer if prefetch else None
        reach = 0 if preload else sum(n for *_, n in self.victims(keys, at, self.pages, spared, to))
        left = min(self.free() + reach, self.pages if most is None else most)
        fetches: list[tuple[int, int, int]] = []
        complete = []
        for expert in experts:
            missing = range(len(self.held[layer, expert]), self.blocks)
            taken = len(missing) if len(missing) <= left else 0 if whole else left
            fetches += [(layer, expert, block) for block in missing[:taken]]
            left -= taken
            complete.append(taken == len(missing))
        satisfied = complete.index(False) if False in complete else len(complete)
        need = max(0, len(fetches) - self.free())
        return self.victims(keys, at, need, spared, to), fetches, satisfied


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        layers=st.integers(1, 3),
        experts=st.integers(2, 4),
        blocks=st.integers(1, 3),
        pages=st.integers(2, 16),
        policy=st.sampled_from(POLICIES),
        admit=st.sampled_from(["key", "always", "best"]),
        taken=st.sampled_from(["farthest", "lowest"]),
        data=st.data(),
    )
    def start(
        self,
        layers: int,
        experts: int,
        blocks: int,
        pages: int,
        policy: str,
        admit: str,
        taken: str,
        data: st.DataObject,
    ) -> None:
        self.reserve = data.draw(st.integers(1, pages))
        self.accessed: set[int] = set()
        self.model = Model(layers, experts, blocks, pages, [])
        self.model.targets = self.draw_targets(data)
        self.model.comparable = EvictionPolicy(policy, layers, experts).comparable
        self.model.admit, self.model.lowest = admit, taken == "lowest"
        self.cache = make_cache(
            layers,
            experts,
            blocks,
            pages,
            self.model.targets,
            self.reserve,
            policy,
            admit=admit,
            victims=taken,
        )

    def draw_targets(self, data: st.DataObject) -> list[tuple[int, int]]:
        model, targets = self.model, []
        left = model.pages - self.reserve
        for _ in range(model.layers):
            blocks = data.draw(st.integers(1, model.blocks))
            count = data.draw(st.integers(0, min(model.experts, left // blocks)))
            left -= count * blocks
            targets.append((count, blocks))
        return targets

    def draw_layer(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, self.model.layers - 1))

    def draw_experts(self, data: st.DataObject) -> list[int]:
        return data.draw(
            st.lists(st.integers(0, self.model.experts - 1), min_size=1, max_size=3, unique=True)
        )

    def keys(self) -> list[np.ndarray]:
        return [self.cache.keys(layer) for layer in range(self.model.layers)]

    def filling(self) -> list[int]:
        return [page for page in range(self.model.pages) if self.cache.filling(page)]

    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 1, 4]))
    def access(self, data: st.DataObject, tokens: int) -> None:
        model, layer, experts = self.model, self.draw_layer(data), self.draw_experts(data)
        self.accessed.add(layer)
        kinds = self.cache.access(layer, ints(*experts), pass_tokens=tokens)
        model.latest[layer] = set(experts)
        if tokens == 1:
            model.trials[layer].access(experts, self.cache.keys(layer), model.targets[layer][0])
        for kind, expert in zip(kinds, experts, strict=True):
            held = model.held[layer, expert]
            fresh = sum(block.fresh for block in held)
            if not held:
                expected = "miss"
            elif len(held) < model.blocks:
                expected = "top"
            elif fresh:
                expected = "prefetch"
            else:
                expected = "top" if any(block.filling for block in held) else "full"
            assert kind == expected
            model.counts[("" if tokens == 1 else "prefill_") + "hits_" + kind] += 1
            if tokens == 1:
                model.counts["blocks_wanted"] += model.blocks
                model.counts["blocks_prefetched"] += fresh
                model.counts["blocks_resident"] += sum(not (b.filling or b.fresh) for b in held)
            for block in held:
                block.fresh = False
            model.pins[layer, expert] += 1

    @rule(data=st.data())
    def predict(self, data: st.DataObject) -> None:
        self.cache.predict(self.draw_layer(data), ints(*self.draw_experts(data)))

    @precondition(lambda self: any(self.model.pins.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        model = self.model
        who = data.draw(st.sampled_from(sorted(who for who, pins in model.pins.items() if pins)))
        self.cache.release(*who)
        model.pins[who] -= 1
        for block in model.held[who][: model.resident(who)]:
            block.fresh = False
        room, keys = model.targets[who[0]][0], self.cache.keys(who[0])
        always = model.admit == "always" or (model.admit == "best" and model.trials[who[0]].lead > 0)
        latest = model.latest.get(who[0], set()) if always else set()
        members = sorted(
            (expert in latest, keys[expert], expert) for layer, expert in model.kept if layer == who[0]
        )
        if room and who not in model.kept and model.held[who]:
            if len(members) == room:
                if (who[1] in latest, keys[who[1]], who[1]) <= members[0]:
                    return
                model.kept.remove((who[0], members[0][2]))
            model.kept.add(who)
            model.counts["admitted"] += 1

    def move(
        self,
        layer: int,
        experts: list[int],
        at: int,
        prefetch: bool,
        most: int | None,
        whole: bool,
        go: bool,
        preload: bool = False,
    ) -> None:
        model = self.model
        before = self.seen()
        plan = self.cache.plan(
            layer, ints(*experts), at=at, prefetch=prefetch, max_blocks=most, whole=whole, preload=preload
        )
        assert self.seen() == before  # planning changes nothing
        victims, fetches, satisfied = model.plan(
            self.keys(), layer, experts, at, prefetch=prefetch, most=most, whole=whole, preload=preload
        )
        assert plan.victims == victims
        assert plan.fetches == [(None, *fetch) for fetch in fetches]
        assert (plan.satisfied, plan.prefetch) == (satisfied, prefetch)
        if not go:
            return
        relied_on = {
            block.page: (who, number)
            for who, blocks in model.held.items()
            for number, block in enumerate(blocks)
            if model.pins[who] or block.filling
        }
        committed = self.cache.commit(plan)
        for victim_layer, expert, count in victims:
            assert not model.pins[victim_layer, expert]
            model.counts["evicted"] += count
            model.drop((victim_layer, expert), len(model.held[victim_layer, expert]) - count)
        taken = {block.page for blocks in model.held.values() for block in blocks} | set(model.loose)
        for page, of, expert, block in committed:
            assert page is not None
            assert page not in relied_on
            assert page not in taken  # free, or a victim's
            assert len(model.held[of, expert]) == block
            model.held[of, expert].append(Block(page, True, prefetch, prefetch, preload))
            taken.add(page)
        for page, (who, number) in relied_on.items():
            assert self.cache.page(*who, number) == page
        with pytest.raises(RuntimeError, match="plan again"):
            self.cache.commit(plan)

    @precondition(lambda self: any(self.model.pins.values()))
    @rule(
        data=st.data(),
        most=st.none() | st.integers(0, 6),
        whole=st.booleans(),
        go=st.sampled_from([True] * 5 + [False]),
    )
    def demand(self, data: st.DataObject, most: int | None, whole: bool, go: bool) -> None:
        pinned = sorted(who for who, pins in self.model.pins.items() if pins)
        layer = data.draw(st.sampled_from(pinned))[0]
        experts = data.draw(st.permutations([expert for of, expert in pinned if of == layer]))
        self.move(layer, experts, self.draw_layer(data), False, most, whole, go)

    @rule(
        data=st.data(),
        most=st.none() | st.integers(0, 6),
        whole=st.booleans(),
        go=st.sampled_from([True] * 5 + [False]),
    )
    def prefetch(self, data: st.DataObject, most: int | None, whole: bool, go: bool) -> None:
        self.move(
            self.draw_layer(data), self.draw_experts(data), self.draw_layer(data), True, most, whole, go
        )

    @rule(data=st.data(), most=st.none() | st.integers(0, 6), go=st.sampled_from([True] * 5 + [False]))
    def preload(self, data: st.DataObject, most: int | None, go: bool) -> None:
        at, layer, experts = self.draw_layer(data), self.draw_layer(data), self.draw_experts(data)
        self.move(layer, experts, at, True, most, False, go, preload=True)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        model = self.model
        who = self.draw_layer(data), data.draw(st.integers(0, model.experts - 1))
        held = model.held[who]
        settled = not model.pins[who] and not any(block.filling for block in held)
        start = data.draw(st.integers(0, model.blocks))
        count = max(0, len(held) - start) if settled else 0
        assert self.cache.give_up(*who, start) == count
        if count:
            model.counts["evicted"] += count
            if start == 0:
                model.kept.discard(who)
            model.drop(who, start)

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        """Expectations change keys of layers that were never accessed, and no others."""
        model, before, accessed = self.model, self.keys(), self.accessed
        shares = np.array(
            [[data.draw(st.floats(0, 1)) for _ in range(model.experts)] for _ in range(model.layers)]
        )
        self.cache.expect(shares)
        for layer in accessed:
            assert self.cache.keys(layer).tolist() == before[layer].tolist()

    @rule(data=st.data())
    def cheapest(self, data: st.DataObject) -> None:
        at, keys = self.draw_layer(data), self.keys()
        victims = self.model.victims(keys, at, 1, set(), None)
        expected = keys[victims[0][0]][victims[0][1]] if victims else np.inf
        assert self.cache.cheapest(at) == expected

    def finish(self, page: int, outcome: str) -> None:
        model = self.model
        error = 0 if outcome == "ok" else errno.EIO
        ours = outcome == "cancelled" or self.cache.landed(page, error)
        if outcome == "cancelled":
            self.cache.cancelled(page)
        place = model.find(page)
        kind, _, counter = model.loose.get(page, ("", False, "fetched_demand"))
        if place:
            assert ours
            block = model.held[place[0]][place[1]]
            counter, block.filling = counter_of(block), False
            if block.preload:
                block.fresh = False
            if outcome == "cancelled":
                block.fresh = False  # nothing was moved
            if outcome != "ok":
                model.drop(place[0], place[1])
        else:
            assert outcome == "cancelled" or not ours
            del model.loose[page]
            if kind == STAGING:
                model.loose[page] = (STAGING, False, "fetched_demand")
        if outcome == "ok":
            model.counts[counter] += 1

    @precondition(lambda self: self.model.in_flight() > 0)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "error", "cancelled"]))
    def transfer_ends(self, data: st.DataObject, outcome: str) -> None:
        self.finish(data.draw(st.sampled_from(self.filling())), outcome)

    @precondition(lambda self: self.model.in_flight() > 0)
    @rule(data=st.data())
    def all_transfers_land(self, data: st.DataObject) -> None:
        for page in data.draw(st.permutations(self.filling())):
            self.finish(page, "ok")

    @rule(data=st.data(), started=st.integers(0, 2))
    def cancel_stale_prefetches(self, data: st.DataObject, started: int) -> None:
        model, layer = self.model, self.draw_layer(data)
        stale = self.cache.stale_prefetches(layer)
        expected = []
        for expert in range(model.experts):
            if model.pins[layer, expert]:
                continue
            for number, block in reversed(list(enumerate(model.held[layer, expert]))):
                if block.filling and not block.fresh:
                    break
                if block.filling:
                    expected.append((block.page, layer, expert, number))
        assert stale == expected
        running: Counter[int] = Counter()
        for page, _, expert, number in stale:
            running[expert] += number < started  # the first blocks have started already
            if running[expert] == 0:
                self.finish(page, "cancelled")
                assert self.cache.assigned(layer, expert) == number

    @rule(data=st.data())
    def take_staging(self, data: st.DataObject) -> None:
        model, at = self.model, self.draw_layer(data)
        available = self.cache.available()
        victims = [] if model.free() else model.victims(self.keys(), at, 1, set(), None)
        page = self.cache.take_staging(at)
        assert (page is None) == (available == 0)
        if page is None:
            return
        for layer, expert, count in victims:
            model.counts["evicted"] += count
            model.drop((layer, expert), len(model.held[layer, expert]) - count)
        assert model.find(page) is None
        assert page not in model.loose
        model.loose[page] = (STAGING, True, "fetched_demand")

    @precondition(lambda self: any(kind == STAGING for kind, *_ in self.model.loose.values()))
    @rule(data=st.data())
    def give_staging(self, data: st.DataObject) -> None:
        loose = self.model.loose
        page = data.draw(st.sampled_from(sorted(p for p, (kind, *_) in loose.items() if kind == STAGING)))
        self.cache.give_staging(page)
        filling = loose.pop(page)[1]
        if filling:
            loose[page] = (ORPHAN, True, "fetched_demand")

    @rule(data=st.data())
    def set_targets(self, data: st.DataObject) -> None:
        model = self.model
        model.targets = self.draw_targets(data)
        self.cache.set_targets(np.array(model.targets, np.int32))
        for layer in range(model.layers):
            keys = self.cache.keys(layer)
            here = [(keys[e], e) for e in range(model.experts)]
            room = model.targets[layer][0]
            ranked = sorted((k, e) for k, e in here if (layer, e) in model.kept or model.held[layer, e])
            chosen = {(layer, expert) for _, expert in ranked[len(ranked) - min(room, len(ranked)) :]}
            model.counts["admitted"] += len(chosen - model.kept)
            model.kept = {who for who in model.kept if who[0] != layer} | chosen

    @rule(above=st.integers(1, 5))
    def targets_beyond_the_pages_change_nothing(self, above: int) -> None:
        model, before = self.model, self.seen()
        targets = np.array([(0, 1)] * model.layers, np.int32)
        targets[0] = (model.experts, model.blocks)
        if model.experts * model.blocks <= model.pages - self.reserve:
            targets[0] = (model.experts + above, 1)
        with pytest.raises(ValueError, match="target"):
            self.cache.set_targets(targets)
        assert self.seen() == before

    def seen(self) -> tuple[object, ...]:
        """The whole observable state of the cache."""
        cache, model = self.cache, self.model
        places = sorted(model.held)
        reads = (cache.resident, cache.assigned, cache.is_protected, cache.pins)
        return (
            cache.version,
            [read(*who) for who in places for read in reads],
            [cache.page(*who, block) for who in places for block in range(model.blocks)],
            self.filling(),
            (cache.free_pages(), cache.available(), cache.in_flight(), cache.staging(), cache.orphans()),
            cache.counters(),
            cache.targets().tolist(),
            [keys.tolist() for keys in self.keys()],
            cache.check(),
        )

    @invariant()
    def cache_equals_model(self) -> None:
        cache, model = self.cache, self.model
        assert cache.check() == ""
        owners: Counter[int | None] = Counter()
        for who, blocks in model.held.items():
            assert cache.assigned(*who) == len(blocks)
            assert cache.resident(*who) == model.resident(who)
            assert cache.is_protected(*who) == (who in model.kept)
            assert cache.pins(*who) == model.pins[who]
            pages = [cache.page(*who, block) for block in range(model.blocks)]
            assert pages == [b.page for b in blocks] + [None] * (model.blocks - len(blocks))
            assert [cache.filling(block.page) for block in blocks] == [block.filling for block in blocks]
            owners.update(block.page for block in blocks)
        owners.update(list(model.loose))
        assert all(count == 1 for count in owners.values())
        assert len(owners) + cache.free_pages() == model.pages
        assert self.filling() == sorted(
            [b.page for blocks in model.held.values() for b in blocks if b.filling]
            + [page for page, (_, filling, _) in model.loose.items() if filling]
        )
        assert cache.in_flight() == model.in_flight()
        assert cache.staging() == sum(kind == STAGING for kind, *_ in model.loose.values())
        assert cache.orphans() == sum(kind == ORPHAN for kind, *_ in model.loose.values())
        assert cache.available() == model.free() + sum(map(model.surplus, model.held))
        for layer, (room, _) in enumerate(model.targets):
            assert sum(who[0] == layer for who in model.kept) <= min(room, model.targets[layer][0])
        assert cache.counters() == {name: model.counts[name] for name in cache.counters()}


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# ---- the rules one by one


def bring(cache: SplitExpertCache, layer: int, *experts: int, prefetch: bool = False) -> list[int]:
    """Fetches the missing blocks of the experts; pages in order."""
    plan = cache.plan(layer, ints(*experts), prefetch=prefetch, at=(layer - 1) % cache.layers)
    pages = [page for page, *_ in cache.commit(plan) if page is not None]
    for page in pages:
        cache.landed(page)
    return pages


def use(cache: SplitExpertCache, layer: int, *experts: int) -> list[str]:
    """A whole access: fetches, uses and releases."""
    kinds = cache.access(layer, ints(*experts))
    bring(cache, layer, *experts)
    for expert in experts:
        cache.release(layer, expert)
    return [str(kind) for kind in kinds]


def test_a_failed_block_takes_the_blocks_behind_it_and_leaves_orphans() -> None:
    cache = make_cache(1, 2, 4, 8, [(1, 4)])
    cache.access(0, ints(0))
    pages = [page for page, *_ in cache.commit(cache.plan(0, ints(0)))]
    cache.landed(pages[0])
    cache.landed(pages[2])  # ready, but behind a block that is not
    assert (cache.resident(0, 0), cache.assigned(0, 0)) == (1, 4)
    assert cache.landed(pages[1], errno.EIO)
    assert (cache.resident(0, 0), cache.assigned(0, 0), cache.orphans()) == (1, 1, 1)
    assert cache.free_pages() == 6
    # The failed blocks can be fetched again while the orphan is still on its way.
    again = [page for page, *_ in cache.commit(cache.plan(0, ints(0)))]
    assert pages[3] not in again
    assert not cache.landed(pages[3])
    assert cache.orphans() == 0
    for page in reversed(again):
        cache.landed(page)
    assert cache.resident(0, 0) == 4
    assert cache.check() == ""


def test_cancelling_from_the_tail_keeps_what_has_arrived_and_wastes_nothing() -> None:
    cache = make_cache(2, 2, 4, 8, [(0, 1), (0, 1)])
    pages = [page for page, *_ in cache.commit(cache.plan(1, ints(0), at=0, prefetch=True))]
    cache.landed(pages[0])
    stale = cache.stale_prefetches(1)
    assert stale == [(pages[block], 1, 0, block) for block in (3, 2, 1)]
    for page, *_ in stale[:2]:
        cache.cancelled(page)
    cache.landed(pages[1])  # it had started
    assert (cache.resident(1, 0), cache.free_pages()) == (2, 6)
    assert cache.counters()["prefetch_wasted"] == 0
    assert cache.check() == ""


def test_prefetched_blocks_count_for_the_access_even_on_their_way() -> None:
    cache = make_cache(2, 3, 2, 8, [(0, 1), (1, 2)])
    plan = cache.plan(1, ints(0), at=0, prefetch=True)
    first, second = (page for page, *_ in cache.commit(plan))
    cache.landed(first)
    assert cache.access(1, ints(0)) == ["prefetch"]
    assert cache.plan(1, ints(0)).fetches == []  # it is on its way already
    assert cache.stale_prefetches(1) == []  # and wanted
    cache.landed(second)
    cache.release(1, 0)
    assert use(cache, 1, 0) == ["full"]
    counters = cache.counters()
    assert (counters["blocks_prefetched"], counters["blocks_resident"]) == (2, 2)
    assert (counters["fetched_prefetch"], counters["fetched_demand"]) == (2, 0)
    assert counters["prefetch_wasted"] == 0


def test_unused_prefetches_are_counted_as_waste_when_their_pages_go() -> None:
    cache = make_cache(2, 3, 2, 4, [(0, 1), (0, 1)])
    bring(cache, 1, 0, prefetch=True)
    use(cache, 0, 0, 1)
    assert cache.resident(1, 0) == 0
    assert cache.counters()["prefetch_wasted"] == 2


def test_a_prefetch_takes_nothing_that_is_needed_sooner_nor_from_another_prefetch() -> None:
    cache = make_cache(3, 3, 2, 6, [(0, 1)] * 3)
    use(cache, 1, 0)
    use(cache, 2, 0)
    bring(cache, 2, 1, prefetch=True)
    # At work: layer 0. For layer 2 there is only what layer 2 itself holds, but for the earlier prefetch.
    plan = cache.plan(2, ints(2), at=0, prefetch=True)
    assert plan.victims == [(2, 0, 2)]
    # For layer 1, which comes first, the last layer gives up its lowest key, and layer 1 nothing yet.
    assert cache.plan(1, ints(1), at=0, prefetch=True).victims == [(2, 1, 2)]
    # A demand takes pages from any layer, farthest turn first.
    cache.access(0, ints(0, 1, 2))
    assert cache.plan(0, ints(0, 1, 2)).victims == [(2, 1, 2), (2, 0, 2), (1, 0, 2)]


def test_a_want_of_whole_experts_skips_those_that_do_not_fit() -> None:
    cache = make_cache(1, 3, 4, 6, [(0, 1)])
    cache.access(0, ints(0, 1, 2))
    cache.commit(cache.plan(0, ints(0), max_blocks=1, whole=False))
    parts = cache.plan(0, ints(1, 0, 2), whole=False)
    assert [fetch[2:] for fetch in parts.fetches] == [(1, 0), (1, 1), (1, 2), (1, 3), (0, 1)]
    assert parts.satisfied == 1
    whole = cache.plan(0, ints(1, 0, 2), whole=True)
    assert [fetch[2] for fetch in whole.fetches] == [1] * 4
    limited = cache.plan(0, ints(1, 0), max_blocks=3)
    assert [fetch[2] for fetch in limited.fetches] == [0] * 3  # expert 1 lacks more than the limit
    assert limited.satisfied == 0


def test_pinned_experts_and_blocks_on_their_way_are_never_victims() -> None:
    cache = make_cache(2, 2, 2, 4, [(0, 1), (0, 1)])
    use(cache, 0, 0)
    cache.access(0, ints(0, 1))
    cache.commit(cache.plan(1, ints(0), at=0, prefetch=True))  # the last two pages, being filled
    assert cache.available() == 0
    plan = cache.plan(0, ints(1))
    assert (plan.fetches, plan.victims, plan.satisfied) == ([], [], 0)
    assert cache.take_staging(0) is None


def test_an_expert_released_while_its_blocks_are_on_their_way_keeps_them() -> None:
    cache = make_cache(1, 2, 2, 4, [(1, 2)])
    cache.access(0, ints(0))
    pages = [page for page, *_ in cache.commit(cache.plan(0, ints(0)))]
    cache.release(0, 0)
    assert cache.is_protected(0, 0)
    assert cache.available() == 2
    for page in pages:
        assert cache.landed(page)
    assert cache.access(0, ints(0)) == ["full"]


def test_an_expert_without_blocks_is_not_admitted() -> None:
    cache = make_cache(1, 2, 2, 4, [(1, 2)])
    use(cache, 0, 0)
    cache.access(0, ints(1))
    cache.release(0, 1)
    assert cache.is_protected(0, 0)
    assert not cache.is_protected(0, 1)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_admission_of_equal_experts_does_not_depend_on_the_order_of_release(
    order: tuple[int, ...],
) -> None:
    """Blocks arrive in any order; it must not influence which experts stay."""
    cache = make_cache(1, 4, 2, 8, [(2, 1)])
    cache.access(0, ints(0, 1, 2, 3))
    bring(cache, 0, 0, 1, 2, 3)
    assert len(set(cache.keys(0))) == 1
    for expert in order:
        cache.release(0, expert)
    assert [cache.is_protected(0, expert) for expert in range(4)] == [False, False, True, True]


def test_surplus_stays_until_a_page_is_needed() -> None:
    cache = make_cache(1, 3, 4, 10, [(1, 2)], reserve=8)
    use(cache, 0, 0)
    use(cache, 0, 1)  # more recent: protected in place of expert 0, which keeps its blocks
    assert (cache.is_protected(0, 0), cache.is_protected(0, 1)) == (False, True)
    assert use(cache, 0, 0) == ["full"]
    assert use(cache, 0, 2) == ["miss"]
    assert [cache.resident(0, expert) for expert in range(3)] == [4, 2, 4]
    assert use(cache, 0, 1) == ["top"]


def test_new_targets_move_no_block_and_change_protection_at_once() -> None:
    cache = make_cache(1, 3, 2, 8, [(3, 2)])
    for expert in range(3):
        use(cache, 0, expert)
    assert cache.available() == 2
    cache.set_targets(np.array([[1, 1]], np.int32))
    assert [cache.is_protected(0, expert) for expert in range(3)] == [False, False, True]
    assert [cache.resident(0, expert) for expert in range(3)] == [2, 2, 2]
    assert cache.available() == 7
    cache.set_targets(np.array([[2, 2]], np.int32))
    assert [cache.is_protected(0, expert) for expert in range(3)] == [False, True, True]
    cache.set_targets(np.array([[0, 7]], np.int32))  # of no experts, any number of blocks
    assert cache.available() == 8
    assert use(cache, 0, 0) == ["full"]
    assert not cache.is_protected(0, 0)


def test_staging_pages_given_back_in_flight_become_orphans() -> None:
    cache = make_cache(1, 1, 8, 3, [(0, 1)])
    pages = [cache.take_staging(0) for _ in range(3)]
    assert cache.take_staging(0) is None
    assert pages[0] is not None
    assert pages[1] is not None
    assert not cache.landed(pages[0])
    cache.give_staging(pages[0])
    cache.give_staging(pages[1])
    assert (cache.staging(), cache.orphans(), cache.in_flight(), cache.free_pages()) == (1, 1, 2, 1)
    with pytest.raises(RuntimeError, match="not a staging page"):
        cache.give_staging(pages[1])
    assert not cache.landed(pages[1])
    assert cache.free_pages() == 2
    with pytest.raises(RuntimeError, match="not being filled"):
        cache.landed(pages[1])
    assert cache.check() == ""


def test_plans_are_refused_after_a_change_and_by_another_cache() -> None:
    first, second = (make_cache(1, 2, 2, 4, [(0, 1)]) for _ in range(2))
    plan = first.plan(0, ints(0), prefetch=True)
    with pytest.raises(RuntimeError, match="plan again"):
        second.commit(plan)
    first.access(0, ints(1))
    with pytest.raises(RuntimeError, match="plan again"):
        first.commit(plan)
    assert first.free_pages() == 4


def test_impossible_calls_are_refused_and_change_nothing() -> None:
    cache = make_cache(2, 3, 2, 8, [(1, 1), (1, 1)])
    version = cache.version
    with pytest.raises(ValueError, match="named twice"):
        cache.access(0, ints(1, 1))
    with pytest.raises(ValueError, match="expert is 3"):
        cache.access(0, ints(0, 3))
    with pytest.raises(ValueError, match="layer is 2"):
        cache.access(2, ints(0))
    with pytest.raises(ValueError, match="chosen by 0 tokens"):
        cache.access(0, ints(0), ints(0))
    with pytest.raises(ValueError, match="pass_tokens"):
        cache.access(0, ints(0), pass_tokens=0)
    with pytest.raises(ValueError, match="not pinned"):
        cache.plan(0, ints(0))
    with pytest.raises(RuntimeError, match="not pinned"):
        cache.release(0, 0)
    with pytest.raises(IndexError, match="expert is -1"):
        cache.resident(0, -1)
    assert cache.version == version
    assert cache.keys(0).max() < 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0, "targets": []}, "layers, experts and blocks are 0"),
        ({"pages": 2}, "targets take 2 pages; of 2 pages 1"),
        ({"reserve": 0}, "reserve is 0"),
        ({"targets": [(3, 1), (0, 1)]}, "layer 0 is 3 experts"),
        ({"targets": [(1, 1), (1, 3)]}, "layer 1 is 1 experts of 3 blocks"),
        ({"targets": [(1, 1)]}, "targets has shape"),
    ],
)
def test_impossible_caches_are_refused_with_the_numbers(values: dict[str, object], message: str) -> None:
    arguments = {"layers": 2, "experts": 2, "blocks": 2, "pages": 4, "targets": [(1, 1), (1, 1)]}
    policy = EvictionPolicy("lru", 2, 2)
    arguments |= {"page_bytes": 4096, "policy": policy, "reserve": 1} | values
    arguments["targets"] = np.array(arguments["targets"], np.int32).reshape(-1, 2)
    with pytest.raises(ValueError, match=message):
        SplitExpertCache(**arguments)
    policy.keys(0)  # a refused cache has not taken the policy


def test_a_policy_serves_one_cache_of_its_size() -> None:
    targets = np.array([[1, 1]], np.int32)
    policy = EvictionPolicy("lru", 1, 3)
    with pytest.raises(ValueError, match="policy is for 1 layers of 3"):
        SplitExpertCache(1, 2, 2, 4, 4096, policy, targets, 1)
    SplitExpertCache(1, 3, 2, 4, 4096, policy, targets, 1)
    with pytest.raises(ValueError, match="belongs to a cache"):
        SplitExpertCache(1, 3, 2, 4, 4096, policy, targets, 1)
