"""Locations of experts in a checkpoint: plain descriptions, built by ``moechat.models`` for the store.

Nothing here opens a file. A :class:`MatrixRef` names the tensor of a matrix and the rows to take;
:class:`moechat.store.checkpoint.Checkpoint` checks the shapes against the real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.geometry import KEEP, ExpertGeometry, WeightType, nominal_bits


@dataclass(frozen=True, slots=True)
class MatrixRef:
    """One weight matrix ``[rows, cols]`` inside a checkpoint, row = output neuron.

    With ``T = tensor`` (``expert is None``) or ``T = tensor[expert]``, then ``T = T.T`` if ``transposed``,
    the matrix is ``T[start : start + step * rows : step, :]``.

    Attributes:
        key: Tensor name.
        expert: Index in dimension 0 of a 3-D tensor, or ``None`` for a 2-D tensor that belongs to one expert.
        start: First row taken.
        step: Distance between rows taken; 2 if gate and up are interleaved.
        rows: Number of rows taken.
        transposed: The tensor holds the matrix as ``[cols, rows]``.

    Raises:
        CheckpointError: A value is invalid for any tensor.
    """

    key: str
    expert: int | None
    start: int
    step: int
    rows: int
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.start < 0 or self.step < 1 or self.rows < 1 or (self.expert is not None and self.expert < 0):
            raise CheckpointError(
                f"{self.key!r}[{self.expert}]: rows {self.start}:+{self.step}x{self.rows} are not valid"
            )

    @property
    def taken(self) -> slice:
        """The rows taken; ``stop - 1`` is the last."""
        return slice(self.start, self.start + self.step * (self.rows - 1) + 1, self.step)


@dataclass(frozen=True, slots=True)
class VectorRef:
    """One bias ``T[start : start + step * size : step]`` with ``T = tensor`` or ``T = tensor[expert]``.

    Raises:
        CheckpointError: A value is invalid for any tensor.
    """

    key: str
    expert: int | None
    start: int
    step: int
    size: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.step < 1 or self.size < 1 or (self.expert is not None and self.expert < 0):
            raise CheckpointError(
                f"{self.key!r}[{self.expert}]: elements {self.start}:+{self.step}x{self.size} are not valid"
            )

    @property
    def taken(self) -> slice:
        """The elements taken; ``stop - 1`` is the last."""
        return slice(self.start, self.start + self.step * (self.size - 1) + 1, self.step)


@dataclass(frozen=True, slots=True)
class ExpertRef:
    """One expert: gate and up ``[intermediate, hidden]``, down ``[hidden, intermediate]``, biases or none.

    Without a gate projection, the only input projection is called gate, and up is ``None``.
    """

    gate: MatrixRef
    up: MatrixRef | None
    down: MatrixRef
    gate_bias: VectorRef | None = None
    up_bias: VectorRef | None = None
    down_bias: VectorRef | None = None

    @property
    def matrices(self) -> tuple[tuple[str, MatrixRef], ...]:
        """``("gate", ref), ("up", ref), ("down", ref)``, as far as they exist."""
        up = () if self.up is None else (("up", self.up),)
        return (("gate", self.gate), *up, ("down", self.down))

    @property
    def biases(self) -> tuple[tuple[str, VectorRef | None], ...]:
        """``("gate", ref), ("up", ref), ("down", ref)`` of the matrices that exist."""
        found = {"gate": self.gate_bias, "up": self.up_bias, "down": self.down_bias}
        return tuple((name, found[name]) for name, _ in self.matrices)

    def tensors(self) -> Iterator[str]:
        """Names of all tensors that this expert is read from, with repetitions."""
        for _, matrix in self.matrices:
            yield matrix.key
        for _, vector in self.biases:
            if vector is not None:
                yield vector.key


@dataclass(frozen=True, slots=True)
class ExpertLayerSource:
    """The routed experts of one decoder layer.

    Attributes:
        layer: Decoder layer index.
        module: Name of the experts module in the transformers model, ``model.layers.3.mlp.experts``.
        experts: One entry for each expert, in router order.
    """

    layer: int
    module: str
    experts: tuple[ExpertRef, ...]


@dataclass(frozen=True)
class CheckpointPlan:
    """Content of a checkpoint, as its model family defines it.

    Attributes:
        model_type: ``config.model_type`` of transformers.
        experts: Shape of the routed experts of every expert layer, at 16 bits. Every expert has all three
            biases, or none has any.
        weight_type: Element type of the expert tensors in the checkpoint, quantised ones decoded.
        layers: Layers with routed experts, ascending; need not be all layers.
        dense_keys: Tensors that are not routed experts, copied unchanged.
        read_before: For each of ``layers``, the dense tensors that a pass of the model reads before its
            experts and did not read before those of earlier layers; empty if such a pass is not known.
        kept: For each of ``layers`` the encodings of gate and up and of down, if a store can keep them; see
            :attr:`ExpertGeometry.kept`.
        not_kept: Why experts that are quantised cannot be kept; empty if they can, or are not quantised.
        mtp: The experts of the head for multi-token prediction; ``None``: there is none. Its other tensors
            are among ``dense_keys``.
        mtp_ordinal: Number among ``layers`` of one whose kept encodings the head has.
    """

    model_type: str
    experts: ExpertGeometry
    weight_type: WeightType
    layers: tuple[ExpertLayerSource, ...]
    dense_keys: tuple[str, ...]
    read_before: tuple[tuple[str, ...], ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    not_kept: str = ""
    mtp: ExpertLayerSource | None = None
    mtp_ordinal: int = 0

    @property
    def stored_layers(self) -> tuple[ExpertLayerSource, ...]:
        """All layers whose experts a store holds: ``layers``, then that of the head."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)

    def reads_by_layer(self) -> dict[int, frozenset[str]]:
        """By decoder layer with experts, all dense tensors that a pass reads up to its experts."""
        so_far: frozenset[str] = frozenset()
        found = {}
        for layer, keys in zip(self.layers, self.read_before, strict=True):
            found[layer.layer] = so_far = so_far.union(keys)
        return found

    def geometry(self, bits: int) -> ExpertGeometry:
        """Geometry of the store with ``bits`` bits; at 16 bits fp32 weights become bf16.

        Args:
            bits: Bits of a weight, or :data:`moechat.geometry.KEEP`.

        Raises:
            UsageError: ``bits`` is not supported.
            UnsupportedModelError: The encodings of the source are to be kept, and cannot be.
        """
        if bits == KEEP:
            if not self.kept:
                raise UnsupportedModelError(
                    f"the experts cannot be kept as they are: {self.not_kept or 'they are not quantised'}"
                )
            return replace(
                self.experts, bits=nominal_bits(self.kept, gated=self.experts.gate.gated), kept=self.kept
            )
        return replace(self.experts, bits=bits)

    def expert_tensors(self) -> frozenset[str]:
        """Names of all tensors that hold routed experts."""
        return frozenset(
            key for layer in self.stored_layers for expert in layer.experts for key in expert.tensors()
        )
