"""Shapes of expert layers and of their blocks.

An expert ``y = W_down · (act(W_gate x) ⊙ W_up x)`` is cut into blocks of 64 intermediate neurons. Some
models have experts without a gate projection, ``y = W_down · act(W x)``; here ``W`` is called gate, and there
is no up.
``native/src/kernels/layout/block_layout.h`` defines the byte layout of a block record; this module takes its
sizes from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from moechat.errors import UsageError

if TYPE_CHECKING:
    from moechat import _native

BLOCK_NEURONS = 64
GROUP_SIZE = 64  # columns that are packed together
SUPPORTED_BITS = (2, 3, 4, 6, 8, 16)
MOST_HALVED_BITS = 4  # with them or fewer, both halves of such columns have a scale and a zero of their own
# Of kept encodings; manifests have them, and 6 was not there when the first were written.
_NOMINAL_BITS = (2, 3, 4, 8)
DEFAULT_BITS = 4  # of experts that are quantised
KEEP = 0  # in place of bits: the encodings that the source has
# Kept encodings that no GGUF file has: those of quantised safetensors.
CHECKPOINT_ENCODINGS = frozenset({"int4", "int4_32", "int8", "int8_32", "nvfp4", "fp8"})
# Those whose products are float32 on the CPU, which takes longer than with integers; of dense matrices only.
FLOAT_ENCODINGS = frozenset({"fp8"})
DENSE_BITS = (4, 6, 8, 16)  # of dense (non-expert) weights
AUTO_BITS = "auto"  # dense weights: chosen for each matrix
DenseBits = int | str  # one of DENSE_BITS, or AUTO_BITS
ACTIVATION_BITS = (8, 16, 32)  # of the activations that quantised weights are multiplied with
DEFAULT_ACTIVATION_BITS = 8
PLAIN_KV_BITS, PACKED_KV_BITS = KV_BITS = (16, 8)  # of keys and values: in the type of the model, or packed


def scale_columns(bits: int) -> int:
    """Columns that share a scale and a zero, at 8 bits or fewer."""
    return GROUP_SIZE // 2 if bits <= MOST_HALVED_BITS else GROUP_SIZE


def encodings_title(kept: Iterable[tuple[str, str]]) -> str:
    """The kept encodings of a model's layers for people, in the order of their names: ``Q4_K and Q6_K``."""
    names = sorted({name.upper() for pair in kept for name in pair})
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def nominal_bits(kept: Iterable[tuple[str, str]], *, gated: bool = True) -> int:
    """Bits whose kernels are about as fast as those of kept encodings; see :class:`ExpertGeometry`.

    Measured on CPUs; on a GPU it is assumed.

    Args:
        kept: Encodings of the input projections, and of down, of each layer.
        gated: Experts have two input projections, gate and up, not one.
    """
    from moechat import _native

    bits = {name: form[0] for name, form in _native.kept_encodings().items()}
    pairs = list(kept)
    inputs = 2 if gated else 1
    mean = sum(inputs * bits[first] + bits[down] for first, down in pairs) / ((inputs + 1) * len(pairs))
    return min(_NOMINAL_BITS, key=lambda b: abs(b - mean))


class Activation(StrEnum):
    """Activation functions of the kernels; the values are stored in manifests."""

    SILU = "silu"  # x · sigmoid(alpha · x)
    GELU = "gelu"  # exact, through erf
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"  # max(0, x)²


