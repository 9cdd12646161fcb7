"""Results: what their keys mean, and what they assume.

Seconds end in ``_s``, bytes in ``_bytes`` or ``bytes_``; shares and hits are between 0 and 1. Spreads are the
median, the least and the most over the runs.

- ``format``: 1; raised when a key changes its meaning.
- ``model``, ``machine``, ``tokens``: what was measured, where, and how many tokens.
- ``routing``: ``source`` is ``model`` or ``trace``; for a trace, how it was mapped, and the share of a
token's
  experts that the token before used: as recorded, as replayed, and by chance.
- ``prediction``: ``source`` is ``drawn`` (stated ``accuracy``, and ``measured`` for 1, 2, … layers ahead) or
  ``next-router`` (``right_of_top_k`` by layer, and their ``mean``).
- ``link``: ``kind``, ``bandwidth`` in bytes a second (measured, or programmed), ``compute_rate``: bytes of
expert
  blocks computed a second, their quotient ``compute_to_link``, and whether bytes move at all (``copy``).
- ``resident``: times with everything in memory; ``null`` where it does not fit.
- ``cases``, one for each fraction and system: ``tpot_s`` is the time for an output token; ``filled`` the
share of the
  pages that was in use when timing began; ``hits`` counts (token, expert) pairs: all blocks there (``full``),
  there with the help of a prefetch, only top blocks there, none there (``miss``); ``bytes_per_token`` what
  the link moved on demand and ahead, what of the latter was never used (``wasted``), and what was not there
  when it was needed (``missing``); ``stall_share``, ``compute_share`` and ``dense_share`` are parts of the
  time per token; ``bookkeeping_us_per_layer`` is the native ``begin`` and ``prefetch``,
  ``python_us_per_layer`` the rest of a layer's call without compute and stall: Python, bindings, prediction;
  ``floor_s`` is the least that the missing bytes need on the link, and the time with everything in memory.
- ``assumptions``: sentences for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def assumptions(
    result: Mapping[str, Any], cuts: Sequence[str] = (), *, random_weights: bool = False
) -> list[str]:
    """Everything in a measurement that was drawn, cut or assumed.

    Args:
        result: Of :func:`moechat.bench.measure.run_bench`.
        cuts: What is smaller than in the model that the shape is of.
        random_weights: The model is a synthetic store.

    Returns:
        Sentences for people.
    """
    tokens = result["tokens"]
    said = [
        f"Tokens are given, not sampled: {tokens['prompt']} of a prompt, {tokens['warmup']} that fill the "
        f"cache and are not timed, then {tokens['timed']} that are; {tokens['runs']} times, the systems in "
        "turns."
    ]
    if tokens["fill"]:
        said.append(
            f"Before the prompt the expert layers alone ran for {tokens['fill']} tokens of the trace, over "
            "a link that did not hold them up if it is simulated: caches are as after a long use."
        )
    if random_weights:
        said.append("Weights are random, and experts are put together from few different blocks.")
    if cuts:
        said.append(f"The shape is cut down: {' and '.join(cuts)}.")
    said += _routing(result["routing"], random_weights)
    said += _prediction(result["prediction"])
    link = result["link"]
    if link["kind"] == "sim":
        ratio = link["compute_to_link"]
        said.append(
            f"The link is simulated: {link['bandwidth'] / 1e9:.3f} GB/s, 1/{ratio:.3g} of the rate at which "
            "expert blocks are computed."
        )
        if not link["copy"]:
            said.append("The bytes themselves do not move over it, so what is computed is meaningless.")
    return said


def _routing(routing: Mapping[str, Any], random_weights: bool) -> list[str]:
    if routing["source"] != "trace":
        if random_weights:
            return ["Random routers choose the experts: there is no locality that a cache could use."]
        return []
    return [
        f"The experts are those of {routing['trace']}. {routing['mapping']}",
        f"Share of a token's experts that the token before used: {routing['locality_before']:.1%} as "
        f"recorded, {routing['locality_after']:.1%} as replayed, {routing['locality_chance']:.1%} by chance.",
    ]


def _prediction(prediction: Mapping[str, Any]) -> list[str]:
    if prediction["source"] == "drawn":
        measured = ", ".join(f"{value:.1%}" for value in prediction["measured"])
        return [
            "Predictions are drawn: each expert that the replay will choose is predicted with probability "
            f"{prediction['accuracy']:g} (measured, by layers ahead: {measured}). The next layer's router is "
            "computed all the same, so that its time counts."
        ]
    if prediction["mean"] is None:
        return ["No router was found that could predict."]
    return [
        f"Predictions are those of the next layer's router: {prediction['mean']:.2f} of "
        f"{prediction['top_k']} right on average ({prediction['chance']:.2f} by chance)."
    ]
