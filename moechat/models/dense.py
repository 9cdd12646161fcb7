"""Loads the dense weights of a model (all but the routed experts) into a skeleton."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from moechat.errors import CheckpointError
from moechat.models.checkpoint_mapping import READABLE_TYPES, combine, map_keys, missing_dense
from moechat.models.dense_form import HALVES, DenseForm, packed_bytes
from moechat.models.light_meta import light_meta
from moechat.models.linear import StoredEmbedding, StoredLinear
from moechat.models.skeleton import Skeleton


class TensorHeaders(Protocol):
    """Names, types and shapes of a set of tensors."""

    def keys(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors type name and shape."""
        ...


class HeaderTable(dict[str, tuple[str, tuple[int, ...]]]):
    """Headers in memory: type and shape by name. A :class:`TensorHeaders`."""

    @classmethod
    def of(cls, source: TensorHeaders) -> HeaderTable:
        """A copy that outlives the files of its source."""
        return cls({key: source.info(key) for key in source.keys()})  # noqa: SIM118 - no mapping

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Safetensors type name and shape."""
        return self[key]


class TensorSource(TensorHeaders, Protocol):
    """Named tensors on disk: a checkpoint or a store's dense files."""

    def array(self, key: str) -> np.ndarray[Any, Any]:
        """Read-only values, mapped from the file; bf16 as uint16."""
        ...

    def release(self, names: Iterable[str]) -> None:
        """Drop the mapped pages of tensors from this process; views that remain read them again."""
        ...


def read_tensor(source: TensorSource, key: str) -> torch.Tensor:
    """A read-only torch view of one tensor, without a copy.

    Raises:
        CheckpointError: The element type is not supported.
    """
    dtype, shape = _type_and_shape(source, key)
    array = source.array(key)
    if array.size == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # The mapping is read-only deliberately; nothing writes through the tensor.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.frombuffer(array.data, dtype=dtype)
    return flat.reshape(shape)


def _type_and_shape(source: TensorHeaders, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = source.info(key)
    if dtype not in READABLE_TYPES:
        raise CheckpointError(f"dense tensor {key!r} has type {dtype}, which moechat does not read")
    return READABLE_TYPES[dtype], shape


def stored_types(skeleton: Skeleton, source: TensorHeaders) -> dict[str, torch.dtype]:
    """Stored type of each weight of a model; weights made from several types are left out.

    Raises:
        CheckpointError: A weight's type is not supported.
    """
    found = {}
    for target in map_keys(skeleton, source.keys())[0].values():
        kinds = {_type_and_shape(source, key)[0] for key in target.keys}
        if len(kinds) == 1:
            found[target.name] = kinds.pop()
    return found


def loading_bytes(skeleton: Skeleton, source: TensorHeaders, form: DenseForm | None = None) -> int:
    """Largest temporary memory of :func:`load_dense`, besides the loaded weights.

    Weights are loaded one at a time. A weight used as stored needs no more. For one in another type or form,
    the mapped pages of its source count until they are released. For a rule that combines sources, its result
    in the type of the source counts too, and the input of its last step if it has several.

    Raises:
        CheckpointError: A weight's type is not supported.
    """
    expert_names = skeleton.expert_names
    targets, _ = map_keys(skeleton, source.keys())
    kept = frozenset() if form is None else form.kept
    packed = set() if form is None or not form.packs else {f"{name}.weight" for name in form.linears}
    most = 0
    for target in targets.values():
        if target.name in expert_names:
            continue
        infos = [_type_and_shape(source, key) for key in target.keys]
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in infos)
        reference = skeleton.state.get(target.name)
        if target.converter is not None:
            size *= 1 + min(2, max(1, len(target.converter.operations)))
        elif reference is not None:
            wanted = reference.dtype
            if reference.is_floating_point():
                wanted = _wanted_type(skeleton.model, target.name, wanted)
            as_it_is = target.name in kept or all(dtype == wanted for dtype, _ in infos)
            if form is not None and target.name in packed:
                parts = form.parts_of(target.name.removesuffix(".weight"))
                size += sum(packed_bytes(*part) for part in parts)
            elif as_it_is:
                size = 0
        most = max(most, size)
    return most


