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

from moechat.errors import COPY_AGAIN, CheckpointError
from moechat.geometry import FLOAT_ENCODINGS
from moechat.models.checkpoint_mapping import READABLE_TYPES, Target, combine, map_keys, missing_dense
from moechat.models.dense_form import HALVES, DenseForm, encoded_bytes, part_bytes
from moechat.models.joined_weights import joins_rows
from moechat.models.light_meta import light_meta
from moechat.models.linear import StoredEmbedding, StoredLinear, encoded_embedding
from moechat.models.skeleton import Skeleton
from moechat.store.tensor_headers import TensorHeaders

# Elements of a weight that is checked while it is loaded.
_SMALL_WEIGHT = 1 << 18


class TensorSource(TensorHeaders, Protocol):
    """Named tensors on disk: a checkpoint or a store's dense files."""

    def array(self, key: str) -> np.ndarray[Any, Any]:
        """Read-only values, mapped from the file; bf16 as uint16."""
        ...

    def release(self, names: Iterable[str]) -> None:
        """Drop the mapped pages of tensors from this process; views that remain read them again."""
        ...


class EncodedTensorSource(TensorSource, Protocol):
    """A store's dense files, in which tensors may be encoded."""

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """The order of the columns of encoded rows, if it is not the model's."""
        ...

    def encoded_rows(self, name: str, expert: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The rows of a tensor that has an encoding, ``uint8 [rows, bytes]``; a view of the file."""
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


def stored_encodings(skeleton: Skeleton, source: TensorHeaders) -> tuple[dict[str, str], set[str]]:
    """Encoding of each weight of a model that is stored in whole encoded rows; the names of other weights
    that are encoded, but not in FP8.
    """
    found, others = {}, set()
    for target in map_keys(skeleton, source.keys())[0].values():
        encodings = {source.dense_encoding(key) for key in target.keys}
        (encoding,) = encodings if len(encodings) == 1 else (None,)
        whole = len(target.keys) == 1 if target.converter is None else joins_rows(target.converter)
        if encoding is not None and whole:
            found[target.name] = encoding
        elif encodings - {None, *FLOAT_ENCODINGS}:
            others.add(target.name)
    return found, others


def encoded_targets(skeleton: Skeleton, source: TensorHeaders, form: DenseForm) -> dict[str, Target]:
    """The stored weight of each layer whose weights are encoded."""
    if not form.encoded:
        return {}
    targets, _ = map_keys(skeleton, source.keys())
    return {layer: targets[weight] for layer, weight in form.encoded.items()}


def encoded_rows(skeleton: Skeleton, source: EncodedTensorSource, target: Target) -> np.ndarray[Any, Any]:
    """The rows of an encoded weight, ``uint8 [rows, bytes]``; a view of the file where possible.

    Raises:
        CheckpointError: Its parts do not fit together.
    """
    if target.converter is None:
        return source.encoded_rows(target.keys[0], None)
    parts = {key: torch.tensor(source.encoded_rows(key, None)) for key in target.keys}
    return combine(target, parts, skeleton.model)[target.name].numpy()


def read_weight(skeleton: Skeleton, source: TensorSource, target: Target) -> torch.Tensor:
    """The values of a weight, in the type that its source appears as.

    Raises:
        CheckpointError: As :func:`read_tensor`, or its parts do not fit together.
    """
    tensors = {key: read_tensor(source, key) for key in target.keys}
    return combine(target, tensors, skeleton.model)[target.name]


def loading_bytes(skeleton: Skeleton, source: TensorHeaders, form: DenseForm | None = None) -> int:
    """Largest temporary memory of :func:`load_dense`, besides the loaded weights.

    Weights are loaded one at a time. A weight used as stored needs no more. For one in another type or form,
    the mapped pages of its source count until they are released, and the decoded values of encoded rows. For
    a rule that combines sources, its result in the type of the source counts too, and the input of its last
    step if it has several.

    Raises:
        CheckpointError: A weight's type is not supported.
    """
    expert_names = skeleton.expert_names
    targets, _ = map_keys(skeleton, source.keys())
    form = DenseForm(16, 0) if form is None else form
    quantised = {f"{name}.weight": form.parts_of(name) for name in form.quantised}
    for layer, weight in form.encoded.items():
        if f"{layer}.weight" in quantised:  # the stored weight may have the name of another layer
            quantised[weight] = quantised[f"{layer}.weight"]
    encoded = set(form.encoded.values())
    most = 0
    for target in targets.values():
        if target.name in expert_names:
            continue
        rows, values = _encoded_and_values(source, target.keys)
        reference = skeleton.state.get(target.name)
        parts = quantised.get(target.name, ())
        size = rows + values
        if target.name in encoded and not parts:
            size = rows if target.converter is None else 3 * rows
        elif target.converter is not None:
            size += values * min(2, max(1, len(target.converter.operations)))
        elif parts:
            size += sum(map(part_bytes, parts))
        elif reference is not None:
            wanted = reference.dtype
            if reference.is_floating_point():
                wanted = _wanted_type(skeleton.model, target.name, wanted)
            types = {_type_and_shape(source, key)[0] for key in target.keys}
            if target.name in form.kept or types == {wanted}:
                size = rows
        most = max(most, size)
    return most


def _encoded_and_values(source: TensorHeaders, keys: Iterable[str]) -> tuple[int, int]:
    """Bytes of the encoded rows of tensors, and of all their values in the types that they appear as."""
    rows = values = 0
    for key in keys:
        dtype, shape = _type_and_shape(source, key)
        values += dtype.itemsize * math.prod(shape)
        encoding = source.dense_encoding(key)
        if encoding is not None:
            rows += encoded_bytes(math.prod(shape[:-1]), shape[-1], encoding)
    return rows, values


def load_dense(skeleton: Skeleton, source: EncodedTensorSource, form: DenseForm | None = None) -> None:
    """Load the dense weights of ``source`` into the skeleton and make the model ready to run.

    Weights that have the model's type, or that ``form`` keeps in the stored one, stay mapped from their file;
    others are converted. Buffers that are not in checkpoints (rotary frequencies) are computed by the model's
    initialisation.

    Args:
        skeleton: A model on the meta device.
        source: Source of the weights.
        form: Form of the weights in memory; ``None``: torch tensors in the model's type. Linear layers to be
            packed are left to :mod:`moechat.models.packed`; until then encoded weights have no values.

    Raises:
        CheckpointError: A weight is missing, its shape differs from the configuration's, or a small one is
            not finite.
    """
    model = skeleton.model
    expert_names = skeleton.expert_names
    targets, _ = map_keys(skeleton, source.keys())
    loaded: set[str] = set()
    encoded = set() if form is None else set(form.encoded.values())
    for target in targets.values():
        if target.name in expert_names:
            continue
        if target.name in encoded:
            _assign_placeholder(skeleton, target.name)
            loaded.add(target.name)
            continue
        tensors = {key: read_tensor(source, key) for key in target.keys}
        for name, tensor in combine(target, tensors, model).items():
            _require_finite(name, tensor)
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
        _install_stored_layers(skeleton, source, form)


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    """Check a small weight, such as that of a norm: one number that is none spoils every token. Conversion
    checks all; larger ones are checked again while they are packed.

    Raises:
        CheckpointError: A value is NaN or infinite.
    """
    if tensor.is_floating_point() and tensor.numel() <= _SMALL_WEIGHT and not torch.isfinite(tensor).all():
        raise CheckpointError(f"{name} has values that are not finite", hint=COPY_AGAIN)


def _assign_placeholder(skeleton: Skeleton, name: str) -> None:
    """A weight of the right shape that takes no memory, for a layer that will be replaced."""
    assign_weight(
        skeleton, name, torch.zeros((), dtype=torch.float16).expand(skeleton.state[name].shape), keep=True
    )


def _install_stored_layers(skeleton: Skeleton, source: EncodedTensorSource, form: DenseForm) -> None:
    """Replace torch's layers by those that read rows as stored, in 16 bits or encoded."""
    model = skeleton.model
    changed: dict[str, nn.Module] = {}
    encoded = encoded_targets(skeleton, source, form)
    for name, module in model.named_modules():
        if name in encoded:
            if isinstance(module, nn.Embedding):
                rows = encoded_rows(skeleton, source, encoded[name])
                dtype = model_type(skeleton, f"{name}.weight")
                changed[name] = encoded_embedding(module, rows, form.encodings[name], dtype)
            continue
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
