"""Experts behind a GPU: in pinned memory, in memory that the system does not pin, and in files."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rotten import flip, record_place

pytest.importorskip("triton")

import moechat
from moechat import _native
from moechat.budget.held_experts import HOST_BYTES, choose_experts
from moechat.errors import MoechatWarning, StoreDamagedError
from moechat.offload import pinning
from moechat.offload.far_memory import FarMemory
from moechat.offload.settings import OffloadOptions
from moechat.store.store import Store

PROMPT = [5, 17, 9]
LAYERS, EXPERTS, RECORD = 2, 8, 8192
EXPERT = RECORD
LAYER = EXPERTS * EXPERT
# What is kept free for buffers while experts are pinned, and the buffers.
BUFFERS = 16 * RECORD
RESERVE = BUFFERS + LAYERS * LAYER // 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one record; a process that is smaller than this one."""
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1)
    monkeypatch.setattr("moechat.offload.gpu.process_bytes", lambda: 700 << 20)


def load(model: Path, gpu, **arguments) -> moechat.Engine:
    offload = OffloadOptions(accelerator=gpu, pages=9)
    keywords = {"ctx": 64, "vram": "1G", "activation_bits": 32, **arguments}
    return moechat.load(model, device="cuda", offload=offload, **keywords)


def answer(engine: moechat.Engine) -> tuple[torch.Tensor, list[int]]:
    logits = engine.logits(PROMPT)
    tokens = [step.token_id for step in engine.generate(PROMPT, max_new_tokens=2, temperature=0.0)]
    assert engine.loaded.near.runner.check() == ""
    return logits, tokens


@dataclass(frozen=True)
class Reference:
    """With all experts in pinned memory."""

    store: Path
    logits: torch.Tensor
    tokens: list[int]


@pytest.fixture(scope="module")
def expected(model: Path, driver, moechat_home: Path) -> Reference:
    from interpreted_gpu import InterpretedGpu
    from wide_products import use_cheaper_kernels

    driver.reset()
    gpu = InterpretedGpu(driver)
    with pytest.MonkeyPatch.context() as patch:
        use_cheaper_kernels(patch)  # as every test: other kernels round differently
        with load(model, gpu, deterministic=True) as engine:
            assert engine.loaded.store.geometry.expert_bytes == EXPERT
            assert engine.loaded.near.placement.far.pinned_bytes == LAYERS * LAYER
            found = Reference(engine.loaded.store.path, *answer(engine))
    gpu.close()
    return found


@pytest.fixture
def store(expected: Reference) -> Store:
    return Store.open(expected.store)