@dataclass(frozen=True)
class Gate:
    """The computation between the projections of an expert, elementwise.

    ``act(min(gate, limit)) · (clamp(up, -limit, limit) + offset)``. gpt-oss has alpha 1.702, limit 7 and
    offset 1; DeepSeek-V4 has a limit of 10; most families have none of them.

    Attributes:
        activation: ``act``.
        alpha: Slope of the sigmoid of ``SILU``.
        limit: Clamp, above 0; infinite: none.
        offset: Added to up.
        clamps_result: The limit applies to ``act(gate)``, not to gate.
        gated: Multiplied by up; else the first factor is all, as in experts without a gate projection.

    Raises:
        UsageError: A constant is out of range.
    """

    activation: Activation = Activation.SILU
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    clamps_result: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        nothing_added = self.gated or self.offset == 0
        if not self.limit > 0 or not math.isfinite(self.alpha + self.offset) or not nothing_added:
            raise UsageError(f"a gate with {self.to_json()} cannot be computed")

    @cached_property
    def native(self) -> _native.Gate:
        """The same for the native core."""
        from moechat import _native  # the command line reads SUPPORTED_BITS at every start

        constants = {name: value for name, value in vars(self).items() if name != "activation"}
        return _native.Gate(self.activation.value, **constants)

    def to_json(self) -> dict[str, Any]:
        """Values for a manifest, as JSON types; no clamp is a ``limit`` of ``None``."""
        values = {**asdict(self), "limit": None if math.isinf(self.limit) else self.limit}
        if self.gated:
            del values["gated"]  # as in manifests from before experts without gate projections
        return values

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Gate:
        """Inverse of :meth:`to_json`.

        Raises:
            UsageError: A constant is out of range.
            KeyError: A field is missing.
            TypeError: A field is unknown.
            ValueError: The activation is unknown.
        """
        limit = math.inf if data["limit"] is None else data["limit"]
        return cls(**{**data, "activation": Activation(data["activation"]), "limit": limit})


