"""Tests of the demo model in the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import moechat
from moechat.engine import Engine
from moechat.hub.names import resolve
from moechat.models.checkpoint_mapping import load_config
from moechat.store.store import Store

# Written for this test: simple English that the model has not seen.
STORY = (
    "One day, a little boy named Sam went to the park with his dog. The dog saw a big red ball and ran to "
    'it. Sam was happy. He said, "Let us play with the ball!" They played all day. When it was dark, they '
    "went home. Mom gave Sam a big hug, and they all had dinner. Sam said thank you to his mom and slept."
)
COFFEE = "Hi, can I get a large latte with oat milk, please? Sure, is this order correct? Yes, that is right."


@pytest.fixture(scope="module")
def demo(home: Path) -> Engine:
    return moechat.load("demo", dtype="float32")


def perplexity(engine: Engine, tokens: list[int]) -> float:
    logits = engine.logits(tokens[:-1])
    return float(functional.cross_entropy(logits, torch.tensor(tokens[1:])).exp())


def expert_counts(engine: Engine, text: str) -> np.ndarray:
    """Counts how often each expert is chosen, ``[layers, experts]``."""
    geometry = engine.loaded.store.geometry
    counts = np.zeros((len(engine.loaded.store.layers), geometry.num_experts), dtype=np.int64)
    hooks = []
    for row, name in enumerate(record.module for record in engine.loaded.store.manifest.layers):

        def count(_: object, arguments: tuple[torch.Tensor, ...], row: int = row) -> None:
            counts[row] += np.bincount(arguments[1].numpy().ravel(), minlength=geometry.num_experts)

        hooks.append(engine.loaded.model.get_submodule(name).register_forward_pre_hook(count))
    tokens = engine.encode(text)
    for start in range(0, len(tokens), engine.context_length):
        engine.logits(tokens[start : start + engine.context_length])
    for hook in hooks:
        hook.remove()
    return counts


def test_demo_fits_into_sixteen_megabytes_and_is_intact() -> None:
    path = resolve("demo").store
    assert path is not None
    assert sum(file.stat().st_size for file in path.iterdir()) <= 16_000_000
    store = Store.open(path)
    store.verify()
    geometry = store.geometry
    assert len(store.layers) >= 8
    assert (geometry.num_experts, geometry.blocks_per_expert, geometry.bits) == (16, 4, 4)
    assert load_config(path).num_experts_per_tok == 2
    card = (path / "README.md").read_text(encoding="utf-8")
    for part in ("CC-BY-4.0", "CDLA-Sharing-1.0", "Not good for", "As shipped", "scripts/demo/train.py"):
        assert part in card


def test_demo_predicts_unseen_english(demo: Engine) -> None:
    tokens = demo.encode(STORY)
    shuffled = torch.tensor(tokens)[
        torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    ].tolist()
    assert perplexity(demo, tokens) < 30
    assert perplexity(demo, shuffled) > 10 * perplexity(demo, tokens)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_answers_a_chat_prompt_and_stops(demo: Engine, seed: int) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    steps = list(demo.generate(messages, seed=seed))
    text = "".join(step.text for step in steps)
    assert steps[-1].finish_reason == "stop"
    assert len(text.split()) > 40
    assert "<|" not in text


def test_every_expert_is_used_and_texts_use_different_experts(demo: Engine) -> None:
    card = (demo.loaded.store.path / "README.md").read_text(encoding="utf-8")
    story, coffee = expert_counts(demo, STORY), expert_counts(demo, COFFEE)
    assert (expert_counts(demo, card) > 0).all()
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (story, coffee)]
    distance = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
    assert distance[-3:].min() > 0.2