@pytest.mark.parametrize(
    ("limit", "ram", "pinned", "held"),
    [
        (RESERVE + LAYER + 5 * RECORD, None, LAYER + 5 * RECORD, 16),
        (BUFFERS // 3, None, 0, 16),
        (RESERVE + 4 * RECORD, HOST_BYTES + 13 * EXPERT, 4 * RECORD, 13),
        (None, 64 << 10, 0, 0),
    ],
    ids=["pinned in part", "nothing pinned", "all three", "all in files"],
)
def test_the_answer_is_the_same_wherever_experts_lie(
    model: Path, gpu, expected: Reference, limit: int | None, ram: int | None, pinned: int, held: int
) -> None:
    if limit is not None:
        gpu.cuda.set(pin_limit=limit)
    gpu.cuda.set(jitter=1e-4, seed=3, piece=4096)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = load(model, gpu, deterministic=True, **({} if ram is None else {"ram": ram}))
    notices = [str(one.message) for one in caught if issubclass(one.category, MoechatWarning)]
    assert len(notices) == (limit is not None)
    assert all("the system pins no more than" in notice for notice in notices)
    with engine:
        far = engine.loaded.near.placement.far
        assert (far.pinned_bytes, far.held_bytes) == (pinned, held * EXPERT)
        logits, tokens = answer(engine)
        assert torch.equal(logits, expected.logits)
        assert tokens == expected.tokens
    assert gpu.cuda.get("pinned") == 0


def test_the_cpu_computes_no_expert_that_lies_in_a_file(model: Path, gpu, expected: Reference) -> None:
    with load(model, gpu, ram=HOST_BYTES + 9 * EXPERT, system="auto:miss=both") as engine:
        held = [set(layer.tolist()) for layer in engine.loaded.near.placement.far.held]
        assert [len(layer) for layer in held] == [5, 4]
        for _ in range(2):
            logits, _ = answer(engine)
            assert float((logits - expected.logits).abs().max() / expected.logits.abs().max()) < 2e-5
        assert engine.stats.shared_bytes > 0


def far_memory(store: Store, **options) -> FarMemory:
    held = options.pop("held", choose_experts(LAYERS, EXPERTS, LAYERS * EXPERTS, None))
    return FarMemory(store, ordinal=0, held=held, **options)


def check_records(far: FarMemory, store: Store) -> None:
    for record, held, found in zip(store.layers, far.held, far.records, strict=True):
        assert np.array_equal(found, store.expert_layer(record.layer)[held].reshape(-1))


def test_damaged_experts_are_found_when_they_are_read_into_memory(store: Store, gpu, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "store")
    copy = Store.open(tmp_path / "store")
    copy.ensure_verified(tmp_path / "state")
    far_memory(copy).close()
    layer = copy.layers[1].layer
    flip(*record_place(copy, layer, 2))
    with pytest.raises(StoreDamagedError, match=f"block 0 of expert 2 of layer {layer} is not as it was"):
        far_memory(copy)
    assert gpu.cuda.get("pinned") == 0


def test_one_refusal_costs_one_chunk(store: Store, gpu) -> None:
    layers = []

    def refuse_one(done: int, total: int) -> None:
        layers.append((done, total))
        if done < total:
            gpu.cuda.set(refuse_pins=1)

    with pytest.warns(MoechatWarning, match="the system pins no more than"):
        far = far_memory(store, progress=refuse_one)
    assert layers == [(LAYER, 2 * LAYER), (2 * LAYER, 2 * LAYER)]
    assert far.pinned_bytes == 2 * LAYER - RECORD
    assert gpu.cuda.get("pinned") == far.pinned_bytes  # the reserve was given back
    check_records(far, store)
    far.close()
    assert gpu.cuda.get("pinned") == 0


def test_a_layer_that_is_refused_does_not_keep_the_next_one_from_being_pinned(store: Store, gpu) -> None:
    gpu.cuda.set(refuse_pins=2)
    with pytest.warns(MoechatWarning):
        far = far_memory(store)
    assert far.pinned_bytes == LAYER
    far.close()


def test_a_refusal_that_passes_leaves_no_notice(store: Store, gpu) -> None:
    gpu.cuda.set(refuse_pins=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far = far_memory(store)
    assert far.pinned_bytes == 2 * LAYER
    far.close()


def test_an_unknown_error_is_a_refusal_while_the_gpu_answers(store: Store, gpu) -> None:
    gpu.cuda.set(refuse_pins=2, refuse_with=999)
    with pytest.warns(MoechatWarning, match="999"):
        far = far_memory(store)
    assert far.pinned_bytes == LAYER
    far.close()


def test_a_lost_gpu_is_no_refusal(store: Store, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise _native.CudaError("cuMemGetInfo: CUDA_ERROR_UNKNOWN (999)")

    gpu.cuda.set(refuse_pins=1, refuse_with=999)
    monkeypatch.setattr(_native, "cuda_memory", lost)
    with pytest.raises(_native.CudaError, match="cuMemHostRegister"):
        far_memory(store)
    assert gpu.cuda.get("pinned") == 0


def test_scattered_experts_are_read_and_described(store: Store, gpu) -> None:
    held = [np.array([0, 2, 3, 7], np.int32), np.array([], np.int32)]
    far = far_memory(store, held=held)
    check_records(far, store)
    assert far.pinned_bytes == far.held_bytes == 4 * EXPERT
    near = gpu.cuda.pages(EXPERTS, RECORD)
    link = far.link()
    link.open(EXPERTS)
    try:
        for layer, record in enumerate(store.layers):
            link.submit([(slot, layer, slot * RECORD, RECORD, 0) for slot in range(EXPERTS)], near)
            done: list[tuple[int, int]] = []
            while len(done) < EXPERTS:
                link.wait(1)
                done += link.poll()
            assert not any(error for _, error in done)
            assert np.array_equal(near, store.expert_layer(record.layer).reshape(EXPERTS, RECORD))
    finally:
        assert link.stop(5)
        del link
        far.close()
        gpu.cuda.disown(near.ctypes.data)


def test_under_wsl2_the_notice_says_how_to_get_more(
    store: Store, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.cuda.set(pin_limit=RESERVE + RECORD)
    with pytest.warns(MoechatWarning) as caught:
        far_memory(store).close()
    assert "wslconfig" not in str(caught[0].message)
    monkeypatch.setattr(pinning, "in_wsl2", lambda: True)
    with pytest.warns(MoechatWarning, match=r"memory= under \[wsl2\] in %UserProfile%\\.wslconfig"):
        far_memory(store).close()


@pytest.mark.parametrize("record", [221_184, 311_040, 442_368, 3 << 20, 64, 300 << 20])
def test_chunks_are_whole_records_and_whole_pages(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    chunk = pinning.chunk_bytes(record)
    assert chunk % record == chunk % 4096 == 0
    assert chunk <= 256 << 20 or chunk == record
