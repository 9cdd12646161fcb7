"""Stores with random weights in the shape of a real model, for measurements without the model.

A synthetic store is complete, hashed and loaded like any other; only its text output is noise. Codes, scales
and zeros of quantised experts are drawn directly, such that weights have mean 0 and variance ``1 / inputs``
and activations stay finite. Embeddings that are not the head too have more, 1/4. With less, attention, which
adds nearly the same to every token, outweighs them, and routers choose the same quarter of the experts for
all tokens; now LRU finds about as many as in recorded routing.

To write as fast as the disk allows, a few random blocks are packed and experts are assembled from them, so
blocks repeat; experts with biases repeat as a whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import DoesNotFitError, StoreDamagedError, UsageError
from moechat.geometry import BLOCK_NEURONS, GROUP_SIZE, ExpertGeometry, scale_columns
from moechat.store.files import explained, format_bytes
from moechat.store.lock import exclusive_lock
from moechat.store.manifest import (
    MANIFEST_NAME,
    LayerRecord,
    Manifest,
    Quantisation,
    SourceRecord,
    build_versions,
    mtp_file,
)
from moechat.store.outline import dense_file_name, experts_file_name, experts_header
from moechat.store.progress import ConvertProgress, ProgressCallback
from moechat.store.quantizer import choose_solver, stored_scales
from moechat.store.safetensors_file import PlannedTensor, build_header
from moechat.store.store import Store
from moechat.store.workspace import Workspace, lock_path, remove_leftovers

_POOL_EXPERTS = 2
_POOL_BLOCKS = 48
_DENSE_POOL = 1 << 22
_CONFIG = "config.json"
_DISK_SLACK = 1 << 20
# The variance of embeddings is one by this; see the module.
_EMBEDDING_INPUTS = 4
_WHOLE_BF16 = 257  # numbers from 0 on that bf16 holds exactly


@dataclass(frozen=True)
class SyntheticModel:
    """Content of a synthetic store.

    Attributes:
        name: Name to show.
        config: Content of ``config.json``; a transformers configuration.
        geometry: Shape and encoding of the experts.
        layers: Decoder layer index and name of the experts module of each expert layer, ascending.
        dense: Shapes of all other weights by name, as the model's state dict has them.
        seed: Random seed of the weights.
        chosen: Names of the weights among ``dense`` that are no numbers to multiply with but experts chosen
            for a token, one row for each.
        mtp: There is a head for multi-token prediction, whose other weights are in ``dense``.
    """

    name: str
    config: Mapping[str, Any]
    geometry: ExpertGeometry
    layers: Sequence[tuple[int, str]]
    dense: Mapping[str, tuple[int, ...]]
    seed: int = 0
    chosen: frozenset[str] = frozenset()
    mtp: bool = False

    @property
    def fingerprint(self) -> str:
        """Hash of all fields but the name."""
        parts = [
            "synthetic 2",
            dict(self.config),
            self.geometry.to_json(),
            list(self.layers),
            {name: list(shape) for name, shape in self.dense.items()},
            self.seed,
            *sorted(self.chosen),
            *(["mtp"] if self.mtp else []),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return (len(self.layers) + self.mtp) * self.geometry.layer_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of all other weights; they are stored as bf16."""
        return sum(2 * int(np.prod(shape, dtype=np.int64)) for shape in self.dense.values())


