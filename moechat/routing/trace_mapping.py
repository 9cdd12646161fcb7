"""Maps a trace of one model to the shape of another, preserving the temporal locality of experts.

Caches work because tokens use experts of the tokens just before them. So experts are not drawn at random:
each layer of the new shape is assembled from recorded layers of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat.errors import UsageError
from moechat.routing.trace import Trace


@dataclass(frozen=True)
class MappedTrace:
    """A mapped trace.

    Attributes:
        trace: Trace in the requested shape.
        how: Description of the mapping, in sentences.
        locality_before: :meth:`Trace.locality` of the original trace.
        locality_after: The same of the mapped trace.
        chance_after: The same for random routing in the new shape.
        filled: Share of choices that were replaced, because folding made them equal to another one of the
            token.
    """

    trace: Trace
    how: str
    locality_before: float
    locality_after: float
    chance_after: float
    filled: float


def map_trace(trace: Trace, layers: int, experts: int, top_k: int, *, seed: int = 0) -> MappedTrace:
    """Map a trace to the shape of a model.

    Each new layer combines ``groups`` trace layers; group j has its share of the experts and takes its share
    of the ``top_k`` from the first ones that the trace lists. Experts of the trace are permuted at random,
    once for each layer and group, so no two layers are equal. If the trace has more experts than a group,
    they are folded; if it has fewer, some experts are never chosen.

    Args:
        trace: The recorded trace.
        layers: New number of expert layers.
        experts: New number of experts per layer.
        top_k: New number of experts per token.
        seed: Random seed of the permutations.

    Raises:
        UsageError: The new shape is impossible.
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
            # The distance of the groups shrinks each time the trace layers are used up, so that other layers
            # are combined.
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
    """Offsets of a layer's groups among the trace layers, at unequal distances.

    With equal distances (0, 6, 12, 18 of 24) layers 0 and 6 would combine the same four trace layers.
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
    """Map each token's choice ``chosen [tokens, k]`` in one trace layer to ``pick`` experts below ``size``.

    Returns int32 ``[tokens, pick]``, without repetitions, and the number of replaced choices.
    """
    permutation = generator.permutation(max(size, trace_experts)).astype(np.int32)
    if trace_experts <= size:
        return permutation[chosen[:, :pick]], 0
    folded = permutation[chosen] % size
    popular = np.argsort(-np.bincount(folded.reshape(-1), minlength=size), kind="stable")
    # Folding can map two of a token's experts to one. Repetitions are dropped and, if too few remain, the
    # layer's most popular experts are added, so that every token has `pick` different experts.
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
    """Describe the mapping, with its numbers."""
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
