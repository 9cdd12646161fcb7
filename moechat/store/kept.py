"""Decides whether a store keeps the encodings of its source's experts, or quantises them anew."""

from __future__ import annotations

from collections.abc import Sequence

from moechat import _native
from moechat.geometry import DEFAULT_BITS, KEEP, ExpertGeometry
from moechat.store.checkpoint import Checkpoint
from moechat.store.expert_refs import CheckpointPlan, ExpertLayerSource
from moechat.store.tensors import PackedFile


def kept_encodings(
    checkpoint: Checkpoint, experts: ExpertGeometry, layers: Sequence[ExpertLayerSource]
) -> tuple[tuple[tuple[str, str], ...], str]:
    """The encodings that a store can keep.

    Args:
        checkpoint: The source; only headers are read.
        experts: Shape of the experts.
        layers: The layers with experts.

    Returns:
        For every layer the encodings of gate and up and of down, or nothing; then, if experts are quantised
        but cannot be kept, why.
    """
    found: list[tuple[str, str]] = []
    quantised = False
    for layer in layers:
        names: dict[str, set[str | None]] = {"gate": set(), "up": set(), "down": set()}
        for expert in layer.experts:
            for name, ref in expert.matrices:
                names[name].add(checkpoint.encoding(ref))
        every = set().union(*names.values())
        quantised = quantised or every != {None}
        if None in every:
            refs = [ref for expert in layer.experts for _, ref in expert.matrices]
            other = next(ref.key for ref in refs if checkpoint.encoding(ref) is None)
            packed = checkpoint.tensors.unkept_type(other)
            if packed:
                return (), f"{checkpoint.place(other)} has type {packed}, which a store cannot keep"
            return (), f"{checkpoint.place(other)} has another type" if quantised else ""
        inputs = "gate and up" if names["up"] else "up"  # without a gate projection
        for name, kinds in ((inputs, names["gate"] | names["up"]), ("down", names["down"])):
            if len(kinds) > 1:
                types = " and ".join(sorted(str(kind).upper() for kind in kinds))
                return (), f"the {name} matrices of layer {layer.layer} are {types}"
        pair = (str(next(iter(names["gate"]))), str(next(iter(names["down"]))))
        unfit = _unfit(experts, pair)
        if unfit:
            return (), unfit
        found.append(pair)
    return tuple(found), ""


def _unfit(experts: ExpertGeometry, pair: tuple[str, str]) -> str:
    """Why sizes do not fit a pair of encodings; empty if they do."""
    try:
        _native.kept_layout(experts.hidden_size, experts.intermediate_size, *pair)
    except ValueError as error:
        return str(error)
    return ""


def may_be_kept(checkpoint: Checkpoint) -> bool:
    """Whether any tensor is quantised: then a store keeps its encoding, or there is a reason why not."""
    tensors = checkpoint.tensors
    if any(tensors.encoding(key) is not None for key in tensors):
        return True
    return any(isinstance(file, PackedFile) for file in tensors.files) and any(
        tensors.unkept_type(key) for key in tensors
    )


def choose_bits(wanted: int | None, plan: CheckpointPlan) -> tuple[int, str]:
    """The bits to convert with.

    Args:
        wanted: Bits of a weight that the user has given.
        plan: The experts of the source.

    Returns:
        ``wanted``, else :data:`moechat.geometry.KEEP` if possible, else 4; then a notice, empty if values do
        not change or the user has chosen the bits.
    """
    if wanted is not None:
        return wanted, ""
    if plan.kept:
        return KEEP, ""
    if plan.not_kept:
        return DEFAULT_BITS, (
            f"the experts are quantised again to {DEFAULT_BITS} bits, which loses some accuracy: "
            f"{plan.not_kept}"
        )
    return DEFAULT_BITS, ""
