"""Invariant 6: bitwise equal logits for every budget, split, policy, prefetch, delay and thread count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.bench.decode import Bench
from moechat.budget.held_experts import choose_experts
from moechat.configurator.systems import SYSTEMS, CacheSettings, Prefetch
from moechat.engine import Engine
from moechat.models.router_search import find_routers
from moechat.offload.host import HostPlacement
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.predict import NextRouterPredictor

COMBINATIONS = 70
PROMPT = 37
ANSWER = 9
_POLICIES = [name for name in _native.policy_names() if name != "belady"]  # which needs the future
_PREFETCHES = [name for name in get_args(Prefetch) if name != "perfect"]
_SPLITS = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Combination:
    """One way to run a model; ``share`` is that of all its blocks that have a page, ``cached`` the number of
    experts in the page cache, ``lent`` of pages that come and go.
    """

    share: float
    threads: int
    settings: CacheSettings
    link: LinkSettings
    cached: int
    lent: int


def combinations(seed: int) -> list[Combination]:
    """Every policy with every prefetch, the rest drawn; the same list for the same seed."""
    draw = random.Random(seed)
    result = []
    for number in range(COMBINATIONS):
        settings = CacheSettings(
            policy=_POLICIES[number % len(_POLICIES)],
            prefetch=_PREFETCHES[number // len(_POLICIES) % len(_PREFETCHES)],
            split=draw.choice(_SPLITS),
            keep=draw.choice((0.0, 1.0, 1.0, 1.0)),
            lookahead=draw.choice((1, 1, 2)),
            whole_experts=draw.random() < 0.25,
            allocation=draw.choice(("uniform", "uniform", "shared")),
            admit=draw.choice(("key", "always", "best")),
            victims=draw.choice(("farthest", "lowest")),
            per_request=draw.random() < 0.5,
        )
        link = draw.choice(
            (
                LinkSettings(kind="file", io="auto"),
                LinkSettings(kind="file", io="threads"),
                LinkSettings(kind="file", direct=False),
                LinkSettings(kind="sim", jitter=1e-3, reorder=4, seed=number),
                LinkSettings(kind="sim", bandwidth=4e8, latency=1e-4, seed=number),
            )
        )
        share = draw.choice((0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.95, 1.1))
        cached = draw.choice((0, 0, 1, 5, 11))
        lent = draw.choice((0, 0, 3, 40))
        result.append(Combination(share, draw.choice((1, 2)), settings, link, cached, lent))
    return result


def logits_of(engine: Engine, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a teacher-forced pass, and of the steps of a greedy answer."""
    steps = []

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        steps.append(output.logits[0, -1].clone())

    forced = engine.logits(tokens)
    list(engine.generate(tokens, max_new_tokens=ANSWER, temperature=0.0))  # native code tries the layers out
    hook = engine.loaded.model.register_forward_hook(note)
    engine.drop_prompt_cache()
    list(engine.generate(tokens, max_new_tokens=ANSWER, temperature=0.0, draft_tokens=0))
    hook.remove()
    assert len(steps) == ANSWER
    return forced, torch.stack(steps)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | str]:
    if request.param == "demo":
        yield "demo"
        return
    # The odd shape: sizes that are no multiples of a block, a vector or a group.
    config = tiny_config(request.param, 1)
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_checkpoint(directory / "model", config)
    yield directory / "model"


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """Give the numbers of threads back as they were."""
    torchs, ours = torch.get_num_threads(), _native.num_threads()
    yield
    torch.set_num_threads(torchs)
    _native.set_num_threads(ours)


@pytest.mark.timeout(600)
def test_logits_do_not_depend_on_how_the_tier_is_run(model: Path | str, moechat_home: Path) -> None:
    tokens = [(7 * i * i + 3) % 97 + 3 for i in range(PROMPT)]
    with moechat.load(model, offload=OffloadOptions(pages=0), threads=2) as engine:
        bench = Bench(engine)
        geometry = engine.loaded.store.geometry
        blocks = bench.layers * geometry.num_experts * geometry.blocks_per_expert
        predictor = NextRouterPredictor(find_routers(bench.model, bench.parts))
        forced, steps = logits_of(engine, tokens)
        assert torch.isfinite(forced).all()
        for number, combination in enumerate(combinations(seed=11)):
            torch.set_num_threads(combination.threads)
            _native.set_num_threads(combination.threads)
            config = TierConfig(engine.loaded.store, bench.top_k, link=combination.link, predictor=predictor)
            pages = max(2, int(blocks * combination.share))
            cached = choose_experts(bench.layers, geometry.num_experts, combination.cached, None)
            tier = ExpertTier(
                config,
                HostPlacement(),
                pages=pages,
                settings=combination.settings,
                lent=combination.lent,
                cached=cached,
            )
            with bench.experts([tier.layer(ordinal) for ordinal in range(bench.layers)]):
                tier.lend((number % 4) * tier.geometry.record_bytes)
                got = logits_of(engine, tokens)
                tier.lend(1 << 40)
            assert tier.runner.check() == ""
            tier.close()
            assert torch.equal(got[0], forced), f"prefill differs in combination {number}: {combination}"
            assert torch.equal(got[1], steps), f"decode differs in combination {number}: {combination}"


def test_a_loaded_engine_gives_the_same_logits_within_any_number_of_pages(
    model: Path | str, moechat_home: Path
) -> None:
    tokens = [(5 * i * i + 1) % 97 + 3 for i in range(PROMPT)]
    with moechat.load(model, offload=OffloadOptions(pages=0)) as engine:
        expected = logits_of(engine, tokens)
    for number, system in enumerate(sorted(SYSTEMS.keys() - {"oracle"})):
        pages = (60, 2, 24)[number % 3]
        with moechat.load(model, offload=OffloadOptions(pages=pages), system=system) as engine:
            # The second time, predictors have learned from the first.
            for _ in range(2):
                got = logits_of(engine, tokens)
                assert torch.equal(got[0], expected[0]), system
                assert torch.equal(got[1], expected[1]), system
            near = engine.loaded.near
            assert near is not None
            assert near.runner.check() == ""
            assert engine.stats.pages <= pages
            predictor = near.requests.predictor
            if predictor is not None:
                assert predictor.entries > 0, system
