"""The whole engine on a GPU, as far as that can be without one (see ``interpreted_gpu.py``)."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tiny import tiny_config, write_tiny_chat_model, write_tiny_checkpoint

import moechat
from moechat.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DoesNotFitError,
    MoechatError,
    MoechatWarning,
    UsageError,
)
from moechat.offload.settings import LinkSettings, OffloadOptions

PROMPT = [5, 17, 9, 33, 21]
# float32 both, products in another order; router choices are the same.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "qwen3"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0))
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    with moechat.load(model, dtype="float32", dense_bits=16, activation_bits=32, ctx=64) as engine:
        return engine.logits(PROMPT)


def load(model: Path, gpu, *, link: LinkSettings | None = None, pages: int | None = None, **arguments):
    offload = OffloadOptions(accelerator=gpu, pages=pages, link=link or LinkSettings())
    return moechat.load(
        model, device="cuda", offload=offload, **{"ctx": 64, "vram": "1G", "activation_bits": 32, **arguments}
    )


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_logits_equal_those_of_the_cpu(model: Path, gpu, bits: int) -> None:
    with moechat.load(model, bits=bits, dtype="float32", dense_bits=16, activation_bits=32, ctx=64) as engine:
        wanted = engine.logits(PROMPT)
    with load(model, gpu, bits=bits) as engine:
        assert error_of(engine.logits(PROMPT), wanted) < TOLERANCE
        assert engine.describe().device == "cpu"  # torch's part of the fake GPU


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("auto", "cuda with delays"),
        ("auto", "sim"),
        ("moepic", "cuda with delays"),
        ("mixtral-offloading", "cuda"),
        ("deepspeed", "cuda with delays"),
    ],
)
def test_the_answer_is_the_same_for_every_budget_system_and_link(
    model: Path, gpu, expected: torch.Tensor, system: str, kind: str
) -> None:
    if kind == "cuda with delays":
        gpu.cuda.set(jitter=2e-4, latency=5e-5, seed=3, piece=4096)
    link = LinkSettings(kind="sim", jitter=1e-4, seed=2) if kind == "sim" else None
    results = []
    for pages in (2, 9, None):
        with load(model, gpu, link=link, pages=pages, system=system, deterministic=True) as engine:
            logits = engine.logits(PROMPT)
            answer = [step.token_id for step in engine.generate(PROMPT, max_new_tokens=2, temperature=0.0)]
            results.append((logits, answer))
            if pages is not None:
                assert engine.stats.pages == pages
            assert engine.loaded.near.runner.check() == ""
            assert engine.loaded.near.stats()["blocks_far"] == 0
    assert error_of(results[0][0], expected) < TOLERANCE
    for logits, answer in results[1:]:
        # Bit by bit: what is added up does not depend on what is resident.
        assert torch.equal(logits, results[0][0])
        assert answer == results[0][1]


@pytest.mark.parametrize("system", ["moe-infinity", "finemoe", "expertflow"])
def test_predictors_that_learn_from_requests_work_on_a_gpu(
    model: Path, gpu, expected: torch.Tensor, system: str
) -> None:
    gpu.cuda.set(jitter=2e-4, latency=5e-5, seed=3, piece=4096)
    with load(model, gpu, pages=9, system=system, deterministic=True) as engine:
        for _ in range(2):
            list(engine.generate(PROMPT, max_new_tokens=3, temperature=0.0))
        near = engine.loaded.near
        predictor = near.requests.predictor
        assert predictor is None or predictor.entries > 0
        assert near.stats()["fetched_prefetch"] > 0
        assert error_of(engine.logits(PROMPT), expected) < TOLERANCE
        assert near.runner.check() == ""


@pytest.mark.parametrize(
    "system", ["auto:miss=both", "auto:miss=seldom,prefetch=prompts", "fiddler", "static"]
)
def test_blocks_computed_by_the_cpu_are_part_of_the_answer(
    model: Path, gpu, expected: torch.Tensor, system: str
) -> None:
    gpu.cuda.set(jitter=2e-4, latency=5e-5, seed=3, piece=4096)
    for pages in (2, 9):
        with load(model, gpu, pages=pages, system=system) as engine:
            assert error_of(engine.logits(PROMPT), expected) < TOLERANCE
            list(engine.generate(PROMPT, max_new_tokens=4, temperature=0.0))
            assert error_of(engine.logits(PROMPT), expected) < TOLERANCE
            assert engine.stats.shared_bytes > 0
            assert engine.loaded.near.runner.check() == ""


def test_experts_in_files_are_not_computed_by_the_cpu(model: Path, gpu, expected: torch.Tensor) -> None:
    with load(model, gpu, ram="64K", pages=6) as engine:
        assert error_of(engine.logits(PROMPT), expected) < TOLERANCE
        assert engine.loaded.near.stats()["blocks_far"] == 0


def test_the_kernel_warm_up_runs(model: Path, gpu) -> None:
    """A GPU builds them by it; the interpreter only runs it."""
    from moechat.offload.kernels import packed_linear

    with load(model, gpu, dense_bits=4, pages=4) as engine:
        pages = engine.loaded.near.placement.pages
        for launch in (
            *pages.first_launches(engine.loaded.top_k, torch.float32),
            *packed_linear.first_launches(engine.loaded.model.modules(), torch.float32),
        ):
            launch()
        assert engine.loaded.near.runner.check() == ""


def test_the_oracle_prefetches_the_choices_of_a_trace(model: Path, gpu) -> None:
    from moechat.configurator.systems import settings_of
    from moechat.routing import Replay, Trace

    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((40, 2, 8)), axis=2)[:, :, :2].astype(np.int32)
    replay = Replay(Trace(experts, np.array([0, 40]), 8))
    offload = OffloadOptions(accelerator=gpu, pages=14, cache=settings_of("oracle"), replay=replay)
    with moechat.load(model, device="cuda", ctx=64, offload=offload) as engine:
        list(engine.generate(PROMPT, max_new_tokens=8, temperature=0.0))
        assert engine.stats.hits_prefetched > 0
        assert engine.stats.prefetch_bytes > 0


def test_decoding_copies_to_the_host_once_a_layer(model: Path, gpu) -> None:
    with load(model, gpu) as engine:
        steps = iter(engine.generate(PROMPT, max_new_tokens=6, temperature=0.0))
        next(steps)
        before = gpu.copies_to_host
        for _ in range(4):
            next(steps)
        layers = engine.describe().expert_layers
        assert gpu.copies_to_host - before == 4 * layers
        assert engine.stats.expert_activations > 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2", "olmoe"])
def test_other_families_match_the_cpu(family: str, gpu, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_config(family, 0))
    with moechat.load(
        tmp_path / family, dtype="float32", dense_bits=16, activation_bits=32, ctx=64
    ) as engine:
        wanted = engine.logits(PROMPT)
    with load(tmp_path / family, gpu, pages=12) as engine:
        assert error_of(engine.logits(PROMPT), wanted) < TOLERANCE


# The second layer of a prompt's pass, whose first has appended to the cache; the first of a replay.
@pytest.mark.parametrize("moment", [2, 7])
def test_running_out_of_memory_evicts_experts_and_the_answer_continues(
    model: Path, gpu, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    from moechat.offload.kernels.launch import BlockKernels

    def tokens(engine):
        return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=5, temperature=0.0)]

    with load(model, gpu, pages=20) as engine:
        expected = tokens(engine)
    whole = BlockKernels.partials
    calls = 0

    def partials(kernels, items, dtype):
        nonlocal calls
        calls += 1
        if calls == moment:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(kernels, items, dtype)

    monkeypatch.setattr(BlockKernels, "partials", partials)
    with load(model, gpu, pages=20) as engine:
        assert tokens(engine) == expected
        assert engine.loaded.near.pages == 18
        assert engine.stats.pages == 18
        assert [note for note in engine.notices() if "graphics memory ran out" in note]
        assert engine.loaded.near.runner.check() == ""

    def never(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(BlockKernels, "partials", never)
    with load(model, gpu, pages=20) as engine, pytest.raises(DoesNotFitError, match="too small for a pass"):
        engine.logits(PROMPT)


def test_a_gpu_failure_ends_the_answer_with_the_gpus_error(model: Path, gpu) -> None:
    with load(model, gpu, pages=4, system="moepic") as engine:  # which copies what is missing
        engine.logits(PROMPT)
        gpu.cuda.set(fail_after=gpu.cuda.get("copies") + 3)
        with pytest.raises(DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
            list(engine.generate(PROMPT, max_new_tokens=8))
        assert caught.value.exit_code == 7
        assert caught.value.hint
        with pytest.raises(DeviceLostError):
            engine.logits(PROMPT)
    # Closed with the GPU as it was left: nothing of that hides what happened.
    gpu.cuda.reset()
    assert gpu.cuda.get("pinned") == 0


def test_two_engines_in_sequence_leak_nothing(model: Path, gpu, expected: torch.Tensor) -> None:
    for _ in range(2):
        with load(model, gpu) as engine:
            assert error_of(engine.logits(PROMPT), expected) < TOLERANCE
        assert (gpu.cuda.get("pinned"), gpu.cuda.get("events")) == (0, 0)


def test_a_failed_load_unpins_its_memory(model: Path, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.offload.gpu import GpuPlacement

    def warm(*_):
        raise DeviceUnavailableError("the kernels cannot be built")

    monkeypatch.setattr(GpuPlacement, "warm", warm)
    with pytest.raises(DeviceUnavailableError, match="cannot be built"):
        load(model, gpu)
    gc.collect()
    assert gpu.cuda.get("pinned") == 0


def test_an_engine_closed_by_another_thread_ends_its_answer(model: Path, gpu) -> None:
    engine = load(model, gpu, pages=6)
    steps = iter(engine.generate(PROMPT, max_new_tokens=40, temperature=0.0))
    next(steps)
    closer = threading.Timer(0.05, engine.close)
    closer.start()
    with pytest.raises(MoechatError, match="was closed"):
        list(steps)
    closer.join()
    assert gpu.cuda.get("pinned") == 0


def test_a_prefetched_block_that_fails_to_read_is_never_used(
    model: Path, gpu, expected: torch.Tensor
) -> None:
    """Its page holds what it held before; the block is demanded again, with a notice."""
    with load(model, gpu, ram="64K", pages=12) as engine:
        assert error_of(engine.logits(PROMPT), expected) < TOLERANCE
        store = engine.loaded.store
        path = store.expert_extent(store.layers[1].layer).path
        whole = path.read_bytes()
        try:
            os.truncate(path, len(whole) // 2)
            with pytest.raises(MoechatError):
                list(engine.generate(PROMPT, max_new_tokens=20))
        finally:
            path.write_bytes(whole)
        engine.loaded.near.runner.drain()
        assert error_of(engine.logits(PROMPT), expected) < TOLERANCE


def test_a_budget_too_small_is_refused_and_the_least_is_named(model: Path, gpu) -> None:
    with pytest.raises(DoesNotFitError, match=r"budget of graphics memory is 100 MiB; the least") as caught:
        load(model, gpu, vram="100M")
    assert "--vram" in caught.value.hint
    least = caught.value.least_bytes
    assert 100 << 20 < least < 1 << 30
    with load(model, gpu, vram=least) as engine:
        engine.logits(PROMPT)


def test_budgets_stay_below_the_free_memory_of_the_gpu(model: Path, gpu) -> None:
    gpu.cuda.set(vram=3e9)
    with (
        pytest.warns(
            MoechatWarning,
            match=r"4 GiB of graphics memory were given, but only 2\.\d+ GiB are available: "
            r"the CUDA context of \d+ MiB and 95 % of the 2\.\d+ GiB free beside it; "
            r"other programs may need the rest",
        ),
        load(model, gpu, vram="4G") as engine,
    ):
        assert engine.describe().memory_budget_bytes < 3e9
    with load(model, gpu, vram=None) as engine:
        budget = engine.describe().memory_budget_bytes
        assert 0.9 * 3e9 < budget < 3e9 + gpu.context_bytes
        # Torch gets what is neither the context's nor the libraries'.
        assert budget - gpu.context_bytes - (128 << 20) < gpu.limited_to < budget - gpu.context_bytes


def test_options_unsupported_on_a_gpu_are_refused(model: Path, gpu) -> None:
    with pytest.raises(UsageError, match="device is 'gpu'"):
        moechat.load(model, device="gpu")
    with pytest.raises(UsageError, match="dense_bits is 3"):
        load(model, gpu, dense_bits=3)
    with pytest.raises(UsageError, match="'many' is not a size"):
        load(model, gpu, vram="many")
    with pytest.raises(UsageError, match="vram is 0"):
        load(model, gpu, vram=0)
    with pytest.raises(UsageError, match="needs a GPU"):
        moechat.load(model, device="cpu", vram="2G")


def test_a_missing_gpu_is_reported(model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceUnavailableError, match="no CUDA GPU can be used") as caught:
        moechat.load(model, vram="2G")
    assert caught.value.exit_code == 2


def test_a_chat_keeps_its_cache_between_turns(gpu, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_chat_model(tmp_path / "chat", moe_intermediate_size=64)
    with load(tmp_path / "chat", gpu) as engine:
        messages = [{"role": "user", "content": "hi"}]
        answer = "".join(step.text for step in engine.generate(messages, max_new_tokens=5, seed=1))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "so"}]
        list(engine.generate(messages, max_new_tokens=3, seed=1))
        assert engine.stats.output_tokens > 0
        assert engine.idle() is None
        engine.replan()
