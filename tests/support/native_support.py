"""Random experts, their records, and a float64 reference of what the kernels compute."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from places import SUPPORT, TESTS

from moechat import _native
from moechat.geometry import Activation, Gate

# Every activation, and each way to clamp, by name.
GATES = {kind.value: Gate(kind) for kind in Activation} | {
    "clamped": Gate(limit=1.5),
    "clamped_result": Gate(limit=1.5, clamps_result=True),
    "gpt_oss": Gate(alpha=1.702, limit=7.0, offset=1.0),
}
# Of the others, static needs ranks and belady the future.
POLICIES = tuple(name for name in _native.policy_names() if name not in ("static", "belady"))
ENCODINGS = ((2, False), (3, False), (4, False), (6, False), (8, False), (16, False), (16, True))

_erf = np.vectorize(math.erf, otypes=[np.float64])


def run_isa(code: str, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a child, with MOECHAT_ISA set to ``isa`` or removed."""
    env = {k: v for k, v in os.environ.items() if k != "MOECHAT_ISA"} | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(TESTS / "native")])
    }
    if isa is not None:
        env["MOECHAT_ISA"] = isa
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bfloat16 patterns, rounded to nearest even (finite values)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x))))


def activate(gate: Gate, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The gate in float64."""
    g, u = g.astype(np.float64), np.clip(u.astype(np.float64), -gate.limit, gate.limit)
    x = g if gate.clamps_result else np.minimum(g, gate.limit)
    acts = {
        Activation.SILU: lambda: x * sigmoid(gate.alpha * x),
        Activation.GELU: lambda: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
        Activation.GELU_TANH: lambda: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        Activation.RELU2: lambda: np.maximum(x, 0) ** 2,
    }
    active = acts[gate.activation]()
    return (np.minimum(active, gate.limit) if gate.clamps_result else active) * (u + gate.offset)


def random_expert(
    rng: np.random.Generator, hidden: int, neurons: int, bias: bool, spread: float = 0.1
) -> tuple[list[np.ndarray], tuple[np.ndarray, ...] | None]:
    matrices = [
        (rng.standard_normal(shape) * spread).astype(np.float32)
        for shape in ((neurons, hidden), (neurons, hidden), (hidden, neurons))
    ]
    biases = tuple(rng.standard_normal(size).astype(np.float32) for size in (neurons, neurons, hidden))
    return matrices, biases if bias else None


def empty_records(layout: _native.BlockLayout, experts: int | None = None) -> np.ndarray:
    """Records filled with a pattern, so that unwritten bytes show."""
    shape = (
        (layout.blocks, layout.record_bytes)
        if experts is None
        else (experts, layout.blocks, layout.record_bytes)
    )
    return np.full(shape, 0xA5, np.uint8)


def pack(
    layout: _native.BlockLayout, matrices: list[np.ndarray], biases: tuple[np.ndarray, ...] | None
) -> np.ndarray:
    records = empty_records(layout)
    _native.pack_expert(layout, *matrices, biases, records)
    return records


@dataclass
class Call:
    """One moe_forward call over random experts, tokens and router weights."""

    layout: _native.BlockLayout
    records: np.ndarray
    x: np.ndarray
    tokens_of: list[np.ndarray]
    weights_of: list[np.ndarray]
    entries: list[tuple[int, int]] = field(default_factory=list)  # (expert, block)

    @classmethod
    def random(
        cls,
        seed: int,
        hidden: int,
        neurons: int,
        bits: int,
        *,
        fp16: bool = False,
        bias: bool = False,
        tokens: int = 5,
        experts: int = 3,
    ) -> Call:
        rng = np.random.default_rng(seed)
        layout = _native.BlockLayout(hidden, neurons, bits, fp16, bias)
        records = empty_records(layout, experts)
        for expert in range(experts):
            matrices, biases = random_expert(rng, hidden, neurons, bias)
            _native.pack_expert(layout, *matrices, biases, records[expert])
        x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        counts = [int(rng.integers(0, tokens + 1)) for _ in range(experts)]
        counts[0] = tokens
        tokens_of = [rng.permutation(tokens)[:count].astype(np.int32) for count in counts]
        weights_of = [rng.random(count).astype(np.float32) for count in counts]
        entries = [(expert, block) for expert in range(experts) for block in range(layout.blocks)]
        return cls(layout, records, x, tokens_of, weights_of, entries)

    def arrays(self, entries: list[tuple[int, int]] | None = None) -> tuple[np.ndarray, ...]:
        chosen = self.entries if entries is None else entries
        starts = np.concatenate([[0], np.cumsum([len(t) for t in self.tokens_of])]).astype(np.int32)
        return (
            np.array([self.records[e, b].ctypes.data for e, b in chosen], np.uint64),
            np.array([b for _, b in chosen], np.int32),
            np.array([e for e, _ in chosen], np.int32),
            starts,
            np.concatenate(self.tokens_of),
            np.concatenate(self.weights_of),
        )

    def run(
        self, gate: str = "silu", *, cuts: list[int] | None = None, activation_bits: int = 16
    ) -> np.ndarray:
        """Output of the whole list, cut into several calls at the given positions."""
        out, native = np.zeros_like(self.x), replace(GATES[gate], gated=self.layout.gated).native
        bounds = [0, *sorted(cuts or []), len(self.entries)]
        for begin, end in pairwise(bounds):
            arrays = self.arrays(self.entries[begin:end])
            _native.moe_forward(self.layout, native, self.x, *arrays, out, activation_bits)
        return out

    def alone(self, token: int, gate: str = "silu", *, activation_bits: int = 16) -> np.ndarray:
        """Output of one token, computed in a call of its own."""
        tokens_of = [np.zeros(int((t == token).sum()), np.int32) for t in self.tokens_of]
        weights_of = [w[t == token] for t, w in zip(self.tokens_of, self.weights_of, strict=True)]
        single = Call(
            self.layout, self.records, self.x[token : token + 1], tokens_of, weights_of, self.entries
        )
        return single.run(gate, activation_bits=activation_bits)[0]

    def reference(self, gate: str) -> np.ndarray:
        """The same in float64 on the dequantised weights."""
        out = np.zeros(self.x.shape, np.float64)
        for expert, (tokens, weights) in enumerate(zip(self.tokens_of, self.weights_of, strict=True)):
            gates, ups, down, biases = _native.unpack_expert(self.layout, self.records[expert])
            rows = self.x[tokens].astype(np.float64)
            g, u = rows @ gates.T.astype(np.float64), rows @ ups.T.astype(np.float64)
            if biases is not None:
                g, u = g + biases[0], u + biases[1]
            y = activate(GATES[gate], g, u) @ down.T.astype(np.float64)
            if biases is not None:
                y = y + biases[2]
            out[tokens] += weights[:, None].astype(np.float64) * y
        return out


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(value - reference) / max(np.linalg.norm(reference), 1e-30))
