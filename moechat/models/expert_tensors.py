"""Experts whose matrices a checkpoint names one by one, whatever the model's parameters are.

GGUF files are opened under such names: ``experts.LAYER.EXPERT.PART.weight`` and ``.bias``, where PART is
gate, up, down, or gate_up for both, gate's rows first. Without a gate projection there are up and down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moechat.errors import CheckpointError
from moechat.models.skeleton import ExpertsModule
from moechat.store.checkpoint import Checkpoint
from moechat.store.expert_refs import ExpertLayerSource, ExpertRef, MatrixRef, VectorRef

_NAME = re.compile(r"experts\.\d+\.\d+\.(gate|up|down|gate_up)\.(weight|bias)")


def expert_name(layer: int, expert: int, part: str, kind: str) -> str:
    """Name of a tensor: ``part`` is gate, up, down or gate_up, ``kind`` weight or bias."""
    return f"experts.{layer}.{expert}.{part}.{kind}"


def named_experts(keys: Iterable[str]) -> frozenset[str]:
    """Those of the names that are names of single matrices or biases of experts."""
    return frozenset(key for key in keys if _NAME.fullmatch(key))


def plan_named_layer(
    entry: ExpertsModule, names: frozenset[str], checkpoint: Checkpoint
) -> ExpertLayerSource:
    """Where the experts of a layer are.

    Raises:
        CheckpointError: A tensor is missing, or has another shape than the configuration says.
    """
    size, hidden = entry.intermediate_size, entry.hidden_size
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    # By their names in the reference; see ExpertRef.
    parts = (
        {"gate": "gate", "up": "up", "down": "down"} if entry.gate.gated else {"up": "gate", "down": "down"}
    )
    experts = []
    for expert in range(entry.num_experts):
        refs: dict[str, MatrixRef | VectorRef | None] = {"up": None}
        for part, name in parts.items():
            key, start = _place(entry, names, checkpoint, expert, part, "weight")
            refs[name] = matrix = MatrixRef(key, None, start, 1, shapes[part][0])
            whole = checkpoint.info(key)[1]
            rows = shapes[part][0] * (2 if key.endswith("gate_up.weight") else 1)
            if tuple(whole) != (rows, shapes[part][1]):
                raise CheckpointError(
                    f"{checkpoint.place(key)} has experts of shape {list(whole)}; the configuration says "
                    f"{[rows, shapes[part][1]]}"
                )
            if entry.has_bias:
                key, start = _place(entry, names, checkpoint, expert, part, "bias")
                refs[f"{name}_bias"] = VectorRef(key, None, start, 1, matrix.rows)
        experts.append(ExpertRef(**refs))  # type: ignore[arg-type]
    return ExpertLayerSource(layer=entry.layer, module=entry.name, experts=tuple(experts))


def _place(
    entry: ExpertsModule, names: frozenset[str], checkpoint: Checkpoint, expert: int, part: str, kind: str
) -> tuple[str, int]:
    """Name of the tensor that holds a part, and the part's first row in it."""
    key = expert_name(entry.layer, expert, part, kind)
    if key in names:
        return key, 0
    fused = expert_name(entry.layer, expert, "gate_up", kind)
    if entry.gate.gated and part != "down" and fused in names:
        return fused, entry.intermediate_size if part == "up" else 0
    raise CheckpointError(
        f"{checkpoint.title} lacks the {kind} {part!r} of expert {expert} in layer {entry.layer}",
        hint="download or copy the file again",
    )
