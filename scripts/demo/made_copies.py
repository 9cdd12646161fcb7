"""Dialogues made by rule whose answers are words of the question (used by corpus.py).

They are the shortest texts from which a model learns to look words up and copy them, which stories about what
was asked, calls of tools and JSON are made of.
"""

from __future__ import annotations

import numpy as np
from made_stories import ANIMALS, BOYS, GIRLS, LOOKS, THINGS, a, invented_name, pick, words
from made_tools import CITIES, FOODS

_WORDS = [*ANIMALS, *THINGS, *LOOKS, *FOODS, *GIRLS, *BOYS, *CITIES]
_REPEAT = [
    "Repeat: {x}",
    "Please repeat: {x}",
    "Say this again: {x}",
    "Write these words: {x}",
    "Say: {x}",
    'Repeat after me: "{x}"',
]


def _word(rng: np.random.Generator) -> str:
    draw = rng.random()
    if draw < 0.2:
        return invented_name(rng)
    return str(rng.integers(1000)) if draw < 0.3 else pick(rng, _WORDS)


def _repeated(rng: np.random.Generator) -> tuple[str, str]:
    between = pick(rng, [" ", ", ", " and "])
    text = between.join(_word(rng) for _ in range(int(rng.integers(2, 13))))
    return pick(rng, _REPEAT).format(x=text), text


def long_repeat(rng: np.random.Generator) -> tuple[str, str]:
    """As "repeat", with up to forty words: nearly every token of the answer is a copy."""
    between = pick(rng, [" ", ", ", "\n"])
    text = between.join(_word(rng) for _ in range(int(rng.integers(4, 41))))
    return pick(rng, _REPEAT).format(x=text), text


def _names(rng: np.random.Generator, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        name = invented_name(rng) if rng.random() < 0.25 else pick(rng, GIRLS + BOYS)
        if name not in found:
            found.append(name)
    return found


def _looked_up(rng: np.random.Generator) -> tuple[str, str]:
    """Who has what, in a few sentences, and a question about one of them."""
    people = _names(rng, int(rng.integers(2, 6)))
    verb, does = [("has", "have"), ("wants", "want"), ("likes", "like"), ("sees", "see")][
        int(rng.integers(4))
    ]
    kinds = [THINGS, ANIMALS][int(rng.integers(2))]
    owned = [kinds[int(i)] for i in rng.permutation(len(kinds))[: len(people)]]
    text = " ".join(f"{who} {verb} {a(what)}." for who, what in zip(people, owned, strict=True))
    at = int(rng.integers(len(people)))
    who, what = people[at], owned[at]
    if rng.random() < 0.5:
        return f"{text} What does {who} {does}?", f"{who} {verb} {a(what)}."
    return f"{text} Who {verb} {a(what)}?", f"{who} {verb} {a(what)}."


def _described(rng: np.random.Generator) -> tuple[str, str]:
    """An animal with a name and a thing, and a question about it."""
    (name,) = _names(rng, 1)
    animal, look, thing = pick(rng, ANIMALS), pick(rng, LOOKS), pick(rng, THINGS)
    verb = pick(rng, words("has found wants saw lost"))
    text = f"{name} is {a(animal)}. {name} {verb} {a(f'{look} {thing}')}."
    return [
        (f"{text} What is the name of the {animal}?", f"The {animal} is named {name}."),
        (f"{text} What kind of animal is {name}?", f"{name} is {a(animal)}."),
        (f"{text} What color or kind is the {thing}?", f"It is {a(f'{look} {thing}')}."),
        (f"{text} Who {verb} the {thing}?", f"{name} the {animal} {verb} the {thing}."),
    ][int(rng.integers(4))]


def made_copy(rng: np.random.Generator) -> tuple[str, str]:
    """A question, and an answer of words that stand in it."""
    return [_repeated, _looked_up, _described][int(rng.integers(3))](rng)
