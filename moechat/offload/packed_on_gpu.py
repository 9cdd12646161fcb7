"""Dense layers packed in a GPU's memory: what they lie in, and building their kernels.

They are packed on the CPU, by the same solver to the same bytes as for a model that runs there, and share its
file. What goes to the GPU goes layer by layer, or piece by piece of the file: the host needs the memory of
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from moechat import _native
from moechat.models.dense_form import DenseForm
from moechat.models.packed_file import Bytes, PackedFile
from moechat.offload.kernels.packed_linear import DevicePackedLinear, Strips


class PackedGpuMemory:
    """Memory of a GPU for the packed layers of a model, one allocation, since torch rounds up each of them.
    A :class:`moechat.models.packed.PackedMemory`.

    Args:
        nbytes: Bytes of all layers.
        form: Form of the dense weights.
        dtype: Type of the model.
        device: The GPU.

    Raises:
        torch.OutOfMemoryError: The GPU has not so much memory.
    """

    def __init__(self, nbytes: int, form: DenseForm, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._strips = Strips(form.sizes.unpacked_bytes(dtype.itemsize), device)

    def read(self, file: PackedFile) -> bool:
        """Read all layers from their file; ``False`` where it is missing or damaged."""
        return file.read_in_pieces(self.put)

    def write(self, file: PackedFile) -> None:
        """Write all layers to their file.

        Raises:
            OSError: It cannot be written.
        """
        file.write_in_pieces(lambda first, last: self._data[first:last].cpu().numpy())

    def put(self, at: int, packed: Bytes) -> None:
        """Copy bytes to an offset; the caller may overwrite them as soon as this returns."""
        self._data[at : at + len(packed)].copy_(torch.from_numpy(packed))

    @contextmanager
    def space(self, at: int, nbytes: int) -> Iterator[Bytes]:
        """Host memory of one layer, copied to an offset when the context ends."""
        packed = np.empty(nbytes, np.uint8)
        yield packed
        self.put(at, packed)

    def layer(
        self,
        layouts: Sequence[_native.LinearLayout],
        at: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> nn.Module:
        """The layer whose weights lie at an offset.

        Args:
            layouts: Layout of its weights; on a GPU all rows have the same bits.
            at: Offset of its first byte.
            bias: ``[rows]`` on any device, or ``None``.
            dtype: Type of the model.
        """
        (layout,) = layouts
        part = self._data[at : at + layout.nbytes]
        return DevicePackedLinear(layout, part, bias, self._strips, dtype)