class WeightType(StrEnum):
    """Element type of unquantised expert weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@dataclass(frozen=True)
class ExpertGeometry:
    """Shape and encoding of every expert of a model.

    Attributes:
        hidden_size: Columns of gate and up, rows of down.
        intermediate_size: Neurons of one expert before padding to blocks of 64.
        num_experts: Experts in a layer.
        bits: 2, 3, 4, 6, 8 (quantised) or 16 (the checkpoint's values, not quantised). Of kept encodings the
            nearest of 2, 3, 4 and 8 to the mean bits of their codes: their kernels are about as fast, except
            for :attr:`grid_share`.
        weight_type: Element type of 16-bit records; ``BF16`` or ``FP16``. Ignored for quantised records.
        gate: The computation between the projections; of the first layer if they differ.
        has_bias: Gate, up and down carry biases.
        kept: For every expert layer the encodings of gate and up and of down, by the names of
            :func:`moechat._native.kept_encodings`, if the records keep the values of the source; else empty.
            The records of all layers have the size of the largest.
        layer_gates: For every expert layer its gate, if they differ; else empty.

    Raises:
        UsageError: A value is out of range.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    bits: int
    weight_type: WeightType = WeightType.BF16
    gate: Gate = field(default_factory=Gate)
    has_bias: bool = False
    kept: tuple[tuple[str, str], ...] = ()
    layer_gates: tuple[Gate, ...] = ()

    def __post_init__(self) -> None:
        if any(gate.gated != self.gate.gated for gate in self.layer_gates):
            raise UsageError("some layers have a gate projection, and others none")
        if self.bits not in SUPPORTED_BITS:
            raise UsageError(f"{self.bits} bits are not supported", hint=f"choose one of {SUPPORTED_BITS}")
        for name in ("hidden_size", "intermediate_size", "num_experts"):
            value = getattr(self, name)
            if not 0 < value <= 1 << 20:
                raise UsageError(f"{name} is {value}; it must be between 1 and {1 << 20}")
        if self.weight_type is WeightType.FP32:
            raise UsageError("16-bit records hold bf16 or fp16 values, not fp32")

    @cached_property
    def grid_share(self) -> float:
        """Share of the weights in encodings with grids, IQ1 to IQ3, which CPUs take longer to unpack."""
        if not self.kept:
            return 0.0
        from moechat import _native

        grids = {name for name in _native.kept_encodings() if _native.kept_form(name)["table"] == "grid"}
        inputs = 2 if self.gate.gated else 1
        found = sum(inputs * (first in grids) + (down in grids) for first, down in self.kept)
        return found / ((inputs + 1) * len(self.kept))

    @cached_property
    def layout(self) -> _native.BlockLayout:
        """Byte layout of one block record, as the native core computes it; of the first layer if they differ.

        Raises:
            UsageError: The sizes do not fit kept encodings.
        """
        from moechat import _native  # the command line reads SUPPORTED_BITS at every start

        if self.kept:
            return self.layouts[0]
        return _native.BlockLayout(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            bits=self.bits,
            fp16=self.weight_type is WeightType.FP16,
            has_bias=self.has_bias,
            gated=self.gate.gated,
        )

    @cached_property
    def layouts(self) -> tuple[_native.BlockLayout, ...]:
        """The layout of every expert layer; empty if all have :attr:`layout`."""
        from moechat import _native

        if not self.kept:
            return ()

        def made(pair: tuple[str, str], record_bytes: int) -> _native.BlockLayout:
            sizes = (self.hidden_size, self.intermediate_size)
            return _native.kept_layout(*sizes, *pair, self.has_bias, record_bytes, self.gate.gated)

        try:
            largest = max(made(pair, 0).record_bytes for pair in set(self.kept))
            by_pair = {pair: made(pair, largest) for pair in set(self.kept)}
        except ValueError as error:
            raise UsageError(f"the experts cannot be kept as they are: {error}") from error
        return tuple(by_pair[pair] for pair in self.kept)

    def layout_of(self, ordinal: int) -> _native.BlockLayout:
        """The layout of expert layer ``ordinal``, counted from 0."""
        return self.layouts[ordinal] if self.kept else self.layout

    def gate_of(self, ordinal: int) -> Gate:
        """The gate of expert layer ``ordinal``, counted from 0."""
        return self.layer_gates[ordinal] if self.layer_gates else self.gate

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, without biases and padding."""
        return (3 if self.gate.gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def expert_biases(self) -> int:
        """Biases of one expert."""
        inputs = (2 if self.gate.gated else 1) * self.intermediate_size
        return inputs + self.hidden_size if self.has_bias else 0

    @property
    def wanted(self) -> int:
        """The bits that a conversion is asked for to get this geometry: :attr:`bits`, or :data:`KEEP`."""
        return KEEP if self.kept else self.bits

    @property
    def title(self) -> str:
        """For people: ``4 bits``, or ``Q4_K and Q6_K``."""
        return encodings_title(self.kept) if self.kept else f"{self.bits} bits"

    @property
    def blocks_per_expert(self) -> int:
        """Blocks of 64 neurons in one expert, the last one padded with zero neurons."""
        return -(-self.intermediate_size // BLOCK_NEURONS)

    @property
    def record_bytes(self) -> int:
        """Bytes of one block record in the store, padding to 4 KiB included."""
        return self.layout.record_bytes

    @property
    def layer_shape(self) -> tuple[int, int, int]:
        """Shape ``[experts, blocks, record_bytes]`` of one layer's experts in the store, as bytes."""
        return self.num_experts, self.blocks_per_expert, self.record_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the store."""
        return self.blocks_per_expert * self.record_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's experts in the store."""
        return self.num_experts * self.expert_bytes

    def to_json(self) -> dict[str, Any]:
        """Values for a manifest, as JSON types."""
        values = {**asdict(self), "gate": self.gate.to_json()}
        kept, gates = values.pop("kept"), values.pop("layer_gates")
        if kept:
            values["kept"] = [list(pair) for pair in kept]
        if gates:
            values["layer_gates"] = [gate.to_json() for gate in self.layer_gates]
        return values

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ExpertGeometry:
        """Inverse of :meth:`to_json`.

        Raises:
            UsageError: A field is missing, unknown or out of range.
        """
        try:
            known = dict(data)
            known["weight_type"] = WeightType(known["weight_type"])
            known["gate"] = Gate.from_json(known["gate"]) if "gate" in known else _flat_gate(known)
            known["kept"] = tuple((str(gate_up), str(down)) for gate_up, down in known.get("kept", ()))
            known["layer_gates"] = tuple(Gate.from_json(gate) for gate in known.get("layer_gates", ()))
            return cls(**known)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"expert geometry is not readable: {error}") from error


def _flat_gate(data: dict[str, Any]) -> Gate:
    """Take the gate out of the fields of a manifest from before gates were composed."""
    name, alpha, limit = (data.pop(key) for key in ("activation", "alpha", "limit"))
    if name == "clamped_swiglu":
        return Gate(Activation.SILU, alpha, limit, offset=1.0)
    return Gate(Activation(name))
