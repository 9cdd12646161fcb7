"""Dense layers that read their weights in the form in which they are kept: 16 bits as in the checkpoint, or
8 or 4 bits packed in groups.

They stand in for ``nn.Linear`` and ``nn.Embedding`` where a family uses them as such. In decoding the dense
weights are most of the bytes that a token reads, so they are neither widened nor copied:

- :class:`StoredLinear` reads bf16 or fp16 rows where they lie, mapped from their file. A few tokens go
  through the native kernel, products and sums in float32. Many tokens go through torch: as bf16 where inputs
  and weights both are, else panels of rows are widened to float32 one after the other.
- :class:`PackedLinear` reads weights packed by the experts' quantiser, for any number of tokens natively.
- :class:`StoredEmbedding` widens the rows that are looked up.

Their results do not depend on the number of threads, nor on other tokens of a pass of the same kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat import _native
from moechat.models.threads import one_thread, steady_columns

# Weights that are widened at a time: what they become stays in the second-level caches.
_PANEL_WEIGHTS = 1 << 20
_PANEL_ROWS = 64
_HALVES = (torch.bfloat16, torch.float16)


class _Dense(nn.Module, ABC):
    """Shape and bias of a dense layer; the weights are the subclasses' business."""

    def __init__(self, rows: int, cols: int, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.out_features = rows
        self.in_features = cols
        self.bias = bias
        self._bias32 = None if bias is None else np.ascontiguousarray(bias.detach().float().numpy())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of weights that a token reads, the bias included."""

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens, in_features]``, contiguous."""
        return x.reshape(-1, self.in_features).to(torch.float32).contiguous()

    def _natively(self, x: torch.Tensor) -> torch.Tensor:
        """The result of :meth:`_run` for ``[..., in_features]``, in the type of ``x``."""
        if x.dtype is torch.float32 and x.is_contiguous():
            # A step of decoding comes here many times: as few tensors as can be.
            out = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.float32)
            self._run(x.numpy().reshape(-1, self.in_features), out.numpy().reshape(-1, self.out_features))
            return out
        flat = self._inputs(x)
        out = torch.empty((len(flat), self.out_features), dtype=torch.float32)
        self._run(flat.numpy(), out.numpy())
        return self._outputs(out, x)

    @abstractmethod
    def product(self) -> _native.DenseProduct:
        """The same product for native code; it keeps the weights alive."""

    @abstractmethod
    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """float32 ``[tokens, in_features]`` to ``[tokens, out_features]``, both contiguous."""

    def _outputs(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.reshape(*x.shape[:-1], self.out_features).to(x.dtype)


class StoredLinear(_Dense):
    """``nn.Linear`` with its weights as 16-bit rows.

    Args:
        weight: bf16 or fp16 ``[out_features, in_features]``, contiguous; read in place as long as this lives.
        bias: ``[out_features]`` of any floating type, or ``None``.
        dtype: What :attr:`weight` is given in.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.shape[0], weight.shape[1], bias, dtype)
        if weight.dtype not in _HALVES or not weight.is_contiguous():
            raise ValueError(f"weights of type {weight.dtype} are not rows of 16-bit floats")
        self.rows = weight
        self._fp16 = weight.dtype == torch.float16
        self._words: npt.NDArray[np.uint16] = weight.view(torch.int16).numpy().view(np.uint16)

    @property
    def weight(self) -> torch.Tensor:
        """The rows in the type of the model; made anew each time where they are stored in another."""
        return self.rows.to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a token reads, the bias included."""
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        if x.numel() <= _native.ROWS16_MAX_TOKENS * self.in_features:
            return self._natively(x)
        if x.dtype == torch.bfloat16 == self.rows.dtype:
            with one_thread(not steady_columns(self.out_features)):
                bias = None if self.bias is None else self.bias.to(torch.bfloat16)
                return F.linear(x, self.rows, bias)
        return self._outputs(self._in_panels(self._inputs(x)), x)

    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        _native.rows16_forward(self._words, self._fp16, x, self._bias32, out)

    def product(self) -> _native.DenseProduct:
        """The same product for native code; it keeps the weights alive."""
        return _native.rows16_product(self._words, self._fp16, self._bias32)

    def _in_panels(self, flat: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(flat), self.out_features), dtype=torch.float32)
        step = max(_PANEL_ROWS, _PANEL_WEIGHTS // self.in_features // _PANEL_ROWS * _PANEL_ROWS)
        for first in range(0, self.out_features, step):
            panel = self.rows[first : first + step].to(torch.float32)
            with one_thread(not steady_columns(len(panel))):
                torch.mm(flat, panel.T, out=out[:, first : first + step])
        if self._bias32 is not None:
            out += torch.from_numpy(self._bias32)
        return out


class PackedLinear(_Dense):
    """``nn.Linear`` with its weights packed in 8 or 4 bits.

    Args:
        layout: Of the packed weights.
        data: uint8 ``[layout.nbytes]``; read in place as long as this lives.
        bias: ``[out_features]`` of any floating type, or ``None``.
        activation_bits: How inputs meet the weights: 8 or 16, integers; 32, float32.
        dtype: What :attr:`weight` is given in.
    """

    def __init__(
        self,
        layout: _native.LinearLayout,
        data: npt.NDArray[np.uint8],
        bias: torch.Tensor | None,
        activation_bits: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(layout.rows, layout.cols, bias, dtype)
        self.layout = layout
        self.data = data
        self._activation_bits = activation_bits

    @property
    def weight(self) -> torch.Tensor:
        """What the packed weights stand for, in the type of the model; made anew each time."""
        return torch.from_numpy(_native.unpack_linear(self.layout, self.data)).to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a token reads, the bias included."""
        return self.layout.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        return self._natively(x)

    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        _native.linear_forward(
            self.layout, self.data, x, self._bias32, out, activation_bits=self._activation_bits
        )

    def product(self) -> _native.DenseProduct:
        """The same product for native code; it keeps the weights alive."""
        return _native.packed_product(self.layout, self.data, self._bias32, self._activation_bits)


class StoredEmbedding(nn.Module):
    """``nn.Embedding`` with its rows as they are stored.

    Args:
        weight: ``[num_embeddings, embedding_dim]``; read in place as long as this lives.
        dtype: Type of what is looked up.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.rows = weight
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """The rows in the type of the model; made anew each time where they are stored in another."""
        return self.rows.to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the given numbers: ``[..., embedding_dim]``."""
        return F.embedding(ids, self.rows).to(self._dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def weight_storages(model: nn.Module) -> dict[int, tuple[str, int]]:
    """Weights of a loaded model, each memory once: by address, the name of the first module and the bytes."""
    found: dict[int, tuple[str, int]] = {}
    for name, module in model.named_modules():
        tensors: list[Any] = list(module._parameters.values())
        if isinstance(module, StoredLinear | StoredEmbedding):
            tensors.append(module.rows)
        if isinstance(module, _Dense):
            tensors.append(module.bias)
        if isinstance(module, PackedLinear):
            found.setdefault(module.data.ctypes.data, (name, module.layout.nbytes))
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                found.setdefault(tensor.data_ptr(), (name, tensor.nbytes))
    return found
