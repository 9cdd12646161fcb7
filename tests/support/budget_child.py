"""Loads a model within a budget, answers a long prompt, and reports the memory it took: MODEL BUDGET TOKENS.

A budget of 0 prints the least that works in a fresh process.
"""

from __future__ import annotations

import json
import sys

import moechat
from moechat.errors import DoesNotFitError


def main() -> None:
    model, budget, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if budget == 0:
        try:
            moechat.load(model, bits=8, ram="64M", ctx=tokens + 64, threads=2)
        except DoesNotFitError as error:
            print(error.least_bytes)
        return
    engine = moechat.load(model, bits=8, ram=budget, ctx=tokens + 64, threads=2)
    prompt = [(7 * i * i + 3 * i) % 500 + 3 for i in range(tokens)]
    answer = list(engine.generate(prompt, max_new_tokens=6, temperature=0.0))
    stats = engine.stats.to_json()
    geometry = engine.loaded.store.geometry
    print(
        json.dumps(
            {
                "answer_tokens": len(answer),
                "pages": stats["pages"],
                "pages_peak": stats["pages_peak"],
                "peak_rss": stats["peak_rss_bytes"],
                "blocks": len(engine.loaded.store.layers) * geometry.num_experts * geometry.blocks_per_expert,
            }
        )
    )


if __name__ == "__main__":
    main()
