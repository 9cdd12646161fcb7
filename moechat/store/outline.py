"""The files that a conversion will write, with their headers and sizes, checked before the first write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.geometry import ExpertGeometry, WeightType
from moechat.store.checkpoint import Checkpoint
from moechat.store.encoded_file import encodings_header, planned_dense
from moechat.store.expert_refs import CheckpointPlan, ExpertLayerSource, ExpertRef
from moechat.store.manifest import mtp_file
from moechat.store.safetensors_file import (
    DIRECT_IO_ALIGNMENT,
    DTYPE_BITS,
    PlannedTensor,
    build_header,
)
from moechat.store.store import DENSE_PREFIX, EXPERTS_TENSOR

DENSE_SHARD_BYTES = 2 << 30
_DENSE_ALIGNMENT = 64
_MAX_LAYER = 99_999
_SOURCE_DTYPE = {WeightType.BF16: "BF16", WeightType.FP16: "F16", WeightType.FP32: "F32"}


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that is copied unchanged."""

    name: str
    source: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A safetensors file with dense tensors, in the order of ``tensors``."""

    name: str
    tensors: tuple[PlannedTensor, ...]
    header: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertsFile:
    """A safetensors file with the routed experts of one layer; the header ends at a multiple of 4096."""

    name: str
    source: ExpertLayerSource
    header: bytes
    nbytes: int


PlannedFile = SideFile | DenseFile | ExpertsFile


@dataclass(frozen=True, slots=True)
class StoreOutline:
    """All files of a store except the manifest, in write order."""

    geometry: ExpertGeometry
    files: tuple[PlannedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def outline_store(checkpoint: Checkpoint, plan: CheckpointPlan, bits: int) -> StoreOutline:
    """Decide all files of the store and check every tensor that will be read, using only headers.

    Args:
        checkpoint: The source.
        plan: Its experts and dense tensors.
        bits: 2, 3, 4, 6, 8 or 16, or :data:`moechat.geometry.KEEP`.

    Raises:
        CheckpointError: Plan and tensors contradict each other; the message names the tensor.
        UnsupportedModelError: Experts have an element type that cannot be read, or cannot be kept.
        UsageError: ``bits`` or a size is out of range.
    """
    geometry = plan.geometry(bits)
    _check_plan(checkpoint, plan)
    for layer in plan.stored_layers:
        for expert in layer.experts:
            _check_expert(checkpoint, plan, expert, bits)
    side = {"config.json": (checkpoint.path / "config.json").resolve(), **checkpoint.tokenizer_files()}
    files: list[PlannedFile] = []
    for name, path in side.items():
        try:
            files.append(SideFile(name, path, path.stat().st_size))
        except OSError as problem:
            raise CheckpointError(f"{path} has vanished: {problem.strerror}") from problem
    files.extend(_dense_files(checkpoint, plan.dense_keys))
    header = experts_header(geometry)
    for layer in plan.stored_layers:
        size = len(header) + geometry.layer_bytes
        name = mtp_file(plan.mtp_ordinal) if layer is plan.mtp else experts_file_name(layer.layer)
        files.append(ExpertsFile(name, layer, header, size))
    return StoreOutline(geometry, tuple(files))


def experts_file_name(layer: int) -> str:
    """Name of the file with the routed experts of a decoder layer."""
    return f"experts-{layer:05d}.safetensors"


def dense_file_name(number: int) -> str:
    """Name of the ``number``-th file with dense tensors, counted from 1."""
    return f"{DENSE_PREFIX}{number:05d}.safetensors"


def experts_header(geometry: ExpertGeometry) -> bytes:
    """Header of every experts file of a store; its length is a multiple of 4096."""
    return build_header(
        [PlannedTensor(EXPERTS_TENSOR, "U8", geometry.layer_shape)], alignment=DIRECT_IO_ALIGNMENT
    )


def _check_plan(checkpoint: Checkpoint, plan: CheckpointPlan) -> None:
    indices = [layer.layer for layer in plan.stored_layers]
    if not indices or indices != sorted(set(indices)) or indices[0] < 0 or indices[-1] > _MAX_LAYER:
        raise CheckpointError(f"the expert layers {indices[:8]} are not ascending")
    for layer in plan.stored_layers:
        if len(layer.experts) != plan.experts.num_experts:
            raise CheckpointError(
                f"layer {layer.layer} has {len(layer.experts)} experts, the model {plan.experts.num_experts}"
            )
    if len(set(plan.dense_keys)) != len(plan.dense_keys):
        raise CheckpointError("a dense tensor is listed twice")
    both = plan.expert_tensors().intersection(plan.dense_keys)
    if both:
        raise CheckpointError(f"tensor {min(both)!r} is listed as dense and as an expert")
    for key in plan.dense_keys:
        checkpoint.info(key)


def _check_expert(checkpoint: Checkpoint, plan: CheckpointPlan, expert: ExpertRef, bits: int) -> None:
    hidden, intermediate = plan.experts.hidden_size, plan.experts.intermediate_size
    expected = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    for name, ref in expert.matrices:
        shape = checkpoint.matrix_shape(ref)
        if shape != expected[name]:
            raise CheckpointError(
                f"{checkpoint.place(ref.key)} has a {name} matrix {list(shape)}; the configuration says "
                f"{list(expected[name])}"
            )
        dtype = checkpoint.info(ref.key)[0]
        # 16-bit values are copied bit by bit, so another type would be misread or silently rounded.
        if bits == 16 and dtype != _SOURCE_DTYPE[plan.weight_type]:
            raise UnsupportedModelError(
                f"{checkpoint.place(ref.key)} is {dtype}, other experts are "
                f"{_SOURCE_DTYPE[plan.weight_type]}",
                hint="convert it with 8 bits or fewer",
            )
    for name, vector in expert.biases:
        if (vector is not None) != plan.experts.has_bias:
            found = "has" if vector is not None else "lacks"
            raise CheckpointError(
                f"the expert with {checkpoint.place(expert.gate.key)} {found} the {name} bias"
            )
        if vector is not None and checkpoint.vector_size(vector) != expected[name][0]:
            raise CheckpointError(
                f"{checkpoint.place(vector.key)} has a {name} bias of {vector.size} elements, not "
                f"{expected[name][0]}"
            )


def _dense_files(checkpoint: Checkpoint, keys: Iterable[str]) -> list[DenseFile]:
    shards: list[list[PlannedTensor]] = []
    room = 0
    for key in keys:
        tensor = planned_dense(checkpoint.tensors, key, *checkpoint.info(key))
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = DENSE_SHARD_BYTES
        shards[-1].append(tensor)
        room -= tensor.nbytes
    files: list[DenseFile] = []
    for number, tensors in enumerate(shards, start=1):
        # Widest elements first: every tensor is then aligned to its element size without gaps, which the
        # format forbids.
        tensors.sort(key=lambda tensor: -DTYPE_BITS[tensor.dtype])
        header = encodings_header(tensors, alignment=_DENSE_ALIGNMENT)
        size = len(header) + sum(tensor.nbytes for tensor in tensors)
        files.append(DenseFile(dense_file_name(number), tuple(tensors), header, size))
    return files
