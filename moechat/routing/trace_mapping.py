"""A trace of one model made to fit the shape of another, so that what makes caching work is kept.

What a cache lives from is that a token uses experts that the tokens just before it used. So experts are not
drawn anew: each layer of the wanted shape is put together from layers of the trace, as they were recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat.errors import UsageError
from moechat.routing.trace import Trace


@dataclass(frozen=True)
class MappedTrace:
    """A trace in the wanted shape.

    Attributes:
        trace: ``[tokens, layers, top_k]`` as asked for.
        how: What was done, in sentences for people.
        locality_before: Share of a token's experts that the token before used, in the trace as recorded.
        locality_after: The same after the mapping.
        chance_after: What random routing in the wanted shape would give.
        filled: Share of choices that folding made equal to another one of the token, and that were replaced.
    """

    trace: Trace
    how: str
    locality_before: float
    locality_after: float
    chance_after: float
    filled: float


def map_trace(trace: Trace, layers: int, experts: int, top_k: int, *, seed: int = 0) -> MappedTrace:
    """Fit a trace to a model.

    Each wanted layer is made of ``groups`` trace layers that lie apart; group j owns its share of the experts
    and takes its share of the ``top_k`` from the first ones that the trace names. Which expert of a group
    stands for which one of the trace is a permutation drawn once for each layer and group, so no two layers
    are the same. Where the trace has more experts than a group, they are folded; where it has fewer, some are
    never chosen.

    Args:
        trace: As recorded.
        layers: Expert layers wanted.
        experts: Experts in a layer wanted.
        top_k: Experts of a token wanted.
        seed: Of the permutations.

    Raises:
        UsageError: The wanted shape is impossible.
    """
    if layers < 1 or not 1 <= top_k <= experts:
        raise UsageError(f"no model has {layers} expert layers with {top_k} of {experts} experts a token")
    before = trace.locality()
    if (layers, experts, top_k) == (trace.layers, trace.num_experts, trace.top_k):
        return MappedTrace(trace, "the trace has the model's shape", before, before, top_k / experts, 0.0)

    groups = min(top_k, max(-(-experts // trace.num_experts), -(-top_k // trace.top_k)))
    sizes, picks = _shares(experts, groups), _shares(top_k, groups)
    if max(picks) > trace.top_k or any(pick > size for pick, size in zip(picks, sizes, strict=True)):
        raise UsageError(
            f"a trace with {trace.top_k} of {trace.num_experts} experts a token cannot stand for "
            f"{top_k} of {experts}"
        )
    generator = np.random.default_rng(seed)
    offsets = _layer_offsets(trace.layers, groups)
    starts = np.cumsum([0, *sizes])
    out = np.empty((trace.tokens, layers, top_k), dtype=np.int32)
    filled = 0
    for layer in range(layers):
        at = 0
        for group in range(groups):
            # Every time round the groups come closer together: other layers meet.
            turn = layer // trace.layers
            source = (layer + offsets[group] - turn * group) % trace.layers
            size, pick = sizes[group], picks[group]
            chosen, replaced = _take(trace.experts[:, source], trace.num_experts, size, pick, generator)
            out[:, layer, at : at + pick] = chosen + starts[group]
            filled += replaced
            at += pick
    mapped = Trace(out, trace.offsets, experts)
    share = filled / out.size
    how = _explain(trace, layers, experts, top_k, sizes, picks, offsets, share)
    return MappedTrace(mapped, how, before, mapped.locality(), top_k / experts, share)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _layer_offsets(layers: int, groups: int) -> list[int]:
    """Places of a wanted layer's groups among the trace layers, apart from each other and at unequal
    distances.

    With equal distances (0, 6, 12, 18 of 24) layers 0 and 6 would be made of the same four trace layers.
    """
    stride = max(1, layers // groups)
    places = [group * stride % layers for group in range(groups)]
    if groups > 1 and stride > 1:
        places[-1] -= 1
    return places


def _take(
    chosen: npt.NDArray[np.int32],
    trace_experts: int,
    size: int,
    pick: int,
    generator: np.random.Generator,
) -> tuple[npt.NDArray[np.int32], int]:
    """``pick`` different experts below ``size`` for each token, from its choice in one trace layer.

    ``chosen`` is that choice, ``[tokens, k]``. Returns int32 ``[tokens, pick]``, and how many had to be
    replaced.
    """
    permutation = generator.permutation(max(size, trace_experts)).astype(np.int32)
    if trace_experts <= size:
        return permutation[chosen[:, :pick]], 0
    folded = permutation[chosen] % size
    popular = np.argsort(-np.bincount(folded.reshape(-1), minlength=size), kind="stable")
    # A fold can make two of a token's experts one. The later ones go, and if too few are left the layer's
    # most popular experts fill up: every token then names `pick` different ones.
    candidates = np.concatenate([folded, np.broadcast_to(popular, (len(folded), size))], axis=1)
    width = folded.shape[1]
    result = np.empty((len(folded), pick), dtype=np.int32)
    count = np.zeros(len(folded), dtype=np.int64)
    used = np.zeros((len(folded), size), dtype=bool)
    rows = np.arange(len(folded))
    replaced = 0
    for place in range(candidates.shape[1]):
        column = candidates[:, place]
        fresh = (count < pick) & ~used[rows, column]
        result[rows[fresh], count[fresh]] = column[fresh]
        used[rows[fresh], column[fresh]] = True
        count += fresh
        if place >= width:
            replaced += int(fresh.sum())
            if (count == pick).all():
                break
    return result, replaced


def _explain(
    trace: Trace,
    layers: int,
    experts: int,
    top_k: int,
    sizes: list[int],
    picks: list[int],
    offsets: list[int],
    filled: float,
) -> str:
    """What was done, with the numbers."""
    shape = f"{trace.layers} layers of {trace.num_experts} experts, {trace.top_k} a token"
    parts = [f"The trace ({shape}) was mapped to {layers} layers of {experts} experts, {top_k} a token."]
    if len(sizes) == 1:
        parts.append(f"Layer l uses trace layer l mod {trace.layers}, experts permuted.")
    else:
        places = ", ".join(map(str, offsets))
        parts.append(
            f"Layer l is {len(sizes)} groups of {_range(sizes)} experts, from trace layers l + ({places}) "
            f"mod {trace.layers}, each permuted; of each, the first {_range(picks)} experts of a token count."
        )
    if layers > trace.layers:
        parts.append(
            f"From layer {trace.layers} on trace layers are used again, in other groupings and permutations."
        )
    small, large = min(sizes), max(sizes)
    if small < trace.num_experts:
        parts.append(
            f"The {trace.num_experts} experts of a trace layer are folded onto {_range(sizes)}; "
            f"{filled:.1%} of the choices fell together with others and were replaced by popular experts."
        )
    if large > trace.num_experts:
        unused = sum(max(0, size - trace.num_experts) for size in sizes)
        parts.append(f"{unused} of {experts} experts of a layer are never chosen.")
    return " ".join(parts)


def _range(values: list[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"
