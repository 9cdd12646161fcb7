"""Dense layers whose weights lie packed in a GPU's memory, in 8, 6 or 4 bits or a kept encoding.

A few tokens read the packed weights themselves: products and sums in float32, each token by programs of its
own, so that its result does not depend on the others. Their programs run side by side, so the weights come
from memory about once. Many tokens are bound by arithmetic: there strips of the matrix are unpacked to the
type of the inputs, in a memory that all layers share, and multiplied by torch, whose library has the fastest
products of every GPU. From about 8 tokens on what is written and read for that is less than the repeated
unpacking. The strips depend on the model alone, and no budget changes how a result rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.budget.gpu_sizes import FEW_TOKENS
from moechat.geometry import GROUP_SIZE
from moechat.offload.kernels import triton_kept, triton_linear
from moechat.offload.kernels.kept_form import kept_constants, value_table
from moechat.offload.kernels.launch import Kernel

_TILE = 16
# Rows of a program.
ROWS = _TILE
# Bytes of codes that a program reads at a time: enough in flight for the memory, and few enough registers.
_CODES = 4096
_WARPS = 4


class Strips:
    """Memory for unpacked weights, which all layers of a model use in turn.

    Args:
        nbytes: See :func:`moechat.sizes.dense_sizes.DenseSizes.unpacked_bytes`.
        device: The GPU.

    Raises:
        torch.OutOfMemoryError: There is not so much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def rows(self, cols: int, dtype: torch.dtype) -> int:
        """Rows of so many columns of a type that there is room for: a multiple of 16."""
        return self._memory.nbytes // (cols * dtype.itemsize) // _TILE * _TILE

    def of(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """``[rows, cols]`` of a type; what it holds means nothing, and the next user overwrites it."""
        return self._memory[: rows * cols * dtype.itemsize].view(dtype).view(rows, cols)


class DevicePackedLinear(nn.Module):
    """``nn.Linear`` with its weights packed on a GPU.

    Args:
        layout: Of the packed weights; 8, 6 or 4 bits, or a kept encoding.
        data: uint8 ``[layout.nbytes]`` on the GPU, beginning at a multiple of 64 bytes; not copied.
        bias: ``[out_features]`` of any floating type, or ``None``.
        strips: Shared with the model's other layers.
        dtype: What :attr:`weight` is given in.
    """

    data: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        layout: _native.LinearLayout,
        data: torch.Tensor,
        bias: torch.Tensor | None,
        strips: Strips,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.out_features = layout.rows
        self.in_features = layout.cols
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self._tiles = -(-layout.rows // _TILE)
        self._groups = -(-layout.cols // GROUP_SIZE)
        self._strips = strips
        self._dtype = dtype
        kept = layout.encoding is not None
        self._kernels: Any = triton_kept if kept else triton_linear
        self._of_kept = (layout.super, value_table(data.device)) if kept else ()
        form = layout.encoding or layout.bits
        self._constants_of_few = _constants(form, has_bias=bias is not None)
        self._constants_of_unpack = _constants(form)

    @property
    def dtype(self) -> torch.dtype:
        """Type of hidden states in the model."""
        return self._dtype

    def extra_repr(self) -> str:
        kind = self.layout.encoding or f"{self.layout.bits} bits"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"

    @property
    def weight(self) -> torch.Tensor:
        """What the packed weights stand for, ``[out_features, in_features]`` in the type of the model; made
        anew each time.
        """
        whole = torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self.data.device)
        self._unpack(0, whole)
        return whole

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a token reads, the bias included."""
        return self.layout.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., in_features]``, in the type of ``x``."""
        flat = x.reshape(-1, self.in_features).contiguous()
        out = torch.empty(len(flat), self.out_features, dtype=x.dtype, device=x.device)
        if len(flat) > FEW_TOKENS:
            self._multiply(flat, out)
        elif len(flat):
            self._few(flat, out)
        return out.view(*x.shape[:-1], self.out_features)

    def _few(self, x: torch.Tensor, out: torch.Tensor) -> None:
        layout = self.layout
        self._kernels.few[(len(x), -(-layout.rows // ROWS))](
            self.data,
            x,
            self.data if self.bias is None else self.bias,
            out,
            layout.rows,
            layout.cols,
            self._tiles,
            self._groups,
            layout.sz,
            *self._of_kept,
            num_warps=_WARPS,
            **self._constants_of_few,
        )

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        rows, cols = self.out_features, self.in_features
        bias = None if self.bias is None else self.bias.to(x.dtype)
        step = self._strips.rows(cols, x.dtype)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            strip = self._strips.of(last - first, cols, x.dtype)
            self._unpack(first, strip)
            if bias is None:
                torch.mm(x, strip.T, out=out[:, first:last])
            else:
                torch.addmm(bias[first:last], x, strip.T, out=out[:, first:last])

    def _unpack(self, first: int, out: torch.Tensor) -> None:
        """Rows from ``first`` on, a multiple of 16, into ``out`` ``[rows, in_features]``."""
        layout = self.layout
        constants = self._constants_of_unpack
        self._kernels.unpack[(-(-len(out) // ROWS), -(-self._groups // constants["GROUPS"]))](
            self.data,
            out,
            first // _TILE,
            len(out),
            layout.cols,
            self._groups,
            layout.sz,
            *self._of_kept,
            num_warps=_WARPS,
            **constants,
        )


def _constants(form: int | str, *, has_bias: bool | None = None) -> dict[str, Any]:
    """Compile-time parameters for bits or a kept encoding; ``has_bias`` is one of ``few`` only."""
    encoding: dict[str, Any] = {"BITS": form} if isinstance(form, int) else kept_constants(form)
    bits = form if isinstance(form, int) else encoding["FIRST"] + encoding["SECOND"]
    groups = _CODES // (128 << (bits - 1).bit_length())  # a power of two, as axes have to be
    constants = {**encoding, "ROWS": ROWS, "GROUPS": groups}
    return constants if has_bias is None else {**constants, "HAS_BIAS": has_bias}


def launches(form: int | str, dtype: str, *, has_bias: bool) -> list[Kernel]:
    """The kernels of packed layers, for compiling them ahead.

    Args:
        form: 8, 6 or 4 bits, or a kept encoding.
        dtype: Of inputs, bias and output, torch's name.
        has_bias: Whether the layers have a bias.
    """
    names: Mapping[str, str] = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
    types = {"x": names[dtype], "bias": names[dtype] if has_bias else "*u8", "out": names[dtype]}
    plain = isinstance(form, int)
    table = {} if plain else {"table": "*fp32"}
    module: Any = triton_linear if plain else triton_kept
    return [
        Kernel(module.few, _constants(form, has_bias=has_bias), {**types, **table}, _WARPS),
        Kernel(module.unpack, _constants(form), {"out": names[dtype], **table}, _WARPS),
    ]


def first_launches(modules: Iterable[nn.Module], dtype: torch.dtype) -> list[Callable[[], None]]:
    """Launches of every kind of packed layer among some modules, for a token and for a prompt, so that their
    kernels are built; what they compute means nothing.

    Args:
        modules: Of a model; others are passed over.
        dtype: Of the hidden states.
    """
    layers = [module for module in modules if isinstance(module, DevicePackedLinear)]
    kinds = {
        (layer.out_features, layer.in_features, layer.layout.encoding, layer.bias is None): layer
        for layer in layers
    }
    return [
        partial(_launch_first, layer, tokens, dtype)
        for layer in kinds.values()
        for tokens in (1, FEW_TOKENS + 1)
    ]


def _launch_first(layer: DevicePackedLinear, tokens: int, dtype: torch.dtype) -> None:
    layer(torch.zeros(tokens, layer.in_features, dtype=dtype, device=layer.data.device))
