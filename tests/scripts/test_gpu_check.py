"""The stages of ``scripts/gpu_check`` over a simulated GPU: completeness and resumption, not speed."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from places import ROOT

pytest.importorskip("triton")

from tiny import tiny_config, write_tiny_chat_model, write_tiny_checkpoint

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


@pytest.fixture
def _cheaper_kernels(monkeypatch):
    from wide_products import use_cheaper_kernels

    use_cheaper_kernels(monkeypatch)


@pytest.mark.usefixtures("_cheaper_kernels")
def test_every_system_is_measured_in_turns(gpu, tmp_path):
    from gpu.rounds import Rounds, measure

    write_tiny_checkpoint(tmp_path / "tiny", tiny_config("qwen3_moe", 0))
    rounds = Rounds(prompts=(3, 4, 4096), contexts=(4, 4096), warm=0, tokens=2, rounds=2)
    with moechat.load(
        tmp_path / "tiny",
        device="cuda",
        vram="1G",
        ctx=64,
        offload=OffloadOptions(accelerator=gpu, pages=4),
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
        assert set(one["first_token_s"]) == {3, 4}
        assert set(one["decode"]) == {4}, "contexts that do not fit are left out"
        at = one["decode"][4]
        assert at["token_ms"] > 0
        assert at["floor_ms"] > 0
        assert sum(at["hit_rates"].values()) == pytest.approx(1)
        assert at["link_bytes_a_token"] + at["cpu_bytes_a_token"] > 0
    assert found["pages"] == 4
    assert gpu.cuda.get("pinned") == 0


@pytest.mark.usefixtures("_cheaper_kernels")
def test_the_packaged_model_is_compared_with_the_cpu(gpu, tmp_path, monkeypatch):
    from gpu import smoke

    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(smoke, "_TOKENS", 2)
    monkeypatch.setattr(smoke, "_PROMPT", [{"role": "user", "content": "fox"}])
    monkeypatch.setattr(smoke, "_TEXT", "a fox")
    write_tiny_chat_model(tmp_path / "chat")
    found = smoke.demo(gpu, share=0.25, model=tmp_path / "chat")
    assert found["ok"], found
    assert found["same_tokens"] == [True] * 3
    assert 0 <= found["relative_error"] < 1e-3
    assert found["token_ms"] > 0


@pytest.mark.usefixtures("_cheaper_kernels")
def test_ways_to_decode_a_token_are_compared(gpu, tmp_path, monkeypatch):
    from gpu import decoded

    write_tiny_checkpoint(tmp_path / "tiny", tiny_config("qwen3_moe", 0))
    with moechat.load(tmp_path / "tiny", ctx=64) as engine:
        store = engine.loaded.store
    monkeypatch.setattr(decoded, "load_shape", lambda *_, **__: None)
    monkeypatch.setattr(decoded, "synthetic_store", lambda *_, **__: store)
    for name, count in {
        "_ROUNDS": 1,
        "_CONTEXT": 64,
        "_PROMPT": 3,
        "_WARM": 6,
        "_TOKENS": 2,
        "_TIMED": 2,
        "_PROFILED": 1,
    }.items():
        monkeypatch.setattr(decoded, name, count)
    turns = []
    half = decoded.compared(gpu, tmp_path, "half", turns.append)
    assert turns == [f"half: round 1, {way}" for way in ("now", "steps", "python", "plain")]
    assert half["ok"], half
    for one in half["ways"].values():
        assert one["token_ms"] > 0
        assert not one["two_graphs"]
        assert one["clocks_us"]["dense"] > 0
    whole = decoded.compared(gpu, tmp_path, "all", turns.append)
    assert whole["ok"], whole
    assert all(one["two_graphs"] and not one["clocks_us"] for one in whole["ways"].values())
    ahead = decoded.compared(gpu, tmp_path, "half, ahead", turns.append)
    assert all(one["ahead"] for one in ahead["ways"].values())
    lines = decoded.table({"half": half, "all": whole})
    assert "half, plain: " in lines
    assert "all: " in lines


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path):
    from gpu.record import Cell, Record

    path, ran = tmp_path / "gpu.json", []

    def cell(name, result):
        def run():
            ran.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return Cell(name, run, seconds=0)

    cells = [cell("a", {"figure": 1}), cell("b", ValueError("broken")), cell("c", {"ok": False})]
    first = Record(path)
    first.facts({"gpu": "one", "commit": "1"})
    assert first.run("stage", cells) == []
    assert ran == ["a", "b", "c"]
    assert first.failed == ["stage/b", "stage/c"]
    again = Record(path)
    again.facts({"gpu": "one", "commit": "1"})
    again.run("stage", [cells[0], cell("b", {"figure": 2}), cells[2]])
    assert ran == ["a", "b", "c", "b", "c"], "what is done is not done again, what failed is"
    assert again.failed == ["stage/c"]
    assert json.loads(path.read_text())["stages"]["stage"]["b"]["figure"] == 2
    late = Record(path, deadline=time.monotonic() + 5, again=True)
    assert late.run("stage", [cell("a", {}), Cell("long", dict, seconds=60)]) == ["long"]
    with pytest.raises(ValueError, match="the results are of gpu one"):
        Record(path).facts({"gpu": "another", "commit": "1"})
    path.write_text("[]")
    with pytest.raises(ValueError, match="no results of this version"):
        Record(path)


def test_failed_tests_are_reported_by_name():
    from gpu.parity import pytest as run

    found = run("tests/scripts/test_gpu_check.py", "-k", "nothing_is_called_so")
    assert not found["ok"], "no test ran"
    found = run("tests/scripts/test_check_imports.py")
    assert found["ok"]
    assert found["passed"] > 0
    assert found["failures"] == {}


def test_small_gpus_are_played_by_their_profiles():
    from gpu.capped import _CASES, PLAYED, Played

    from moechat.hardware.profile_file import reference_profile

    assert set(_CASES) == set(PLAYED)
    for name in PLAYED:
        profile = reference_profile(name)
        played = Played.of(name)
        assert played.memory == profile.gpu.bandwidth.value
        assert played.link < played.memory


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
