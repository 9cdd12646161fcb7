"""Packs dense layers during loading.

:func:`pack_layers` quantises them to 8, 6 or 4 bits, for CPU or GPU; :mod:`moechat.models.packed_file` caches
the result. :func:`keep_layers` rearranges encoded rows of a store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moechat import _native
from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.models.checkpoint_mapping import map_keys
from moechat.models.dense import (
    EncodedTensorSource,
    TensorSource,
    encoded_rows,
    encoded_targets,
    model_type,
    read_weight,
    replace_modules,
)
from moechat.models.dense_form import DenseForm, part_bytes
from moechat.models.linear import PackedLinear, ReorderedLinear, SplitLinear
from moechat.models.packed_file import SOLVER, Bytes, PackedFile
from moechat.models.skeleton import Skeleton
from moechat.store.encoded_file import column_index

PackCallback = Callable[[int, int], None]
_ALIGNMENT = 64


class PackedMemory(Protocol):
    """Memory for the packed layers of a running model, on host or GPU."""

    def read(self, file: PackedFile) -> bool:
        """Load all layers from a file; ``False`` if it is missing, damaged or does not match."""
        ...

    def write(self, file: PackedFile) -> None:
        """Write all layers to a file.

        Raises:
            OSError: The file cannot be written.
        """
        ...

    def put(self, at: int, packed: Bytes) -> None:
        """Store one packed layer at offset ``at``."""
        ...

    def space(self, at: int, nbytes: int) -> AbstractContextManager[Bytes]:
        """Host memory for one packed layer; leaving the context stores it at offset ``at``."""
        ...

    def layer(
        self,
        layouts: Sequence[_native.LinearLayout],
        at: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Create the layer whose packed weights are at an offset.

        Args:
            layouts: Layouts of the parts of its weights, from the first row on.
            at: Offset of its first byte.
            bias: ``[rows]``, or ``None``.
            dtype: Type of the model.
        """
        ...


