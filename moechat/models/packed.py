"""Pack dense layers in 8 or 4 bits while loading, for the CPU or a card; the result is kept in a file, see
:mod:`moechat.models.packed_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moechat import _native
from moechat.errors import UnsupportedModelError
from moechat.models.dense import TensorSource, model_type, replace_modules
from moechat.models.dense_form import DenseForm
from moechat.models.linear import PackedLinear
from moechat.models.mapping import map_keys
from moechat.models.packed_file import Bytes, PackedFile
from moechat.models.skeleton import Skeleton

PackCallback = Callable[[int, int], None]


class PackedMemory(Protocol):
    """Where packed layers are kept while a model runs: in the process's memory, or in a card's."""

    def read(self, file: PackedFile) -> bool:
        """Take all layers from their file; ``False`` where it is not there as it should be."""
        ...

    def write(self, file: PackedFile) -> None:
        """Put all layers in their file's place.

        Raises:
            OSError: It cannot be written.
        """
        ...

    def put(self, at: int, packed: Bytes) -> None:
        """Take one layer; ``at`` is the place of its first byte."""
        ...

    def layer(
        self, layout: _native.LinearLayout, at: int, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        """The layer that reads its weights at a place.

        Args:
            layout: Of its weights.
            at: Place of its first byte.
            bias: ``[rows]``, or ``None``.
            dtype: Of the model.
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

    def layer(
        self, layout: _native.LinearLayout, at: int, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        part = self._data[at : at + layout.nbytes]
        return PackedLinear(layout, part, bias, self._activation_bits, dtype)


def pack_layers(
    skeleton: Skeleton,
    source: TensorSource,
    form: DenseForm,
    file: PackedFile,
    progress: PackCallback | None = None,
    memory: PackedMemory | None = None,
) -> bool:
    """Put packed layers in the place of those that ``form`` names; from the file, or packed now and kept.

    Args:
        skeleton: With its dense weights loaded.
        source: That they came from; its pages are released.
        form: With 8 or 4 bits.
        file: Where the packed layers are kept. If it cannot be written, the next start packs again.
        progress: Called with bytes packed and bytes in all.
        memory: Where the layers go; ``None``: into the process's memory.

    Returns:
        Whether the file served.

    Raises:
        UnsupportedModelError: A weight is not finite or too large to be packed.
    """
    model = skeleton.model
    memory = _HostMemory(file.nbytes, form.activation_bits) if memory is None else memory
    found = memory.read(file)
    targets, _ = map_keys(skeleton, source.keys())
    changed: dict[str, nn.Module] = {}
    at = 0
    for name in sorted(form.linears):
        layout = _native.LinearLayout(*form.linears[name], form.bits)
        module: Any = model.get_submodule(name)
        if not found:
            try:
                memory.put(at, _native.pack_linear(layout, _matrix(module.weight.detach())))
            except ValueError as error:
                raise UnsupportedModelError(
                    f"{name} cannot be packed in {form.bits} bits: {error}",
                    hint="keep the dense weights as they are: --dense-bits 16 (dense_bits=16)",
                ) from error
            target = targets.get(f"{name}.weight")  # none: it is tied to another one
            if target is not None:
                source.release(key for keys in target.sources.values() for key in keys)
            if progress is not None:
                progress(at + layout.nbytes, file.nbytes)
        dtype = model_type(skeleton, f"{name}.weight")
        changed[name] = memory.layer(layout, at, module.bias, dtype)
        at += layout.nbytes
    replace_modules(model, changed)
    source.release(source.keys())
    if not found:
        with suppress(OSError):
            memory.write(file)
    return found


def _matrix(weight: torch.Tensor) -> npt.NDArray[Any]:
    if weight.dtype == torch.bfloat16:
        return weight.view(torch.int16).numpy().view(np.uint16)
    if weight.dtype == torch.float16:
        return weight.numpy()
    return weight.float().numpy()
