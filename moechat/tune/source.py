"""Opens the model to tune, and builds it with float weights: of a checkpoint, or dequantised from a store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import DoesNotFitError, UnsupportedModelError, UsageError, one_line
from moechat.hub.model_ref import ModelRef
from moechat.loading.model import Report
from moechat.loading.stores import open_store
from moechat.models.assets import load_tokenizer
from moechat.models.checkpoint_mapping import combine, map_keys
from moechat.models.dense import read_tensor
from moechat.models.quiet import without_warnings
from moechat.models.side_file_checks import read_generation_settings
from moechat.models.skeleton import ExpertsModule, Skeleton, build_skeleton, load_config
from moechat.store.checkpoint import Checkpoint
from moechat.store.checkpoint_files import read_config
from moechat.store.manifest import MANIFEST_NAME
from moechat.store.store import Store

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bits of a store that is made of a checkpoint whose weights are encoded: as exact as stores get.
_EXACT_BITS = 16
# Computes all experts of a layer with one call for each matrix, and has a gradient.
EXPERTS_IMPLEMENTATION = "grouped_mm"


@dataclass(frozen=True)
class TuneSource:
    """The model to tune.

    Attributes:
        name: To show.
        directory: Of its configuration, tokenizer and other side files.
        store: The store whose weights are dequantised; ``None`` for a checkpoint.
        fingerprint: Of all its weights.
        dtype: Type that the tuned checkpoint is written in.
    """

    name: str
    directory: Path
    store: Store | None
    fingerprint: str
    dtype: torch.dtype


def open_source(ref: ModelRef, report: Report) -> TuneSource:
    """Open a model; one whose weights are encoded in another way than a store's is converted first.

    Args:
        ref: The model.
        report: Receives the progress of converting and verifying.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    path = ref.checkpoint
    if path is not None and path.is_dir() and not _is_encoded(path):
        checkpoint = Checkpoint.open(path)
        return TuneSource(ref.name, path, None, checkpoint.fingerprint(), _dtype_of(path))
    store = open_store(ref, None if ref.store is not None else _EXACT_BITS, report)
    dtype = _DTYPES[store.manifest.source.weight_type]
    fingerprint = hashlib.sha256((store.path / MANIFEST_NAME).read_bytes()).hexdigest()
    return TuneSource(ref.name, store.path, store, fingerprint, dtype)


def load_source_tokenizer(source: TuneSource) -> Any:
    """The model's tokenizer.

    Raises:
        UsageError: It has none.
        UnsupportedModelError: It cannot be used.
    """
    tokenizer = load_tokenizer(source.directory)
    if tokenizer is None:
        raise UsageError(f"{source.name} has no tokenizer, so it cannot read the data")
    return tokenizer


def build_model(source: TuneSource, dtype: torch.dtype) -> tuple[Any, tuple[ExpertsModule, ...]]:
    """Build the model with its weights, on the CPU.

    Args:
        source: See :func:`open_source`.
        dtype: Type of all weights.

    Returns:
        The transformers model in training form, and its expert layers. The modules of these are those of a
        skeleton without weights; they have the same names.

    Raises:
        UnsupportedModelError: transformers cannot build it, or keeps its experts in another way.
        DoesNotFitError: The weights are larger than the free RAM.
    """
    with without_warnings():
        config = load_config(source.directory)
        skeleton = build_skeleton(config, torch.float32)
        _require_memory(source, skeleton, dtype)
        try:
            model = _with_weights(source, skeleton, dtype)
        except (DoesNotFitError, UnsupportedModelError):
            raise
        except Exception as error:  # depends on the family
            raise UnsupportedModelError(
                f"{source.name} cannot be built for training: {type(error).__name__}: {one_line(error)}"
            ) from error
    parameters = dict(model.named_parameters())
    for entry in skeleton.experts:
        for name in entry.parameter_names:
            if name not in parameters:
                raise UnsupportedModelError(
                    f"{source.name} cannot be tuned: as transformers builds it, it has no parameter {name}"
                )
    return model, skeleton.experts


