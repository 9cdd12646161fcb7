"""Experts of earlier runs come to a GPU while the program waits, so that the next run starts warm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat.configurator.systems import CacheSettings
from moechat.engine import Engine
from moechat.offload import upkeep
from moechat.offload.settings import OffloadOptions

PROMPT = [5]
FIRST = 3
ON_DEMAND = CacheSettings(policy="lcp", prefetch="none")
# Of 64 experts of one block each.
PAGES = 50
# Most that preloads have on the link at a time (native/src/link/transfer_queue.h).
_AT_A_TIME = 4 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    """A checkpoint whose experts take several times what preloads have on the link."""
    directory = tmp_path_factory.mktemp("tiny") / "qwen3"
    shape = {"hidden_size": 1024, "moe_intermediate_size": 64, "num_experts": 64, "num_experts_per_tok": 4}
    shape["num_hidden_layers"] = 1
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0, **shape))
    return directory


@pytest.fixture(autouse=True)
def _few_tokens_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LEAST_TOKENS", 10)
    monkeypatch.setenv("MOECHAT_CUDA_GRAPHS", "0")  # recording them takes the interpreter long


def load(model: Path, gpu: object) -> Engine:
    offload = OffloadOptions(accelerator=gpu, pages=PAGES, cache=ON_DEMAND)
    return moechat.load(model, device="cuda", offload=offload, ctx=128, vram="1G", bits=16, tune=False)


def answer(engine: Engine, count: int) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0)]


def hit_rate(engine: Engine) -> float:
    stats = engine.loaded.near.stats()
    found = {kind: stats[f"hits_{kind}"] for kind in ("full", "prefetch", "top", "miss")}
    return found["full"] / sum(found.values())


def test_a_second_start_finds_the_experts_of_the_first_and_no_demand_waits_for_the_rest(
    model: Path, gpu
) -> None:
    with load(model, gpu) as engine:
        engine.idle()
        assert not engine.loaded.upkeep.preloading, "nothing is known yet"
        answered = answer(engine, FIRST)
        cold = hit_rate(engine)
        answer(engine, 12)

    with load(model, gpu) as engine:
        keeper, near = engine.loaded.upkeep, engine.loaded.near
        engine.idle()
        until = time.monotonic() + 20
        while keeper.preloading:
            assert time.monotonic() < until
            time.sleep(0.005)
        known = near.stats()["preloaded"]
        assert known * near.geometry.record_bytes > 1.5 * _AT_A_TIME
        assert answer(engine, FIRST) == answered
        warm = hit_rate(engine)
        assert near.stats()["fetched_demand"] == 0, "all were used before"
    assert warm == 1.0 > cold + 0.2

    with load(model, gpu) as engine:
        keeper, near = engine.loaded.upkeep, engine.loaded.near
        record = near.geometry.record_bytes
        gpu.cuda.set(bandwidth=2e7)  # the preload would take about half a second
        begun = gpu.cuda.get("bytes")
        engine.idle()
        while near.stats()["link_in_flight"] == 0:
            time.sleep(0.001)
        before = gpu.cuda.get("bytes")
        assert keeper.preloading
        engine.logits([97])
        moved = gpu.cuda.get("bytes") - before
        demanded = near.stats()["fetched_demand"] * record
        assert demanded > 0
        assert moved <= _AT_A_TIME + demanded, "what was on the link, and nothing that was queued"
        assert before - begun + moved < known * record + demanded, "some of it was left"
        assert not keeper.preloading