def write_synthetic_store(
    model: SyntheticModel, destination: Path, *, progress: ProgressCallback | None = None
) -> Store:
    """Write the store of ``model`` to ``destination``, replacing a store of other content; the same is kept.

    Args:
        model: Content of the store.
        destination: Directory of the store; its parent is created.
        progress: Called after every expert and every few MiB; it may raise ``KeyboardInterrupt``.

    Returns:
        The open store.

    Raises:
        DoesNotFitError: The disk is too small, or became full.
        UsageError: ``destination`` exists and is not a store.
        MoechatError: A file system operation failed.
    """
    destination = Path(destination)
    with explained("writing a synthetic store", destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(lock_path(destination)):
            finished = _finished(model, destination)
            if finished is not None:
                remove_leftovers(destination)
                return finished
            needed = model.expert_bytes + model.dense_bytes + _DISK_SLACK
            free = shutil.disk_usage(destination.parent).free
            if needed > free:
                raise DoesNotFitError(
                    f"a synthetic store needs {format_bytes(needed)} on the disk of {destination.parent}, "
                    f"{format_bytes(free)} are free",
                    hint="use fewer layers",
                )
            workspace = Workspace(destination, model.fingerprint)
            workspace.discard()  # rewriting is faster than checking finished files
            workspace = Workspace(destination, model.fingerprint)
            try:
                layers = _Writer(model, workspace, progress).write()
            except DoesNotFitError:
                workspace.discard()
                raise
            workspace.publish(MANIFEST_NAME, _manifest(model, layers, workspace).to_bytes())
            return Store.open(destination)


def _finished(model: SyntheticModel, destination: Path) -> Store | None:
    if not destination.exists():
        return None
    if not destination.is_dir() or (
        any(destination.iterdir()) and not (destination / MANIFEST_NAME).is_file()
    ):
        raise UsageError(f"{destination} exists and is not a store", hint="choose another directory")
    try:
        store = Store.open(destination)
    except StoreDamagedError:
        return None
    return store if store.manifest.source.fingerprint == model.fingerprint else None


class _Writer:
    """Writes the files of one store into a workspace."""

    def __init__(
        self, model: SyntheticModel, workspace: Workspace, progress: ProgressCallback | None
    ) -> None:
        self._model = model
        self._workspace = workspace
        self._progress = progress
        self._generator = np.random.default_rng(model.seed)
        untied = any(name.endswith("lm_head.weight") for name in model.dense)
        embeddings = [name for name in model.dense if name.endswith("embed_tokens.weight")]
        self._embedding = embeddings[0] if untied and embeddings else None
        self._total = model.expert_bytes + model.dense_bytes
        self._done = 0

    def write(self) -> list[LayerRecord]:
        model = self._model
        with self._workspace.create(_CONFIG) as file:
            file.write(json.dumps(dict(model.config), indent=1, sort_keys=True).encode())
            self._workspace.record(_CONFIG, *file.commit())
        self._write_dense(dense_file_name(1))
        pool = _ExpertPool(model.geometry, self._generator)
        records = []
        for layer, module in model.layers:
            name = experts_file_name(layer)
            self._write_experts(name, f"layer {layer}", pool)
            records.append(LayerRecord(layer, module, name))
        if model.mtp:
            self._write_experts(mtp_file(0), "multi-token prediction", pool)
        return records

    def _write_experts(self, name: str, title: str, pool: _ExpertPool) -> None:
        geometry = self._model.geometry
        with self._workspace.create(name) as file:
            file.write(experts_header(geometry))
            for number in range(geometry.num_experts):
                file.write(pool.draw())
                self._advance(geometry.expert_bytes, f"{title}, expert {number + 1}")
            self._workspace.record(name, *file.commit())

    def _write_dense(self, name: str) -> None:
        tensors = [PlannedTensor(key, "BF16", tuple(shape)) for key, shape in self._model.dense.items()]
        pool = self._generator.standard_normal(_DENSE_POOL, dtype=np.float32)
        scaled: dict[int, npt.NDArray[np.uint16]] = {}
        with self._workspace.create(name) as file:
            file.write(build_header(tensors, alignment=64))
            for tensor in tensors:
                left = int(np.prod(tensor.shape, dtype=np.int64))
                if len(tensor.shape) < 2:
                    # Norm weights and scales are 1; biases and router corrections are 0.
                    value = 1.0 if any(word in tensor.name for word in ("norm", "scal")) else 0.0
                    file.write(_bf16(np.full(left, value, dtype=np.float32)))
                    continue
                if tensor.name in self._model.chosen:
                    file.write(_bf16(self._experts_of_tokens(tensor.shape)))
                    self._advance(2 * left, tensor.name)
                    continue
                fan_in = int(np.prod(tensor.shape[1:], dtype=np.int64))
                inputs = _EMBEDDING_INPUTS if tensor.name == self._embedding else fan_in
                if inputs not in scaled:
                    scaled[inputs] = _bf16(pool * np.float32(inputs**-0.5))
                source = scaled[inputs]
                at = int(self._generator.integers(len(source)))
                while left:
                    part = source[at : at + left]
                    file.write(part)
                    self._advance(part.nbytes, tensor.name)
                    left -= len(part)
                    at = 0
            self._workspace.record(name, *file.commit())

    def _experts_of_tokens(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Different experts in every row, each a whole number that bf16 can hold."""
        experts = min(self._model.geometry.num_experts, _WHOLE_BF16)
        first = self._generator.integers(experts, size=(*shape[:-1], 1))
        return ((first + np.arange(shape[-1])) % experts).astype(np.float32)

    def _advance(self, size: int, detail: str) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(ConvertProgress("synthetic", self._done, self._total, detail))


class _ExpertPool:
    """Draws random experts from a few packed ones.

    If blocks are interchangeable (all full, none with biases), an expert is a random choice of pool blocks,
    else a whole expert of the pool.
    """

    def __init__(self, geometry: ExpertGeometry, generator: np.random.Generator) -> None:
        self._generator = generator
        self._blocks = geometry.blocks_per_expert
        self._interchangeable = not geometry.has_bias and geometry.intermediate_size % BLOCK_NEURONS == 0
        if self._interchangeable:
            pool = replace(geometry, intermediate_size=_POOL_BLOCKS * BLOCK_NEURONS)
            self._records = [_packed(pool, geometry.intermediate_size, generator)]
        else:
            self._records = [
                _packed(geometry, geometry.intermediate_size, generator) for _ in range(_POOL_EXPERTS)
            ]

    def draw(self) -> npt.NDArray[np.uint8]:
        """One expert, ``[blocks, record_bytes]``."""
        if not self._interchangeable:
            return self._records[int(self._generator.integers(len(self._records)))]
        (blocks,) = self._records
        chosen: npt.NDArray[np.uint8] = blocks[self._generator.integers(len(blocks), size=self._blocks)]
        return chosen


def _packed(geometry: ExpertGeometry, fan_in: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """One random expert as records ``[blocks, record_bytes]``; down weights have variance ``1 / fan_in``."""
    out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), dtype=np.uint8)
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    biases = None
    if geometry.has_bias:
        gate, up, down = (
            np.float32(0.02) * generator.standard_normal(size, dtype=np.float32)
            for size in (inner, inner, hidden)
        )
        biases = (gate, up, down)
    into, out_of = ((inner, hidden), hidden), ((hidden, inner), fan_in)
    # Without a gate projection the only one into the neurons is called gate, and there is no up.
    gated = geometry.gate.gated
    if geometry.bits == 16:
        weights, others = _values(*into, generator), _values(*into, generator) if gated else None
        _native.pack_expert(geometry.layout, weights, others, _values(*out_of, generator), biases, out)
        return out
    bits = geometry.bits
    coded = _codes(bits, *into, generator)
    up_coded, up_scales = _codes(bits, *into, generator) if gated else (None, None)
    down_coded = _codes(bits, *out_of, generator)
    _native.pack_quantized(geometry.layout, *coded, up_coded, up_scales, *down_coded, biases, out)
    return out


def _values(shape: tuple[int, int], inputs: int, generator: np.random.Generator) -> npt.NDArray[np.float32]:
    """Random weights of variance ``1 / inputs``."""
    values: npt.NDArray[np.float32] = generator.standard_normal(shape, dtype=np.float32)
    return values * np.float32(inputs**-0.5)


def _codes(
    bits: int, shape: tuple[int, int], inputs: int, generator: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Random codes ``[rows, columns]`` and scales ``[rows, groups]``; weight variance ``1 / inputs``."""
    rows, columns = shape
    levels = 1 << bits
    groups = -(-columns // GROUP_SIZE)
    parts = (rows, groups * GROUP_SIZE // scale_columns(bits))
    codes = generator.integers(0, levels, size=(rows, columns), dtype=np.uint8)
    spread = ((levels * levels - 1) / 12) ** 0.5  # of a uniform code
    scales = generator.uniform(0.75, 1.25, size=parts) / (spread * inputs**0.5)
    zeros = (levels - 1) / 2 + generator.uniform(-0.25, 0.25, size=parts)
    return codes, stored_scales(bits, scales.astype(np.float32), zeros.astype(np.float32))[0]


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite values to bf16 bit patterns, to nearest even."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _manifest(model: SyntheticModel, layers: list[LayerRecord], workspace: Workspace) -> Manifest:
    return Manifest(
        source=SourceRecord(model.name, None, model.fingerprint, model.geometry.weight_type),
        created_by=build_versions(),
        model_type=str(model.config["model_type"]),
        geometry=model.geometry,
        layers=tuple(layers),
        quantisation=Quantisation.of(model.geometry, choose_solver("auto", model.geometry.bits)),
        files=dict(workspace.finished),
    )
