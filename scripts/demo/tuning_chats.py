"""Write chats of the demo's training data as JSON Lines for `moechat tune` (the figures of the manual).

    python scripts/demo/tuning_chats.py --data DIR --out FILE [--seed 1]

Three quarters are stories of TinyStories that someone asks for; the others are made stories, questions about
moechat, and facts as JSON. DIR holds the files that train.py reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from corpus import Corpus, Turn, answer_chat, json_chat, load_corpus, made_story_chat, story_chat

LONGEST = 1400  # characters of a story: its chat then fits into 512 tokens
STORIES, MADE_STORIES, ANSWERS, JSON = 420, 60, 60, 20


def tuning_chats(corpus: Corpus, seed: int) -> list[list[Turn]]:
    """560 chats in random order."""
    rng = np.random.default_rng(seed)
    tales = [doc for doc in corpus.train["tinystories"] if len(doc.text) < LONGEST]
    chats = [story_chat(tales[at], rng) for at in rng.permutation(len(tales))[:STORIES]]
    chats += [made_story_chat(rng) for _ in range(MADE_STORIES)]
    chats += [answer_chat(rng) for _ in range(ANSWERS)]
    chats += [json_chat(rng) for _ in range(JSON)]
    return [chats[at] for at in rng.permutation(len(chats))]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the texts that train.py reads")
    parser.add_argument("--out", type=Path, required=True, help="the JSON Lines file to write")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for chat in tuning_chats(load_corpus(args.data), args.seed):
            messages = [{"role": role, "content": text} for role, text in chat]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
