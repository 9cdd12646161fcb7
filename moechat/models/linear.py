"""Dense layers that read weights directly from their storage form: 16 bits as in the checkpoint, 8, 6 or 4
bits packed in groups, or the encoding of their source.

They replace ``nn.Linear`` and ``nn.Embedding`` modules. In decoding, dense weights are most of the bytes read
per token, so they are neither widened nor copied:

- :class:`StoredLinear` reads bf16 or fp16 rows in the mapped file. A few tokens use the native kernel, with
  float32 products and sums. Many tokens use torch: in bf16 if inputs and weights both are bf16, else panels
  of rows are widened to float32 one at a time.
- :class:`PackedLinear` reads weights packed by the experts' quantiser, or rearranged from encoded rows,
  natively for any number of tokens; :class:`SplitLinear` has several of them for its rows.
- :class:`StoredEmbedding` converts only the rows that are looked up, :class:`EncodedEmbedding` decodes them.

Results do not depend on the number of threads, nor on other tokens of a pass of the same kind.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat import _native
from moechat.models.element_types import ELEMENTS
from moechat.models.threads import is_thread_invariant, one_thread

# Weights widened at a time; the result fits the second-level caches.
_PANEL_WEIGHTS = 1 << 20
_PANEL_ROWS = 64
TILE_ROWS = 16  # of packed weights
# Inputs or sums of many tokens in float32 at a time: memory that the allocator keeps for the next part, where
# pages of its own would cost more than the product. Fewer tokens would read the weights too often.
_PART_SUMS = 5 << 20
_PART_TOKENS = 256
_HALVES = (torch.bfloat16, torch.float16)


class _Dense(nn.Module, ABC):
    """Shape and bias of a dense layer; subclasses hold the weights."""

    _most_few = _native.MOST_STEP_TOKENS

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
    def dtype(self) -> torch.dtype:
        """Type of hidden states in the model."""
        return self._dtype

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of weights and bias, which every token reads."""

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens, in_features]``, contiguous."""
        return x.reshape(-1, self.in_features).to(torch.float32).contiguous()

    def _natively(self, x: torch.Tensor) -> torch.Tensor:
        """Result of :meth:`_run` for ``[..., in_features]``, in the type of ``x``."""
        tokens = x.numel() // self.in_features
        if (
            0 < tokens <= self._most_few
            and x.shape[-1] == self.in_features
            and x.dtype in ELEMENTS
            and x.is_contiguous()
            and x.is_cpu
            and not x.requires_grad
        ):
            # Called many times per decoded token, so with as few tensors as possible.
            out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
            self._run_few(ELEMENTS[x.dtype], x.data_ptr(), tokens, out)
            return out
        rows = x.reshape(-1, self.in_features)
        out = torch.empty((len(rows), self.out_features), dtype=x.dtype)
        step = max(_PART_TOKENS, _PART_SUMS // max(self.in_features, self.out_features))
        same = x.dtype is torch.float32
        sums = out if same else torch.empty((min(step, len(rows)), self.out_features), dtype=torch.float32)
        for first in range(0, len(rows), step):
            part = rows[first : first + step].to(torch.float32).contiguous()
            made = sums[first : first + step] if same else sums[: len(part)]
            self._run(part.numpy(), made.numpy())
            if not same:
                out[first : first + step] = made
        return out.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def _run_few(self, kind: str, x: int, tokens: int, out: torch.Tensor) -> None:
        """As :meth:`_run`, of at most ``_most_few`` tokens at an address, both of an element type."""

    @abstractmethod
    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Compute ``out [tokens, out_features]`` from ``x [tokens, in_features]``; both contiguous."""

    def _outputs(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.reshape(*x.shape[:-1], self.out_features).to(x.dtype)


class StoredLinear(_Dense):
    """``nn.Linear`` with its weights as 16-bit rows.

    Args:
        weight: bf16 or fp16 ``[out_features, in_features]``, contiguous; read in place.
        bias: ``[out_features]`` of any floating type, or ``None``.
        dtype: Type of :attr:`weight`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.shape[0], weight.shape[1], bias, dtype)
        if weight.dtype not in _HALVES or not weight.is_contiguous():
            raise ValueError(f"weights of type {weight.dtype} are not rows of 16-bit floats")
        self.rows = weight
        self._fp16 = weight.dtype == torch.float16
        self._product: _native.DenseProduct | None = None
        self._words: npt.NDArray[np.uint16] = weight.view(torch.int16).numpy().view(np.uint16)

    @property
    def weight(self) -> torch.Tensor:
        """The rows in the model's type; converted at each access if stored in another."""
        return self.rows.to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias, which every token reads."""
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        if x.numel() <= _native.ROWS16_MAX_TOKENS * self.in_features:
            return self._natively(x)
        if x.dtype == torch.bfloat16 == self.rows.dtype:
            with one_thread(not is_thread_invariant(self.out_features)):
                bias = None if self.bias is None else self.bias.to(torch.bfloat16)
                return F.linear(x, self.rows, bias)
        return self._outputs(self._in_panels(self._inputs(x)), x)

    def _run_few(self, kind: str, x: int, tokens: int, out: torch.Tensor) -> None:
        if self._product is None:
            self._product = self.product()
        self._product(kind, x, tokens, out.data_ptr())

    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        _native.rows16_forward(self._words, self._fp16, x, self._bias32, out)

    def product(self) -> _native.DenseProduct:
        """The product as an object for native code; it keeps the weights alive."""
        return _native.rows16_product(self._words, self._fp16, self._bias32)

    def _in_panels(self, flat: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(flat), self.out_features), dtype=torch.float32)
        step = max(_PANEL_ROWS, _PANEL_WEIGHTS // self.in_features // _PANEL_ROWS * _PANEL_ROWS)
        for first in range(0, self.out_features, step):
            panel = self.rows[first : first + step].to(torch.float32)
            with one_thread(not is_thread_invariant(len(panel))):
                torch.mm(flat, panel.T, out=out[:, first : first + step])
        if self._bias32 is not None:
            out += torch.from_numpy(self._bias32)
        return out


class PackedLinear(_Dense):
    """``nn.Linear`` with its weights packed in 8, 6 or 4 bits, or in the encoding of their source.

    Args:
        layout: Layout of the packed weights.
        data: uint8 ``[layout.nbytes]``; read in place.
        bias: ``[out_features]`` of any floating type, or ``None``.
        activation_bits: Type of the inputs in products: 8 or 16 for integers, 32 for float32.
        dtype: Type of :attr:`weight`.
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
        self.activation_bits = activation_bits
        self._product: _native.DenseProduct | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The unpacked weights in the model's type; unpacked at each access."""
        return torch.from_numpy(_native.unpack_linear(self.layout, self.data)).to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias, which every token reads."""
        return self.layout.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        return self._natively(x)

    def _run_few(self, kind: str, x: int, tokens: int, out: torch.Tensor) -> None:
        if self._product is None:
            self._product = self.product()
        self._product(kind, x, tokens, out.data_ptr())

    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        _native.linear_forward(
            self.layout, self.data, x, self._bias32, out, activation_bits=self.activation_bits
        )

    def product(self) -> _native.DenseProduct:
        """The product as an object for native code; it keeps the weights alive."""
        return _native.packed_product(self.layout, self.data, self._bias32, self.activation_bits)

    def first_rows(self, rows: int) -> PackedLinear:
        """A layer with the first outputs of this one, a multiple of 16, which reads the same weights."""
        bias = None if self.bias is None else self.bias[:rows]
        return PackedLinear(self.layout.first_rows(rows), self.data, bias, self.activation_bits, self._dtype)


class SplitLinear(_Dense):
    """``nn.Linear`` whose rows are packed in parts with different bits.

    Args:
        parts: Layers of the same inputs, from the first row on.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        first = parts[0]
        biases = [part.bias for part in parts if part.bias is not None]
        rows = sum(part.out_features for part in parts)
        super().__init__(rows, first.in_features, torch.cat(biases) if biases else None, first._dtype)
        self._most_few = 1  # rows of several tokens do not lie one behind the other
        self.parts = tuple(parts)  # no submodules: what walks a model counts this layer once

    def first_rows(self, rows: int) -> SplitLinear:
        """A layer with the first outputs of this one, a multiple of 16, which reads the same weights."""
        found: list[PackedLinear] = []
        for part in self.parts:
            if rows > 0:
                found.append(part.first_rows(min(rows, part.out_features)))
            rows -= part.out_features
        return SplitLinear(found)

    @property
    def weight(self) -> torch.Tensor:
        """The unpacked weights in the model's type; unpacked at each access."""
        return torch.cat([part.weight for part in self.parts])

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias, which every token reads."""
        return sum(part.nbytes for part in self.parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        return self._natively(x)

    def _run_few(self, kind: str, x: int, tokens: int, out: torch.Tensor) -> None:
        flat = out.view(self.out_features)
        row = 0
        for part in self.parts:
            part._run_few(kind, x, tokens, flat[row : row + part.out_features])
            row += part.out_features

    def _run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        row = 0
        for part in self.parts:
            rows = out[:, row : row + part.out_features]
            if len(x) == 1:
                part._run(x, rows)
            else:
                whole = np.empty(rows.shape, np.float32)
                part._run(x, whole)
                rows[:] = whole
            row += part.out_features


class ReorderedLinear(nn.Module):
    """``nn.Linear`` whose weights have their columns in another order than the inputs.

    Args:
        inner: The layer with these weights.
        columns: int64 ``[in_features]``: for every input its column.
    """

    _order: torch.Tensor

    def __init__(self, inner: nn.Module, columns: torch.Tensor) -> None:
        super().__init__()
        self.inner: Any = inner
        self.in_features, self.out_features = self.inner.in_features, self.inner.out_features
        # A buffer, so that it moves to a GPU with the model.
        self.register_buffer("_order", torch.argsort(columns).to(torch.int32), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weights in the order of the inputs, in the model's type; unpacked at each access."""
        weight: torch.Tensor = self.inner.weight[:, torch.argsort(self._order)]
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """That of the inner layer."""
        bias: torch.Tensor | None = self.inner.bias
        return bias

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias, which every token reads."""
        nbytes: int = self.inner.nbytes
        return nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        result: torch.Tensor = self.inner(x.index_select(-1, self._order))
        return result


class StoredEmbedding(nn.Module):
    """``nn.Embedding`` with its rows as stored.

    Args:
        weight: ``[num_embeddings, embedding_dim]``; read in place.
        dtype: Type of the results.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.rows = weight
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """The rows in the model's type; converted at each access if stored in another."""
        return self.rows.to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., embedding_dim]`` of the given ids."""
        return F.embedding(ids, self.rows).to(self._dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class EncodedEmbedding(nn.Embedding):
    """``nn.Embedding`` with its rows encoded as in the store; see :func:`encoded_embedding`.

    Its weight has the model's type and the right shape, and no values.
    """

    rows: npt.NDArray[np.uint8]
    encoding: str

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., embedding_dim]`` of the given ids.

        Raises:
            IndexError: There is no such row.
        """
        flat = ids.reshape(-1).numpy()
        if flat.size and not 0 <= flat.min() <= flat.max() < len(self.rows):
            raise IndexError(f"ids {flat.min()} to {flat.max()} are not within {len(self.rows)} rows")
        values = torch.empty((len(flat), self.embedding_dim), dtype=torch.float32)
        if flat.size:
            _native.decode_file_rows(self.encoding, self.rows[flat], values.numpy())
        return values.to(self.weight.dtype).reshape(*ids.shape, self.embedding_dim)


