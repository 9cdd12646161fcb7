"""Results: what their keys mean, and what they assume.

Seconds end in ``_s``, bytes in ``_bytes`` or begin with ``bytes_``; shares and hits are between 0 and 1. Of
``ttft_s`` and ``tpot_s`` there are ``median``, ``min`` and ``max`` over the runs. What follows are sections
and their keys; each key has double backquotes, and a test compares them with those of a measurement.

- ``format``: 1; raised when a key changes its meaning.
- ``model``: what was measured: ``name``, ``source`` (what the store was made from), ``type``,
  ``expert_layers``, ``experts`` (of a layer), ``top_k`` (of a token), ``bits``, ``expert_bytes``,
  ``block_bytes``, ``all_expert_bytes``, ``vocabulary``.
- ``machine``: where: ``threads``, ``isa`` (instructions of the expert kernels), ``memory_bytes``.
- ``tokens``: how many of the ``prompt``, for ``fill`` (of a trace, before the prompt, run through the expert
  layers alone), for ``warmup`` (not timed) and ``timed``; and ``runs``: how often all of it was done.
- ``routing``: ``source`` is "model" or "trace". For a trace, ``trace`` (its path, else null), ``mapping``
  (how it was made to fit), the share of a token's experts that the token before used: ``locality_before`` as
  recorded, ``locality_after`` as replayed (both null where all sequences have one token) and
  ``locality_chance``; and ``filled``, the share of choices that the mapping had to replace.
- ``prediction``: ``source`` is "drawn" (``accuracy`` as stated, and ``measured`` for 1, 2, ... layers ahead)
  or "next-router" (``right_of_top_k`` by layer, their ``mean`` and the ``chance`` value, over ``tokens``
  tokens, ``ahead`` layers ahead, out of ``top_k``).
- ``link``: ``kind``, ``bandwidth`` in bytes a second (measured, or programmed), ``compute_rate``: bytes of
  expert blocks computed a second, their quotient ``compute_to_link``, and whether bytes move at all:
  ``copy``. ``slows_computing``: by what share a token takes longer while a file link is busy with blocks that
  no layer needs; null where that was not measured.
- ``resident``: ``ttft_s`` and ``tpot_s`` with everything in memory; null where it does not fit.
- ``cases``: a list with one entry for each fraction and system:

  - ``system`` as it was written, ``settings`` it stands for, ``fraction`` of the experts that fits, ``pages``
    of one block each and ``pages_bytes`` of all of them, and ``filled``, the share of the pages that was in
    use when timing began.
  - ``ttft_s`` is the time for the prompt, ``tpot_s`` that for an output token; ``tpot_s.runs`` has it by run.
  - ``predicted_tpot_ms``: milliseconds for an output token that the simulator expects for the run, from the
    dense part, the kernels and the link as this measurement found them with everything in memory, over the
    idle link and, for a file link, beside the busy one, and ``predicted_ratio``, that over the measured
    median. Both null where not everything fits in memory, for a set chosen beforehand, and for predictors
    that learn from requests.
  - ``hits`` counts (token, expert) pairs: all blocks there (``hits.full``), there with the help of a prefetch
    (``hits.prefetch``), only top blocks there (``hits.top``), none there (``hits.miss``).
  - ``blocks_resident`` is the share of the wanted blocks that the cache held without a prefetch, and
    ``blocks_prefetched`` the share that a prefetch had brought, or had on its way.
  - ``bytes_per_token`` is what the link moved on demand (``bytes_per_token.demand``) and ahead
    (``bytes_per_token.prefetch``), what of the latter was never used (``bytes_per_token.wasted``), and what
    of the wanted bytes was not resident, prefetched or not (``bytes_per_token.missing``).
  - ``link_busy_share``, ``stall_share`` (waiting for blocks), ``compute_share`` (of experts) and
    ``dense_share`` (outside of expert layers) are parts of the time per token; the link is busy beside the
    others.
  - ``us_per_layer`` are microseconds of bookkeeping in an expert layer's call: ``us_per_layer.begin``,
    ``us_per_layer.prefetch`` and ``us_per_layer.finish`` in the native calls (the last without compute and
    stall), ``us_per_layer.predict`` in the predictor, and ``us_per_layer.python`` for the rest, which is
    Python and the bindings.
  - ``floor_s.link`` is what the missing bytes need on the link, and ``floor_s.compute`` the time with
    everything in memory (null where it does not fit). Both in ``floor_s`` are as they were measured, so noise
    can lift them above a system. The table prints the larger one of those that are still floors: the first
    unless this system was faster than it, the second unless any system at this fraction was; "-" if none is.
- ``assumptions``: sentences for people; the command adds them.
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
    said = [f"The experts are those of {routing['trace']}. {routing['mapping']}"]
    if routing["locality_before"] is None or routing["locality_after"] is None:
        return [*said, "Its sequences have one token each: there is no locality that a cache could use."]
    return [
        *said,
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
