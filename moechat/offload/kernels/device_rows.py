"""Keys and values in 8 bits on a GPU: packing and unpacking rows, with the bytes and values of the CPU."""

from __future__ import annotations

import torch

from moechat.models.packed_rows import row_bytes
from moechat.offload.kernels import triton_rows

_ROWS = 16
_WARPS = 4


class DeviceRows:
    """A :class:`moechat.models.packed_rows.RowCodec` for tensors on a GPU."""

    def pack(self, states: torch.Tensor, rows: torch.Tensor) -> None:
        """See :func:`moechat.models.packed_rows.pack`."""
        _, heads, tokens, dim = states.shape
        triton_rows.pack[(-(-tokens // _ROWS), heads)](
            states,
            rows,
            tokens,
            states.stride(1),
            states.stride(2),
            rows.stride(1),
            num_warps=_WARPS,
            **_constants(dim),
        )

    def unpack(self, rows: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`moechat.models.packed_rows.unpack`."""
        _, heads, tokens, _ = rows.shape
        out = torch.empty((1, heads, tokens, dim), dtype=dtype, device=rows.device)
        triton_rows.unpack[(-(-tokens // _ROWS), heads)](
            rows, out, tokens, rows.stride(1), num_warps=_WARPS, **_constants(dim)
        )
        return out


def _constants(dim: int) -> dict[str, int]:
    assert row_bytes(dim) == dim + -(-dim // 32)
    return {"DIM": dim, "WIDTH": max(32, 1 << (dim - 1).bit_length()), "ROWS": _ROWS}
