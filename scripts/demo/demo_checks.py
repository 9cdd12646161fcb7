"""Checks of what the demo model promises: it keeps to topics, knows itself, calls tools, fills in JSON.

Used by scripts/demo/check, for the model card, and by the tests.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from made_answers import ANSWERS, trained_wordings, unseen_wording
from made_tools import json_dialogue, story_json, tool_dialogue

from moechat.engine import Engine
from moechat.reply_formats import ReplyParser, WholeReply, detect, validated_tools, whole_reply

Message = dict[str, Any]
# Unlike those of training, which are 0 and more.
_CHECK_SEED = 424_242


@dataclass(frozen=True)
class Topic:
    """A request for a story, and the words that have to be in the story."""

    request: str
    words: tuple[str, ...]


# Fixed before training was measured with them. The last four have a word that no list of made_stories.py has.
TOPICS = (
    Topic("Tell me a story about a fox named Mia and a red kite.", ("fox", "Mia", "kite")),
    Topic("Tell me a story about a bear named Otto and a drum.", ("bear", "Otto", "drum")),
    Topic("Write a short story about a rabbit named Ruby and a blue boat.", ("rabbit", "Ruby", "boat")),
    Topic("Please tell me a story about an owl named Hugo and a lamp.", ("owl", "Hugo", "lamp")),
    Topic("Can you tell me a story about a penguin named Nora and a green hat?", ("penguin", "Nora", "hat")),
    Topic("Tell me a story about a dog named Max and a magic stone.", ("dog", "Max", "stone")),
    Topic("Tell me a story about a mouse named Pelle and a tiny bell.", ("mouse", "Pelle", "bell")),
    Topic("Write a story about a llama named Rosa and a yellow umbrella.", ("llama", "Rosa", "umbrella")),
    Topic("Tell me a story about a turtle named Sam and a silver spade.", ("turtle", "Sam", "spade")),
    Topic("I want a story about a goat named Annika and a broken clock.", ("goat", "Annika", "clock")),
)
# Tools that people write first, and one whose name and parameter no training text has.
TOOL_QUESTIONS: tuple[tuple[str, dict[str, Any], str, dict[str, Any]], ...] = (
    ("get_weather", {"city": "string"}, "What is the weather in Paris?", {"city": "Paris"}),
    ("get_weather", {"city": "string"}, "How is the weather in Oslo today?", {"city": "Oslo"}),
    ("set_timer", {"minutes": "integer"}, "Set a timer for 12 minutes.", {"minutes": 12}),
    ("set_timer", {"minutes": "integer"}, "Please set a timer for 5 minutes.", {"minutes": 5}),
    ("add", {"a": "integer", "b": "integer"}, "What is 17 plus 25?", {"a": 17, "b": 25}),
    ("add", {"a": "integer", "b": "integer"}, "Add 3 and 44.", {"a": 3, "b": 44}),
    ("search_recipes", {"ingredient": "string"}, "Find a recipe with tomatoes.", {"ingredient": "tomatoes"}),
    ("search_recipes", {"ingredient": "string"}, "What can I cook with rice?", {"ingredient": "rice"}),
    ("find_museums", {"region": "string"}, "Find museums in Rome.", {"region": "Rome"}),
    ("get_weather", {"location": "string"}, "What is the weather like in Tokyo?", {"location": "Tokyo"}),
)


def function(name: str, types: dict[str, str]) -> dict[str, Any]:
    """A tool as clients of the chat API describe it; all parameters are required."""
    properties = {key: {"type": type_} for key, type_ in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def answer(
    engine: Engine,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    tokens: int = 120,
    temperature: float = 0.0,
    seed: int = 0,
) -> WholeReply:
    """The reply to a chat, with its calls read out."""
    format = detect(engine.prompts.chat_template(tools=bool(tools)))
    parser = ReplyParser(format, validated_tools(tools) if tools else ())
    ids = engine.encode(messages, tools=tools)
    events = []
    for step in engine.generate(ids, max_new_tokens=tokens, temperature=temperature, seed=seed):
        events += parser.feed(step.text)
    return whole_reply([*events, *parser.end()])


def keeps_to(topic: Topic, story: str) -> bool:
    """Every asked word is in the story, as a word."""
    return all(re.search(rf"\b{word}\b", story) for word in topic.words)


def count_topics(engine: Engine, temperature: float = 0.0, seed: int = 0, tokens: int = 220) -> int:
    """How many of :data:`TOPICS` the model keeps to."""
    stories = [
        answer(engine, [{"role": "user", "content": topic.request}], tokens=tokens, temperature=temperature,
               seed=seed).text
        for topic in TOPICS
    ]  # fmt: skip
    return sum(keeps_to(topic, story) for topic, story in zip(TOPICS, stories, strict=True))


def count_answers(engine: Engine, *, unseen: bool) -> tuple[int, int]:
    """How many questions have their answer word for word, and of how many.

    Args:
        engine: The model.
        unseen: Ask in the wording that was kept from training, else in the first one.
    """
    good = 0
    for asks, expected in ANSWERS:
        question = unseen_wording(asks) if unseen else trained_wordings(asks)[0]
        good += answer(engine, [{"role": "user", "content": question}], tokens=60).text.strip() == expected
    return good, len(ANSWERS)


def called(reply: WholeReply) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in a reply."""
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def count_tool_questions(engine: Engine) -> tuple[int, int]:
    """How many of :data:`TOOL_QUESTIONS` end in exactly the wanted call."""
    good = 0
    for name, types, question, expected in TOOL_QUESTIONS:
        reply = answer(engine, [{"role": "user", "content": question}], [function(name, types)])
        good += called(reply) == [(name, expected)]
    return good, len(TOOL_QUESTIONS)


