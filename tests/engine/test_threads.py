"""Tests that logits do not depend on the number of threads: dense products, attention and experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny_chat_model

import moechat
from moechat.models.threads import make_thread_invariant, one_thread


@pytest.fixture(scope="module", params=["demo", "qwen3_moe", "gpt_oss"])
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, home: Path) -> str:
    if request.param == "demo":
        return "demo"
    directory = tmp_path_factory.mktemp(request.param)
    # 16 experts: so narrow a router that its columns would be split differently among threads.
    experts = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}[request.param]
    changes: dict[str, Any] = {experts: 16, "max_position_embeddings": 512, "vocab_size": 261}
    write_tiny_chat_model(directory / "model", request.param, **changes)
    return str(directory / "model")


def logits(named: str, threads: int, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of prompts of several lengths, and of the steps of an answer."""
    tokens = [(11 * i * i + 5) % 250 + 3 for i in range(max(lengths))]
    found: list[torch.Tensor] = []
    with moechat.load(named, threads=threads, dtype="float32") as engine:
        found += [engine.logits(tokens[:length]) for length in lengths]
        hook = engine.loaded.model.register_forward_hook(
            lambda _module, _arguments, output: found.append(output.logits[0, -1].clone())
        )
        list(engine.generate(tokens[:37], max_new_tokens=8, temperature=0.0))
        hook.remove()
    return found


def test_logits_are_bitwise_equal_with_one_thread_and_with_more(named: str) -> None:
    # Lengths at which the compute library chooses other kernels.
    lengths = (1, 2, 3, 4, 5, 7, 9, 12, 16, 33, 100, 300)
    one = logits(named, 1, lengths)
    for threads in (2, 3):
        several = logits(named, threads, lengths)
        same = [torch.equal(a, b) for a, b in zip(one, several, strict=True)]
        assert all(same), f"{threads} threads: passes {[i for i, equal in enumerate(same) if not equal]}"


@pytest.mark.parametrize(("own", "expected"), [(None, "AUTO,STRICT"), ("COMPATIBLE", "COMPATIBLE")])
def test_compute_library_defaults_are_set_unless_the_user_set_them(own: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    if own is not None:
        environment["MKL_CBWR"] = own
    script = "import moechat, os, sys; print(os.environ['MKL_CBWR'], 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected, "False"]


def test_another_load_does_not_change_the_logits_of_an_engine(named: str) -> None:
    tokens = [(11 * i * i + 5) % 250 + 3 for i in range(17)]
    with moechat.load(named, threads=2, dtype="float32") as first:
        alone = first.logits(tokens)
        with moechat.load(named, threads=8, dtype="float32") as second:
            assert torch.equal(first.logits(tokens), alone)
            assert torch.equal(second.logits(tokens), alone)


def test_narrow_modules_use_one_thread_and_wide_modules_all() -> None:
    seen: dict[str, int] = {}

    class Spy(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen[self.label] = torch.get_num_threads()
            if self.label == "failing":
                raise ValueError("as wanted")
            return super().forward(input)

    model = torch.nn.ModuleDict()
    for label, width in (("narrow", 8), ("wide", 4096), ("failing", 8)):
        model[label] = Spy(4, width)
        model[label].label = label  # type: ignore[assignment]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_thread_invariant(model)
        for module in list(model.values())[:2]:
            module(torch.ones(5, 4))
        with pytest.raises(ValueError, match="as wanted"):
            model["failing"](torch.ones(5, 4))
        assert seen == {"narrow": 1, "wide": 2, "failing": 1}
        assert torch.get_num_threads() == 2
        # The threshold of narrow modules depends on the number of threads during the call.
        torch.set_num_threads(257)
        model["wide"](torch.ones(5, 4))
        assert seen["wide"] == 1
        torch.set_num_threads(2)
        with one_thread(needed=False):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