class _HostMemory:
    def __init__(self, nbytes: int, activation_bits: int) -> None:
        self._data = _native.huge_empty(nbytes)
        self._activation_bits = activation_bits

    def read(self, file: PackedFile) -> bool:
        return file.read(self._data)

    def write(self, file: PackedFile) -> None:
        file.write(self._data)

    def put(self, at: int, packed: Bytes) -> None:
        self._data[at : at + len(packed)] = packed

    def space(self, at: int, nbytes: int) -> AbstractContextManager[Bytes]:
        return nullcontext(self._data[at : at + nbytes])

    def layer(
        self,
        layouts: Sequence[_native.LinearLayout],
        at: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> nn.Module:
        parts, row = [], 0
        for layout in layouts:
            data = self._data[at : at + layout.nbytes]
            own = None if bias is None else bias[row : row + layout.rows]
            parts.append(PackedLinear(layout, data, own, self._activation_bits, dtype))
            at += layout.nbytes
            row += layout.rows
        return parts[0] if len(parts) == 1 else SplitLinear(parts)


def kept_bytes(form: DenseForm) -> int:
    """Bytes of memory that :func:`keep_layers` fills."""
    return sum(_aligned(part_bytes(form.parts_of(name)[0])) for name in form.kept_linears)


def keep_layers(
    skeleton: Skeleton,
    source: EncodedTensorSource,
    form: DenseForm,
    memory: PackedMemory | None = None,
    at: int = 0,
) -> None:
    """Replace the layers that keep the encoding of the store; their values do not change.

    Args:
        skeleton: Model with its dense weights loaded.
        source: The store's dense files; pages of the rows are released.
        form: Form of the weights.
        memory: Memory for the layers; ``None``: host memory of their own.
        at: Offset in it, a multiple of 64, from which :func:`kept_bytes` are filled.

    Raises:
        CheckpointError: A scale is not finite.
    """
    model, names = skeleton.model, form.kept_linears
    if not names:
        return
    encoded = encoded_targets(skeleton, source, form)
    if memory is None:
        memory, at = _HostMemory(kept_bytes(form), form.activation_bits), 0
    changed: dict[str, nn.Module] = {}
    for name in names:
        layout = _native.LinearLayout(*form.parts_of(name)[0])
        with memory.space(at, layout.nbytes) as part:
            try:
                _native.pack_kept_linear(layout, encoded_rows(skeleton, source, encoded[name]), part)
            except ValueError as error:
                raise CheckpointError(f"{encoded[name].name} cannot be read: {error}") from error
        source.release(encoded[name].keys)
        bias: Any = model.get_submodule(name).bias
        columns = source.columns(encoded[name].keys[0])
        made = memory.layer([layout], at, bias, model_type(skeleton, f"{name}.weight"))
        changed[name] = made
        if columns is not None:
            changed[name] = ReorderedLinear(made, torch.from_numpy(column_index(columns)))
        at += _aligned(layout.nbytes)
    replace_modules(model, changed)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def pack_layers(
    skeleton: Skeleton,
    source: TensorSource,
    form: DenseForm,
    file: PackedFile,
    progress: PackCallback | None = None,
    memory: PackedMemory | None = None,
) -> bool:
    """Replace the layers that are quantised with packed ones, read from the file or packed and written to it.

    Args:
        skeleton: Model with its dense weights loaded.
        source: Source of the weights; its pages are released.
        form: Form with layers that are quantised.
        file: Cache of the packed layers. If it cannot be written, the next start packs again.
        progress: Called with bytes packed and bytes in total.
        memory: Memory for the layers; ``None``: host memory.

    Returns:
        Whether the layers came from the file.

    Raises:
        UnsupportedModelError: A weight is not finite or too large to be packed.
    """
    model = skeleton.model
    memory = _HostMemory(file.nbytes, form.activation_bits) if memory is None else memory
    found = memory.read(file)
    targets, _ = map_keys(skeleton, source.keys())
    encoded = encoded_targets(skeleton, source, form)
    changed: dict[str, nn.Module] = {}
    at = 0
    for name in form.quantised:
        layouts = [_native.LinearLayout(*part) for part in form.parts_of(name)]
        module: Any = model.get_submodule(name)
        nbytes = sum(layout.nbytes for layout in layouts)
        if not found:
            try:
                weight = module.weight.detach()
                if name in encoded:
                    weight = read_weight(skeleton, source, encoded[name])
                _pack(memory, at, layouts, _matrix(weight))
            except ValueError as error:
                bits = " and ".join(str(layout.bits) for layout in layouts)
                raise UnsupportedModelError(
                    f"{name} cannot be packed in {bits} bits: {error}",
                    hint="keep the dense weights as they are: --dense-bits 16 (dense_bits=16)",
                ) from error
            target = encoded.get(name) or targets.get(
                f"{name}.weight"
            )  # None if the weight is tied to another one
            if target is not None:
                source.release(target.keys)
            del weight
            if progress is not None:
                progress(at + nbytes, file.nbytes)
        dtype = model_type(skeleton, f"{name}.weight")
        changed[name] = memory.layer(layouts, at, module.bias, dtype)
        at += nbytes
    replace_modules(model, changed)
    source.release(source.keys())
    if not found:
        with suppress(OSError):
            memory.write(file)
    return found


def _pack(
    memory: PackedMemory, at: int, layouts: Sequence[_native.LinearLayout], matrix: npt.NDArray[Any]
) -> None:
    """Quantise the parts of a matrix, one after the other from its first row on."""
    row = 0
    for layout in layouts:
        memory.put(at, _native.pack_linear(layout, matrix[row : row + layout.rows], solver=SOLVER))
        at += layout.nbytes
        row += layout.rows


def _matrix(weight: torch.Tensor) -> npt.NDArray[Any]:
    if weight.dtype == torch.bfloat16:
        return weight.view(torch.int16).numpy().view(np.uint16)
    if weight.dtype == torch.float16:
        return weight.numpy()
    return weight.float().numpy()
