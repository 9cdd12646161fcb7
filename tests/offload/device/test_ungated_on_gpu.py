"""Experts without a gate projection on a GPU, as far as that can be without one (``interpreted_gpu.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from families import tiny_family
from tiny import write_tiny_checkpoint

import moechat
from moechat.offload.settings import OffloadOptions

# Few tokens, and many.
PROMPTS = ([5, 17, 9], [5, 17, 9, 33, 21, 2, 60, 44, 13, 71, 8, 4, 6, 90, 11, 12, 3, 40])
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "nemotron"
    config = tiny_family("nemotron_h")
    config.eos_token_id = None
    write_tiny_checkpoint(directory, config)
    return directory


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_logits_are_those_of_the_cpu(model: Path, gpu: Any, bits: int) -> None:
    usual = {"bits": bits, "dtype": "float32", "dense_bits": 16, "ctx": 64, "tune": False}
    with moechat.load(model, activation_bits=32, **usual) as engine:
        wanted = [engine.logits(tokens) for tokens in PROMPTS]
    offload = OffloadOptions(accelerator=gpu, pages=6)
    with moechat.load(
        model, device="cuda", offload=offload, vram="1G", deterministic=True, **usual
    ) as engine:
        for tokens, logits in zip(PROMPTS, wanted, strict=True):
            found = engine.logits(tokens)
            assert float((found - logits).abs().max() / logits.abs().max()) < TOLERANCE