def load_dense(skeleton: Skeleton, source: TensorSource, form: DenseForm | None = None) -> None:
    """Load the dense weights of ``source`` into the skeleton and make the model ready to run.

    Weights that have the model's type, or that ``form`` keeps in the stored one, stay mapped from their file;
    others are converted. Buffers that are not in checkpoints (rotary frequencies) are computed by the model's
    initialisation.

    Args:
        skeleton: A model on the meta device.
        source: Source of the weights.
        form: Form of the weights in memory; ``None``: torch tensors in the model's type. Layers to be packed
            are left to :func:`moechat.models.packed.pack_layers`.

    Raises:
        CheckpointError: A weight is missing, or its shape differs from the configuration's.
    """
    model = skeleton.model
    expert_names = skeleton.expert_names
    targets, _ = map_keys(skeleton, source.keys())
    loaded: set[str] = set()
    for target in targets.values():
        if target.name in expert_names:
            continue
        tensors = {key: read_tensor(source, key) for key in target.keys}
        for name, tensor in combine(target, tensors, model).items():
            assign_weight(skeleton, name, tensor, keep=form is not None and name in form.kept)
            loaded.add(name)
        del tensors
        # Converted sources are no longer needed; pages of weights used as stored are read again on use.
        source.release(target.keys)
    missing = missing_dense(skeleton, loaded | expert_names)
    if missing:
        raise CheckpointError(
            f"{len(missing)} dense weights of the model are missing, first {missing[0]!r}",
            hint="the store or checkpoint was written for another version of this model",
        )
    with light_meta():  # weights to be packed are still on the meta device
        initialise_rest(skeleton)
    model.tie_weights(missing_keys=set(skeleton.state) - loaded - expert_names)
    stray = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if stray:
        raise CheckpointError(f"{len(stray)} weights were never loaded, first {stray[0]!r}")
    if form is not None:
        _install_stored_layers(skeleton, form)


def _install_stored_layers(skeleton: Skeleton, form: DenseForm) -> None:
    """Replace torch's layers by those that read 16-bit rows as stored."""
    model = skeleton.model
    changed: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype not in HALVES:
            continue
        dtype = model_type(skeleton, f"{name}.weight")
        if name in form.embeddings:
            changed[name] = StoredEmbedding(weight.detach(), dtype)
        elif name in form.linears and not form.packs:
            bias = module._parameters.get("bias")
            changed[name] = StoredLinear(weight.detach().contiguous(), bias, dtype)
    replace_modules(model, changed)


def model_type(skeleton: Skeleton, name: str) -> torch.dtype:
    """Type of a weight in the model, unless its form keeps the stored type."""
    return _wanted_type(skeleton.model, name, skeleton.state[name].dtype)


def replace_modules(model: nn.Module, changed: dict[str, nn.Module]) -> None:
    """Replace named modules everywhere they are used."""
    by_old = {model.get_submodule(name): module for name, module in changed.items()}
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            if child is not None and child in by_old:
                parent._modules[leaf] = by_old[child]


def assign_weight(skeleton: Skeleton, name: str, tensor: torch.Tensor, *, keep: bool = False) -> None:
    """Put a weight into the model, in the model's type, or with ``keep`` in its own.

    Raises:
        CheckpointError: The model has no such weight, or its shape differs from the configuration's.
    """
    reference = skeleton.state.get(name)
    if reference is None:
        raise CheckpointError(f"the model has no parameter {name!r}")
    if tuple(tensor.shape) != tuple(reference.shape):
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}; the configuration says {list(reference.shape)}"
        )
    if reference.is_floating_point() and not keep:
        tensor = tensor.to(_wanted_type(skeleton.model, name, reference.dtype))
    elif not reference.is_floating_point() and not tensor.is_floating_point():
        tensor = tensor.to(reference.dtype)  # tables of whole numbers, which files hold in fewer bits
    parent_name, _, leaf = name.rpartition(".")
    parent = skeleton.model.get_submodule(parent_name)
    if leaf in parent._parameters:
        value: torch.Tensor = nn.Parameter(tensor, requires_grad=False)
        parent._parameters[leaf] = value  # type: ignore[assignment]
    else:
        value = tensor.clone()
        parent._buffers[leaf] = value
    # transformers' initialisation skips tensors with this mark.
    value._is_hf_initialized = True  # type: ignore[attr-defined]


def _wanted_type(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of a weight; families list weights that stay float32 in fp16 models, or in fp16 and bf16
    models.
    """
    patterns: list[str] = []
    if dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or []
    if dtype in (torch.float16, torch.bfloat16):
        patterns += getattr(model, "_keep_in_fp32_modules_strict", None) or []
    keep = any(re.search(rf"(^|\.){re.escape(pattern)}($|\.)", name) for pattern in patterns)
    return torch.float32 if keep else dtype


def initialise_rest(skeleton: Skeleton) -> None:
    """Compute the buffers that are not in checkpoints, as from_pretrained does.

    Weights that are on the meta device stay there; then it needs :func:`light_meta`.
    """
    model = skeleton.model
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
        module.__dict__.pop("_is_hf_initialized", None)
    for entry in skeleton.experts:
        # Their initialisation needs the removed parameters.
        entry.module._is_hf_initialized = True  # type: ignore[assignment]
    model.initialize_weights()  # type: ignore[no-untyped-call]
