"""Packs dense layers in 8 or 4 bits during loading, for CPU or GPU; :mod:`moechat.models.packed_file` caches
the result.
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
from moechat.models.checkpoint_mapping import map_keys
from moechat.models.dense import TensorSource, model_type, replace_modules
from moechat.models.dense_form import DenseForm
from moechat.models.linear import PackedLinear
from moechat.models.packed_file import Bytes, PackedFile
from moechat.models.skeleton import Skeleton

PackCallback = Callable[[int, int], None]


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

    def layer(
        self, layout: _native.LinearLayout, at: int, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        """Create the layer whose packed weights are at an offset.

        Args:
            layout: Layout of its weights.
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
    """Replace the layers that ``form`` names with packed ones, read from the file or packed and written to
    it.

    Args:
        skeleton: Model with its dense weights loaded.
        source: Source of the weights; its pages are released.
        form: Form with 8 or 4 bits.
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
    changed: dict[str, nn.Module] = {}
    at = 0
    for name in sorted(form.linears):
        layout = _native.LinearLayout(*form.linears[name], form.bits_of(name))
        module: Any = model.get_submodule(name)
        if not found:
            try:
                memory.put(at, _native.pack_linear(layout, _matrix(module.weight.detach())))
            except ValueError as error:
                raise UnsupportedModelError(
                    f"{name} cannot be packed in {form.bits_of(name)} bits: {error}",
                    hint="keep the dense weights as they are: --dense-bits 16 (dense_bits=16)",
                ) from error
            target = targets.get(f"{name}.weight")  # None if the weight is tied to another one
            if target is not None:
                source.release(target.keys)
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
