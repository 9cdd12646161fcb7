"""What the predictors that learn from requests would queue, for every token of a trace.

Their predictions depend on the routing alone and not on time, so they are made before a simulation, by the
engine's own predictors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat.configurator.systems import CacheSettings
from moechat.predict.eamc import EamcOptions, EamcPredictor
from moechat.predict.expert_map import Embed, ExpertMapPredictor, MapOptions
from moechat.predict.requests import MOST_QUEUED, AheadQueue, Floats, Ints, RequestPredictor, known_part
from moechat.routing.trace import Trace


@dataclass(frozen=True)
class RequestQueues:
    """Queues of a trace, as input of a timeline.

    Attributes:
        requests: int64 ``[n]``: first tokens of its requests.
        experts: int32 ``[tokens, 1 + layers, queued]``: experts queued before a token's first layer, and
            after each router, as ``layer * experts + expert``, most urgent first, -1 for none; ``None``: no
            queues.
        scores: float32, the same shape: their expected shares.
    """

    requests: npt.NDArray[np.int64]
    experts: Ints | None = None
    scores: Floats | None = None


def request_predictor(
    settings: CacheSettings, layers: int, experts: int, top_k: int, *, embed: Embed = lambda _: None
) -> RequestPredictor | None:
    """The predictor of settings that learn from requests; ``None``: they do not.

    Args:
        settings: Settings of a near tier.
        layers: Expert layers.
        experts: Experts of a layer.
        top_k: Experts that a router chooses.
        embed: As for :class:`~moechat.predict.expert_map.ExpertMapPredictor`.
    """
    if settings.prefetch == "eamc":
        return EamcPredictor(layers, experts, EamcOptions(settings.entries, settings.match))
    if settings.prefetch == "expert-map":
        options = MapOptions(settings.entries, settings.distance)
        return ExpertMapPredictor(layers, experts, top_k, options, embed=embed)
    return None


def request_queues(trace: Trace, settings: CacheSettings) -> RequestQueues | None:
    """Queues for a trace, each token predicted from the tokens before it; ``None`` where settings neither
    queue nor tell requests apart.

    Prompts are not observed, where the trace says what its prompts are.

    Args:
        trace: A trace in the shape of the model.
        settings: Settings of a near tier.
    """
    requests = np.ascontiguousarray(trace.offsets[:-1], dtype=np.int64)
    predictor = request_predictor(
        settings, trace.layers, trace.num_experts, trace.top_k, embed=_embeddings(trace)
    )
    if predictor is None:
        told_apart = settings.policy == "request" or settings.per_request
        return RequestQueues(requests) if told_apart else None
    shape = (trace.tokens, trace.layers + 1, MOST_QUEUED)
    queued = np.full(shape, -1, dtype=np.int32)
    scores = np.zeros(shape, dtype=np.float32)
    prompts = np.zeros(trace.sequences, dtype=np.int64)
    if trace.prompt_lengths is not None:
        prompts = trace.prompt_lengths

    def put(token: int, slot: int, queue: AheadQueue | None) -> None:
        if queue is None:
            return
        count = len(queue.experts)
        queued[token, slot, :count] = queue.layers * trace.num_experts + queue.experts
        scores[token, slot, :count] = queue.scores

    gates_of = _gates(trace) if predictor.needs_gates else (lambda token, layer: None)
    for number, first in enumerate(requests.tolist()):
        last = int(trace.offsets[number + 1])
        predictor.begin_request(number)
        for token in range(first + int(prompts[number]), last):
            known = -1 if trace.token_ids is None else int(trace.token_ids[token])
            put(token, 0, predictor.begin_pass(number, known))
            for layer in range(trace.layers):
                predictor.observe(layer, trace.experts[token, layer], gates_of(token, layer))
                put(token, layer + 1, predictor.queue(layer))
        predictor.end_request(number)
    return RequestQueues(requests, queued, scores)


def _gates(trace: Trace) -> Callable[[int, int], Floats | None]:
    """Distributions of the routers: recorded ones, else the weights of the chosen experts."""
    if trace.gates is not None:
        gates = trace.gates.gates
        return lambda token, layer: gates[token, layer].astype(np.float32)
    weights = trace.weights
    if weights is None:
        return lambda token, layer: None

    return lambda token, layer: known_part(
        trace.experts[token, layer], weights[token, layer], trace.num_experts
    )


def _embeddings(trace: Trace) -> Embed:
    """Embeddings of the trace's token ids."""
    gates = trace.gates
    if gates is None or len(gates.embedding_ids) == 0:
        return lambda _: None

    def embed(token: int) -> Floats | None:
        at = int(np.searchsorted(gates.embedding_ids, token))
        if at == len(gates.embedding_ids) or gates.embedding_ids[at] != token:
            return None
        found: Floats = gates.embeddings[at].astype(np.float32)
        return found

    return embed
