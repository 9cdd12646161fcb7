"""Texts made by rule for the demo model, its chat template, and the weights that a run starts from."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus import CHAT_TEMPLATE, MADE, render_messages
from first_weights import first_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from made_answers import ANSWERS, made_answer, read_answers, unseen_wording
from made_stories import made_story, renamed
from made_tools import json_dialogue, story_json, tool_dialogue
from places import ROOT
from train import new_model

import moechat
from moechat.models.assets import load_tokenizer
from moechat.reply_formats import ReplyParser, detect, validated_tools, whole_reply

DEMO = ROOT / "moechat" / "hub" / "demo"
SEEDS = st.integers(0, 2**32 - 1)


@cache
def trained_tokenizer() -> Any:
    tokenizer = load_tokenizer(DEMO)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(deadline=None)
@given(SEEDS)
def test_every_word_that_a_request_names_is_in_its_story(seed: int) -> None:
    request, story = made_story(generator(seed))
    about = re.split(r"story about |story for children about ", request, flags=re.IGNORECASE)[1]
    about = about.rstrip(".?!").removesuffix(" please").removesuffix(",")
    fillers = {"a", "an", "and", "named", "called", "who", "finds", "the", "his", "her"}
    asked = [word for word in about.split() if word.lower() not in fillers]
    assert asked
    for word in asked:
        assert word.lower() in story.lower(), (request, story)
    assert "{" not in story


@settings(deadline=None)
@given(SEEDS)
def test_a_renamed_story_has_what_its_topics_name(seed: int) -> None:
    text = "There was a girl named Lily. Lily had a dog. The dog ran. A dog and Tom saw the dogs. Dogs bark."
    found, topics = renamed(text, generator(seed))
    assert len(topics) == 2
    for topic in topics:
        for word in topic.split(" ", 1)[1].replace(" named", "").split():
            assert word in found
    assert len(found.split()) == len(text.split())


@settings(deadline=None)
@given(SEEDS)
def test_the_template_renders_tools_and_calls_as_in_training(seed: int) -> None:
    messages, tools = tool_dialogue(generator(seed))
    shown = trained_tokenizer().apply_chat_template(messages, tools=tools, tokenize=False)
    assert shown == render_messages(messages, tools)


@settings(deadline=None)
@given(SEEDS)
def test_calls_in_the_texts_are_read_as_the_calls_that_they_are(seed: int) -> None:
    messages, tools = tool_dialogue(generator(seed))
    offered = validated_tools(tools)
    for at, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        written = render_messages(messages[: at + 1], tools).rsplit("<|assistant|>", 1)[1]
        parser = ReplyParser(detect(CHAT_TEMPLATE), offered)
        reply = whole_reply([*parser.feed(written.removesuffix("<|end|>")), *parser.end()])
        (wanted,) = (call["function"] for call in message["tool_calls"])
        assert [(c.name, json.loads(c.arguments)) for c in reply.calls] == [
            (wanted["name"], wanted["arguments"])
        ]
        assert reply.text == ""


def test_the_package_has_the_template_of_the_training_scripts() -> None:
    assert (DEMO / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    assert detect(CHAT_TEMPLATE).name == "hermes"


def test_the_template_takes_tools_without_parameters_and_several_calls() -> None:
    calls = [{"function": {"name": name, "arguments": '{"x": 1}'}} for name in ("one", "two")]
    text = trained_tokenizer().apply_chat_template(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": None, "tool_calls": calls},
        ],
        tools=[{"type": "function", "function": {"name": "now"}}],
        tokenize=False,
        add_generation_prompt=True,
    )
    one, two = (
        f'<tool_call>\n{{"name": "{n}", "arguments": {{"x": 1}}}}\n</tool_call>' for n in ("one", "two")
    )
    assert text == (
        '<|system|>Be kind.\n<tools>\n{"name": "now", "parameters": {}}\n</tools><|end|><|user|>Go.<|end|>'
        f"<|assistant|>{one}\n{two}<|end|><|assistant|>"
    )


@settings(deadline=None)
@given(SEEDS)
def test_json_answers_hold_words_of_their_request(seed: int) -> None:
    for make in (json_dialogue, story_json):
        question, reply = make(generator(seed))
        found = json.loads(reply["content"])
        assert found
        for key, value in found.items():
            assert key in question["content"]
            assert str(value) in question["content"]


def test_every_answer_has_a_wording_that_is_never_trained_on() -> None:
    rng = generator(0)
    unseen = {unseen_wording(asks).rstrip("?.").lower() for asks, _ in ANSWERS}
    asked = {made_answer(rng)[0].rstrip("?.").lower() for _ in range(3000)}
    assert len(unseen) == len(ANSWERS)
    assert not unseen & asked
    every = [wording for asks, _ in ANSWERS for wording in asks]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("block", ["One?\n= yes", "One?\nTwo?\nno mark", "= only"])
def test_a_block_of_answers_needs_two_wordings_and_an_answer(block: str) -> None:
    with pytest.raises(ValueError, match="no answer, or only one wording"):
        read_answers(f"# a comment\n\n{block}\n")


@pytest.mark.parametrize("stream", MADE)
def test_made_texts_fit_the_context(stream: str) -> None:
    tokenizer, rng = trained_tokenizer(), generator(1)
    make, _ = MADE[stream]
    assert max(len(tokenizer(make(rng))["input_ids"]) for _ in range(50)) <= 1024


def test_a_run_starts_from_what_the_packaged_model_computes() -> None:
    model = new_model().eval()
    missing = model.load_state_dict(first_weights(DEMO), strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied to the embedding
    model.tie_weights()
    engine = moechat.load("demo", dtype="float32", dense_bits=16, activation_bits=32)
    ids = engine.encode("Once upon a time there was a fox who had a red kite.")
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.as_tensor(engine.logits(ids)), expected, rtol=1e-3, atol=1e-3)


def test_no_weights_are_taken_from_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        first_weights(tmp_path)
