"""Measurements of ``scripts/gpu_check`` over a simulated GPU: completeness, not speed."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from places import ROOT

pytest.importorskip("triton")

from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.offload.settings import OffloadOptions
from moechat.routing import Trace


@pytest.fixture(scope="module")
def gpu():
    from fake_cuda import VARIABLE, FakeCuda
    from interpreted_gpu import InterpretedGpu

    with pytest.MonkeyPatch.context() as patch:
        driver = FakeCuda()
        patch.setenv(VARIABLE, str(driver.path))
        _native.cuda_driver_version()
        made = InterpretedGpu(driver)
        yield made
        made.close()
        driver.reset()


def test_every_system_is_measured_in_turns(gpu, tmp_path, monkeypatch):
    from gpu_rounds import Rounds, measure
    from wide_products import use_wide_products

    use_wide_products(monkeypatch)
    write_tiny_checkpoint(tmp_path / "tiny", tiny_config("qwen3_moe", 0))
    rounds = Rounds(prompts=(3, 4, 4096), warm=0, tokens=2, rounds=2)
    with moechat.load(
        tmp_path / "tiny",
        device="cuda",
        vram="1G",
        ctx=64,
        offload=OffloadOptions(accelerator=gpu, pages=10),
    ) as engine:
        rates = {"link": 1e9, "vram": 1e10}
        messages = []
        # The trace has another shape and is mapped to the model's.
        drawn = np.argsort(np.random.default_rng(0).random((30, 3, 16)), axis=2)[:, :, :4]
        trace = Trace(drawn.astype(np.int32), np.array([0, 30]), 16)
        found = measure(engine, ["auto", "on-demand"], rounds, rates=rates, trace=trace, say=messages.append)
    assert messages == ["round 1, auto", "round 1, on-demand", "round 2, on-demand", "round 2, auto"]
    assert set(found["systems"]) == {"auto", "on-demand"}
    for one in found["systems"].values():
        assert one["token_ms"] > 0
        assert one["floor_ms"] > 0
        assert set(one["first_token_s"]) == {3, 4}
        assert sum(one["hit_rates"].values()) == pytest.approx(1)
        assert one["link_bytes_a_token"] > 0
    assert found["pages"] == 10
    assert gpu.cuda.get("pinned") == 0


def test_gpu_check_without_a_gpu_ends_with_an_error(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--work", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no CUDA GPU can be used")
