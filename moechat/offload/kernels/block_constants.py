"""Compile-time parameters of the kernels over the blocks of an expert layer."""

from __future__ import annotations

import math
from typing import Any

from moechat import _native
from moechat.geometry import Activation, ExpertGeometry, Gate
from moechat.offload.kernels import triton_blocks
from moechat.offload.kernels.kept_form import kept_constants

_ACTIVATIONS = {
    Activation.SILU: triton_blocks.SILU,
    Activation.GELU: triton_blocks.GELU,
    Activation.GELU_TANH: triton_blocks.GELU_TANH,
    Activation.RELU2: triton_blocks.RELU2,
}
# A block has one group of down's columns, so its super field is not shared.
_NOT_OF_DOWN = ("SHARED",)


class BlockConstants:
    """Compile-time parameters of an expert layer's kernels.

    Args:
        geometry: Shape and encodings of the experts.
        ordinal: Number among the expert layers.

    Attributes:
        inner: Of gate, up and the activation.
        outer: Of down.
        both: Of all projections.
    """

    def __init__(self, geometry: ExpertGeometry, ordinal: int) -> None:
        layout = geometry.layout_of(ordinal)
        gate = geometry.gate_of(ordinal)
        gated = layout.gated
        self.both: dict[str, Any] = {"RECORD": layout.record_bytes, "HAS_BIAS": geometry.has_bias}
        # If not gated, some kernels read gate in place of up, and drop the result.
        self.inner: dict[str, Any] = {
            "GATE": layout.gate_q,
            "GATE_SZ": max(layout.gate_sz, 0),
            "GATE_BIAS": max(layout.gate_bias, 0),
            "UP": layout.up_q if gated else layout.gate_q,
            "UP_SZ": max(layout.up_sz if gated else layout.gate_sz, 0),
            "UP_BIAS": max(layout.up_bias if gated else layout.gate_bias, 0),
            "GATED": gated,
            **_gate_constants(gate),
        }
        self.outer: dict[str, Any] = {
            "BLOCKS": geometry.blocks_per_expert,
            "DOWN": layout.down_q,
            "DOWN_SZ": max(layout.down_sz, 0),
            "DOWN_BIAS": max(layout.down_bias, 0),
            "BIAS_ROWS": max(layout.down_bias_rows, 1),
        }
        if geometry.kept:
            self._add_encodings(layout, *geometry.kept[ordinal])
        else:
            self.both |= {
                "GROUP_BYTES": 128 * geometry.bits,
                "BITS": geometry.bits,
                "FP16": bool(layout.fp16),
            }

    def _add_encodings(self, layout: _native.BlockLayout, gate_up: str, down: str) -> None:
        supers = max(layout.gate_super, 0)
        self.inner |= {
            "GATE_SUPER": supers,
            "UP_SUPER": max(layout.up_super, 0) if layout.gated else supers,
            **kept_constants(gate_up),
        }
        self.outer |= {
            "DOWN_SUPER": max(layout.down_super, 0),
            **{f"DOWN_{name}": v for name, v in kept_constants(down).items() if name not in _NOT_OF_DOWN},
        }


def _gate_constants(gate: Gate) -> dict[str, Any]:
    clamp = 2 if gate.clamps_result else 1
    return {
        "ACTIVATION": _ACTIVATIONS[gate.activation],
        "CLAMP": clamp if gate.limit < math.inf else 0,
        "OFFSET": gate.offset,
    }