def _with_weights(source: TuneSource, skeleton: Skeleton, dtype: torch.dtype) -> Any:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    options: dict[str, Any] = {
        "dtype": dtype,
        "experts_implementation": EXPERTS_IMPLEMENTATION,
        "trust_remote_code": False,
    }
    if source.store is None:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # the command shows its own
        read_generation_settings(source.directory)  # transformers reads them too
        return AutoModelForCausalLM.from_pretrained(
            str(source.directory), config=load_config(source.directory), local_files_only=True, **options
        )
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        load_config(source.directory), **options
    )
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, values in _dense_weights(source.store, skeleton):
            if name in parameters:
                parameters[name].copy_(values)
        for entry in skeleton.experts:
            for name, values in expert_weights(source.store, entry):
                parameters[name].copy_(values)
    model.tie_weights()
    return model


def _dense_weights(store: Store, skeleton: Skeleton) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights other than experts, by their name in the model."""
    for target in map_keys(skeleton, store.dense.keys())[0].values():
        tensors = {key: read_tensor(store.dense, key) for key in target.keys}
        yield from combine(target, tensors, skeleton.model).items()
        store.dense.release(target.keys)
    store.require_readable()


def expert_weights(store: Store, entry: ExpertsModule) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of a layer, dequantised.

    Args:
        store: The store.
        entry: The layer.

    Returns:
        Name in the model and float32 values of each parameter.
    """
    layout = store.geometry.layout
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for record in store.expert_layer(entry.layer):
        gate, up, down, biases = _native.unpack_expert(layout, record)
        inputs = _float(gate) if up is None else _joined(_float(gate), _float(up), entry.interleaved)
        parts[0].append(inputs.T if entry.transposed else inputs)
        parts[1].append(_float(down).T if entry.transposed else _float(down))
        if biases is not None:
            of_gate, of_up, of_down = biases
            both = of_gate if of_up is None else _joined(_float(of_gate), _float(of_up), entry.interleaved)
            parts[2].append(torch.as_tensor(both))
            parts[3].append(_float(of_down))
    store.require_readable()
    for name, values in zip(entry.parameter_names, parts, strict=False):
        yield name, torch.stack(values)


def _joined(gate: torch.Tensor, up: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Gate and up in the order of the fused parameter: one after the other, or their rows in turns."""
    if interleaved:
        return torch.stack([gate, up], 1).reshape(2 * len(gate), *gate.shape[1:])
    return torch.cat([gate, up])


def _float(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))


def _require_memory(source: TuneSource, skeleton: Skeleton, dtype: torch.dtype) -> None:
    needed = sum(tensor.numel() for tensor in skeleton.state.values()) * dtype.itemsize
    free = psutil.virtual_memory().available
    if needed > free:
        raise DoesNotFitError(
            f"tuning {source.name} needs {needed / 2**30:.1f} GiB of RAM for its weights alone; "
            f"{free / 2**30:.1f} GiB are free",
            hint="tune on a machine with more memory, and copy the tuned checkpoint here",
            least_bytes=needed,
        )


def _is_encoded(directory: Path) -> bool:
    config = read_config(directory)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get("quantization_config") is not None for part in parts)


def _dtype_of(directory: Path) -> torch.dtype:
    """Type that a checkpoint's configuration names; bf16 if it names none that can be written."""
    config = read_config(directory)
    named = config.get("dtype") or config.get("torch_dtype")
    found = getattr(torch, named, None) if isinstance(named, str) else None
    return found if isinstance(found, torch.dtype) and found in _DTYPES.values() else torch.bfloat16


@contextmanager
def memory_errors(hint: str) -> Iterator[None]:
    """Translate an allocation that fails, on a GPU or in RAM, into an error with a next step.

    Raises:
        DoesNotFitError: An allocation failed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(f"the GPU's memory is full: {one_line(error)}", hint=hint) from error
    except MemoryError as error:
        raise DoesNotFitError("there is not enough RAM", hint=hint) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise DoesNotFitError(f"there is not enough RAM: {one_line(error)}", hint=hint) from error