def count_tools(engine: Engine, cases: int = 40) -> tuple[int, int, int]:
    """Fresh dialogues by the rules of training.

    Returns:
        Calls that are exactly right, answers that have every value of the result, and dialogues.
    """
    rng, calls, tells, seen = np.random.default_rng(_CHECK_SEED), 0, 0, 0
    while seen < cases:
        messages, tools = tool_dialogue(rng)
        at = next((i for i, m in enumerate(messages) if m.get("tool_calls")), None)
        if at is None:
            continue
        seen += 1
        wanted = messages[at]["tool_calls"][0]["function"]
        reply = answer(engine, messages[:at], tools)
        calls += called(reply) == [(wanted["name"], wanted["arguments"])]
        told = answer(engine, messages[: at + 2], tools, tokens=60)
        tells += _tells(told, messages[at + 1]["content"])
    return calls, tells, cases


def _tells(reply: WholeReply, result: str) -> bool:
    """The answer is a sentence with every value of the result, apart from mere confirmations."""
    values = [str(v) for v in json.loads(result).values() if v not in ("ok", True)]
    return not reply.calls and bool(reply.text.strip()) and all(value in reply.text for value in values)


def count_json(engine: Engine, cases: int = 40) -> tuple[int, int]:
    """Fresh requests by the rules of training: answers that are exactly the wanted object, and requests.

    No grammar helps.
    """
    rng, good = np.random.default_rng(_CHECK_SEED), 0
    for case in range(cases):
        messages = (json_dialogue if case % 2 else story_json)(rng)
        with suppress(ValueError):
            good += json.loads(answer(engine, messages[:1]).text) == json.loads(messages[1]["content"])
    return good, cases


def all_checks(engine: Engine) -> dict[str, Any]:
    """All counts, for the card."""
    calls, tells, cases = count_tools(engine)
    return {
        "topics": len(TOPICS),
        "topics_greedy": count_topics(engine),
        "topics_sampled": [count_topics(engine, 0.7, seed) for seed in range(3)],
        "answers_trained": count_answers(engine, unseen=False),
        "answers_unseen": count_answers(engine, unseen=True),
        "tool_questions": count_tool_questions(engine),
        "tool_calls": (calls, cases),
        "tool_answers": (tells, cases),
        "json": count_json(engine),
    }
