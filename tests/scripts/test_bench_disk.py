"""Models larger than the memory, beside llama.cpp: tokens, figures, refusals, and a tiny model's turn.

What needs llama.cpp takes it from the directory that ``LLAMA_PEER`` names, and is skipped without it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from places import SCRIPTS

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}


def module(name: str) -> Any:
    return importlib.import_module(name)


def script() -> Any:
    loader = SourceFileLoader("bench_disk", str(SCRIPTS / "bench" / "disk"))
    spec = spec_from_loader("bench_disk", loader)
    assert spec is not None
    made = module_from_spec(spec)
    sys.modules["bench_disk"] = made  # dataclasses look for it
    loader.exec_module(made)
    return made


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "disk"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_rank_of_a_token_says_how_often_it_is_drawn() -> None:
    drawn = np.bincount(script().zipf(60_000, 50, np.random.default_rng(3)), minlength=50)
    wanted = 1 / np.arange(1, 51)
    assert np.sort(drawn)[::-1] / 60_000 == pytest.approx(wanted / wanted.sum(), rel=0.2)


def test_shares_of_lru_are_those_counted_by_hand() -> None:
    share = module("disk_worker").lru_share
    # Room for two: of 0 1, 1 2, 2 0, 0 2 the second finds 1, the third 2, the fourth both.
    assert share([[0, 1], [1, 2], [2, 0], [0, 2]], 2, skipped=0) == 4 / 8
    assert share([[0, 1], [1, 2], [2, 0], [0, 2]], 2, skipped=3) == 1
    assert share([[0], [1], [2]] * 4, 2, skipped=0) == 0


def test_ratios_are_those_of_turns_in_the_same_round() -> None:
    def turn(tpot: float) -> dict[str, float]:
        return {"tpot": tpot, "ttft": 2 * tpot, "prompt_mb": 1.0, "token_mb": 1.0}

    ours, theirs = [turn(0.1), turn(0.2), turn(0.4)], [turn(0.2), turn(0.6), turn(0.8)]
    turns = {"moechat": ours, "llama.cpp": theirs}
    lines = list(script().table([{"memory": 10**9, "turns": turns, "failed": {}}], 2 * 10**9))
    assert lines[0] == "1.00 GB free, 0.50 of the file"
    assert lines[-1].split(maxsplit=1)[1] == "decode 2.00 (2.00 to 3.00), first token 2.00 (2.00 to 3.00)"
    failed = {"memory": 10**9, "turns": {**turns, "llama.cpp": []}, "failed": {"llama.cpp": "too small"}}
    lines = list(script().table([failed], 2 * 10**9))
    assert lines[-1].split(maxsplit=1) == ["llama.cpp", "too small"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--prompt", "2000"], "at most 2048 together"),
        (["--memory", "much"], "much"),
        (["--model", "no-such-model"], "there is no shape 'no-such-model'"),
        ([], "is missing; run the same with --prepare first"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_reason(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = bench("--work", str(tmp_path), *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_memory_is_held_until_the_end() -> None:
    if psutil.swap_memory().total:
        pytest.skip("this machine has swap")
    # Other tests of this process may have left children that go on.
    held, others = 256 << 20, set(psutil.Process().children())
    before = psutil.virtual_memory().available
    with script().scarce_memory(before - held):
        (holder,) = set(psutil.Process().children()) - others
        assert holder.memory_info().rss > 0.5 * held  # others may have freed memory meanwhile
    assert not holder.is_running()
    with (
        pytest.raises(module("cpu_files").BenchError, match="were asked for"),
        script().scarce_memory(1 << 60),
    ):
        pass


@pytest.mark.timeout(300)
def test_a_tiny_model_is_measured(tmp_path: Path, shape: Path) -> None:
    disk, files = script(), module("cpu_files")
    (model,) = files.parse_models(str(shape))
    path = tmp_path / "tiny.gguf"
    files.write_gguf(model.plan("q4_k"), path)
    systems = disk.Systems(files.Files(tmp_path), path, module("llama_peer").LlamaPeer(tmp_path))
    tokens = iter(disk.zipf(2000, 512, np.random.default_rng(0)))
    turn = systems.turn("moechat", disk.Lengths(8, 4), lambda count: [next(tokens) for _ in range(count)])
    assert turn["ttft"] > 0
    assert turn["tpot"] > 0
    with systems.start("moechat") as worker:
        found = worker.ask("routing", tokens=disk.zipf(300, 512, np.random.default_rng(1)))
    assert 0.2 < found["lru_quarter"] < 0.95


@pytest.mark.timeout(600)
def test_both_are_measured_where_llama_cpp_is_installed(tmp_path: Path, shape: Path) -> None:
    peer = os.environ.get("LLAMA_PEER")
    if peer is None:
        pytest.skip("LLAMA_PEER names no directory with llama.cpp")
    work = tmp_path / "work"
    work.mkdir()
    (work / "llama.cpp").symlink_to(peer)
    common = ["--work", str(work), "--model", str(shape)]
    assert "LRU with a quarter of the experts" in bench(*common, "--prepare").stdout
    left = psutil.virtual_memory().available - (1 << 30)
    done = bench(*common, "--memory", str(left), "--rounds", "2", "--prompt", "8", "--tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
