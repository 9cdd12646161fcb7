"""Dense layers packed in a card's memory: what they lie in, and building their kernels.

They are packed on the CPU, by the same solver to the same bytes as for a model that runs there, and share its
file. What goes to the card goes layer by layer, or piece by piece of the file: the host needs the memory of
one.
"""

from __future__ import annotations

import torch
from torch import nn

from moechat import _native
from moechat.models.dense_form import DenseForm, unpacked_bytes
from moechat.models.packed_file import Bytes, PackedFile
from moechat.offload.accelerator import Accelerator
from moechat.offload.kernels.packed_linear import DevicePackedLinear, Strips, launch_all


class CardMemory:
    """A card's memory for the packed layers of a model, in one piece: torch rounds up every piece that it
    takes. A :class:`moechat.models.packed.PackedMemory`.

    Args:
        nbytes: Of all layers.
        form: Of the dense weights.
        dtype: Of the model.
        device: The card.

    Raises:
        torch.OutOfMemoryError: There is not so much.
    """

    def __init__(self, nbytes: int, form: DenseForm, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._strips = Strips(unpacked_bytes(form, dtype.itemsize), device)

    def read(self, file: PackedFile) -> bool:
        """Take all layers from their file; ``False`` where it is not there as it should be."""
        return file.read_in_pieces(self.put)

    def write(self, file: PackedFile) -> None:
        """Put all layers in their file's place.

        Raises:
            OSError: It cannot be written.
        """
        file.write_in_pieces(lambda first, last: self._data[first:last].cpu().numpy())

    def put(self, at: int, packed: Bytes) -> None:
        """Copy bytes to a place; they may be overwritten as soon as this returns."""
        self._data[at : at + len(packed)].copy_(torch.from_numpy(packed))

    def layer(
        self, layout: _native.LinearLayout, at: int, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        """The layer that reads its weights at a place.

        Args:
            layout: Of its weights.
            at: Place of its first byte.
            bias: ``[rows]``, or ``None``; wherever it lies.
            dtype: Of the model.
        """
        part = self._data[at : at + layout.nbytes]
        return DevicePackedLinear(layout, part, bias, self._strips, dtype)


def warm_packed_layers(accelerator: Accelerator, model: nn.Module, dtype: torch.dtype) -> None:
    """Build the kernels of a model's packed layers, if it has any.

    Args:
        accelerator: The card that it lies on.
        model: Of any kind.
        dtype: Of the hidden states.

    Raises:
        DeviceUnavailableError: They cannot be built.
    """
    accelerator.warm(lambda: launch_all(model.modules(), dtype))