def encoded_embedding(
    module: nn.Embedding, rows: npt.NDArray[np.uint8], encoding: str, dtype: torch.dtype
) -> nn.Embedding:
    """An embedding that reads encoded rows in place, otherwise as ``module``.

    If the class of ``module`` is a subclass, its own computation stays: it has to take the rows from
    ``super().forward()`` (:func:`only_scales_rows`).

    Args:
        module: An embedding; its weight is not read.
        rows: uint8 ``[num_embeddings, bytes]``.
        encoding: Theirs.
        dtype: Type of the result.
    """
    own = type(module)
    kind: Any = EncodedEmbedding
    if own is not nn.Embedding:
        kind = type(
            own.__name__, (own, EncodedEmbedding), {}
        )  # super() in its methods finds EncodedEmbedding
    made: EncodedEmbedding = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    empty = torch.zeros((), dtype=dtype).expand(module.num_embeddings, module.embedding_dim)
    made._parameters = dict(module._parameters) | {"weight": nn.Parameter(empty, requires_grad=False)}
    made.rows, made.encoding = rows, encoding
    return made


def only_scales_rows(kind: type[nn.Embedding]) -> bool:
    """Whether an embedding class takes its rows from ``nn.Embedding.forward``, as far as its source shows."""
    if kind is nn.Embedding:
        return True
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return "super().forward(" in source and "embedding(" not in source
