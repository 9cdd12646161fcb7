"""Tests of the demo model in the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_checks import TOPICS, Topic, answer, called, count_topics, function, keeps_to
from torch.nn import functional

import moechat
from moechat.engine import Engine
from moechat.hub.names import resolve
from moechat.models.skeleton import load_config
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
    for part in (
        "CC-BY-4.0",
        "CDLA-Sharing-1.0",
        "Not good for",
        "As shipped",
        "scripts/demo/train.py",
        "What it keeps to",
    ):
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


@pytest.mark.parametrize("topic", TOPICS[:3], ids=lambda topic: topic.words[0])
def test_demo_keeps_to_the_topic_of_a_story(demo: Engine, topic: Topic) -> None:
    story = answer(demo, [{"role": "user", "content": topic.request}], tokens=120).text
    assert keeps_to(topic, story), story


@pytest.mark.slow
def test_demo_keeps_to_most_topics_also_when_it_draws(demo: Engine) -> None:
    # The last four of the ten requests have a word that the model was never trained on.
    assert count_topics(demo) >= 8
    assert sum(count_topics(demo, 0.7, seed) for seed in range(3)) >= 3 * 8


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("What is moechat?", "Mixture-of-Experts language models"),
        ("What does --vram do?", "--vram 12G"),
        ("How do I start a server?", "moechat serve"),
        ("What is a router?", "chooses a few experts"),
        ("What licence do you have?", "Apache-2.0"),
    ],
)
def test_demo_answers_questions_about_moechat(demo: Engine, question: str, told: str) -> None:
    assert told in answer(demo, [{"role": "user", "content": question}], tokens=60).text


@pytest.mark.parametrize(
    ("name", "types", "question", "arguments"),
    [
        ("get_weather", {"city": "string"}, "What is the weather in Paris?", {"city": "Paris"}),
        ("set_timer", {"minutes": "integer"}, "Set a timer for 12 minutes.", {"minutes": 12}),
        ("add", {"a": "integer", "b": "integer"}, "What is 17 plus 25?", {"a": 17, "b": 25}),
    ],
)
def test_demo_calls_the_tool_that_a_question_needs(
    demo: Engine, name: str, types: dict[str, str], question: str, arguments: dict[str, Any]
) -> None:
    reply = answer(demo, [{"role": "user", "content": question}], [function(name, types)])
    assert called(reply) == [(name, arguments)]
    assert reply.text == ""


def test_demo_calls_nothing_when_no_tool_is_needed(demo: Engine) -> None:
    tools = [function("get_weather", {"city": "string"})]
    reply = answer(demo, [{"role": "user", "content": "What is moechat?"}], tools, tokens=60)
    assert not reply.calls
    assert "Mixture-of-Experts" in reply.text


def test_demo_answers_as_json_without_a_grammar(demo: Engine) -> None:
    question = 'Anna the owl found a blue cup. Answer as JSON: {"name": ..., "animal": ..., "object": ...}'
    reply = answer(demo, [{"role": "user", "content": question}])
    assert json.loads(reply.text) == {"name": "Anna", "animal": "owl", "object": "cup"}


def test_every_expert_is_used_and_texts_use_different_experts(demo: Engine) -> None:
    card = (demo.loaded.store.path / "README.md").read_text(encoding="utf-8")
    story, coffee = expert_counts(demo, STORY), expert_counts(demo, COFFEE)
    assert (expert_counts(demo, card) > 0).all()
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (story, coffee)]
    distance = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
    assert distance[-3:].min() > 0.2
