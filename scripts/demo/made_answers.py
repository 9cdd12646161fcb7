"""Questions about moechat and about the model itself, with answers from the manual (used by corpus.py).

They stand in answers.txt, beside this file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made_stories import pick


def read_answers(text: str) -> list[tuple[list[str], str]]:
    """The blocks of answers.txt: ways to ask, the answer.

    Raises:
        ValueError: A block has no answer, or fewer than two wordings.
    """
    found = []
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for block in filter(None, (part.strip() for part in lines.split("\n\n"))):
        *asks, answer = block.splitlines()
        if not answer.startswith("= ") or len(asks) < 2:
            raise ValueError(f"this block has no answer, or only one wording: {block!r}")
        found.append((asks, answer[2:]))
    return found


ANSWERS = read_answers(Path(__file__).with_name("answers.txt").read_text(encoding="utf-8"))


def trained_wordings(asks: list[str]) -> list[str]:
    return asks[:-1]


def unseen_wording(asks: list[str]) -> str:
    return asks[-1]


def as_typed(question: str, rng: np.random.Generator) -> str:
    """The question as people type it: with or without capital letters, marks, or a word before it."""
    draw = rng.random()
    if draw < 0.12:
        return question[0].lower() + question[1:]
    if draw < 0.24:
        return question.rstrip("?.")
    if draw < 0.32:
        return (question[0].lower() + question[1:]).rstrip("?.")
    if draw < 0.42:
        return (
            pick(rng, ["Hi! ", "Please tell me: ", "Hello. ", "A question: ", "Hey, ", "Thanks. "]) + question
        )
    return question


def made_answer(rng: np.random.Generator) -> tuple[str, str]:
    """A question and its answer."""
    asks, answer = ANSWERS[int(rng.integers(len(ANSWERS)))]
    return as_typed(pick(rng, trained_wordings(asks)), rng), answer
