"""Experts stored as linear layers of their own, in families whose published checkpoints stack them.

Quantisers take linear layers, so they unstack the experts of such families (Gemma 4, Qwen3-VL, Llama 4,
gpt-oss) and write ``experts.3.gate_proj.weight``, names that transformers has no rule for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from moechat.errors import CheckpointError
from moechat.models.skeleton import ExpertsModule, Skeleton
from moechat.store.expert_refs import ExpertLayerSource, ExpertRef, MatrixRef, VectorRef

_NAME = re.compile(r"(.+)\.(0|[1-9]\d{0,5})\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(weight|bias)")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def linear_experts(
    skeleton: Skeleton, unused: Iterable[str], mapped: Callable[[str], str | None]
) -> dict[str, ExpertLayerSource]:
    """The layers whose experts are linear layers, by the name of their module in the model.

    Args:
        skeleton: The model.
        unused: Checkpoint names that no rule of transformers uses.
        mapped: The model's parameter for a name in the checkpoint.

    Raises:
        CheckpointError: A matrix or bias of an expert is missing.
    """
    by_prefix: dict[str, dict[tuple[int, str, str], str]] = {}
    for key in unused:
        if match := _NAME.fullmatch(key):
            place = (int(match[2]), _PARTS[match[3]], match[4])
            by_prefix.setdefault(match[1], {})[place] = key
    found = {}
    entries = {f"{entry.name}.down_proj": entry for entry in skeleton.experts}
    for prefix, keys in by_prefix.items():
        entry = entries.get(mapped(f"{prefix}.down_proj") or "")
        if entry is not None:
            experts = tuple(_expert(entry, prefix, index, keys) for index in range(entry.num_experts))
            found[entry.name] = ExpertLayerSource(entry.layer, entry.name, experts)
    return found


def _expert(
    entry: ExpertsModule, prefix: str, index: int, keys: dict[tuple[int, str, str], str]
) -> ExpertRef:
    def key(part: str, kind: str) -> str:
        if (index, part, kind) not in keys:
            raise CheckpointError(
                f"expert {index} in {prefix} has no {kind} for its {part} projection",
                hint="take a complete copy of the checkpoint",
            )
        return keys[index, part, kind]

    def matrix(part: str, rows: int) -> MatrixRef:
        return MatrixRef(key(part, "weight"), None, 0, 1, rows)

    def bias(part: str, size: int) -> VectorRef | None:
        return VectorRef(key(part, "bias"), None, 0, 1, size) if entry.has_bias else None

    size, hidden, gated = entry.intermediate_size, entry.hidden_size, entry.gate.gated
    first = "gate" if gated else "up"  # see ExpertRef
    return ExpertRef(
        gate=matrix(first, size),
        up=matrix("up", size) if gated else None,
        down=matrix("down", hidden),
        gate_bias=bias(first, size),
        up_bias=bias("up", size) if gated else None,
        down_bias=bias("down", hidden),
    )
