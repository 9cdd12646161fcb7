"""A native ``forward`` for feed-forward parts, for a few tokens on the CPU.

The tokens of several conversations that are computed together have the bits of each alone: all of them take
this path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moechat import _native
from moechat.models.decode.products import native_products
from moechat.models.decode.shared_expert import Mlp
from moechat.models.element_types import ELEMENTS


def native_mlp(mlp: Mlp) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A ``forward`` for ``mlp.module``; ``None`` if native code does not read its weights."""
    products = native_products([*mlp.inputs, mlp.output])
    dtype = getattr(mlp.output, "dtype", None)
    if products is None or dtype not in ELEMENTS:
        return None
    try:
        *gate, up, down = products
        first = gate[0] if gate else None
        run = _native.Mlp(ELEMENTS[dtype], first, up, down, mlp.activation, joined=mlp.joined)
    except ValueError:  # the sizes of the projections do not match
        return None
    own, hooks = mlp.module.forward, mlp.hooks()
    columns, width, most = mlp.inputs[0].in_features, mlp.output.out_features, _native.MOST_STEP_TOKENS

    def forward(x: torch.Tensor) -> torch.Tensor:
        tokens = x.numel() // columns
        if (
            x.shape[-1] != columns
            or not 0 < tokens <= most
            or x.dtype is not dtype
            or not x.is_cpu
            or any(hooks)
        ):
            answer: torch.Tensor = own(x)
            return answer
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], width), dtype=dtype)
        run(x.data_ptr(), tokens, out.data_ptr())
        return out

    forward.__dict__["run"] = run
    return forward
