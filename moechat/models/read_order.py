"""Finds which dense weights a model reads before the routed experts of each layer.

The model runs on the meta device, where no weight has values, and every weight that a function of torch
receives is noted. So nothing depends on how a family names or arranges its modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moechat.models.light_meta import light_meta
from moechat.models.quiet import without_warnings
from moechat.models.rotary_scaling import without_scaling
from moechat.models.skeleton import Skeleton

_WINDOWS, _TOKENS = 2, 8


def first_reads(skeleton: Skeleton) -> dict[str, int] | None:
    """The first expert layer before whose experts each dense weight is read.

    Args:
        skeleton: A model on the meta device.

    Returns:
        Ordinal of the expert layer by name of the parameter or buffer, without those that are read only after
        the experts of the last layer; ``None`` if the model cannot run such a pass.
    """
    model = skeleton.model
    tensors = [*model.named_parameters(), *model.named_buffers()]
    noted = _Reads({id(tensor): name for name, tensor in tensors})

    def skip_experts(hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        noted.layer += 1
        return torch.empty_like(hidden)

    try:
        with (
            skeleton.experts_computed_by(skip_experts),
            light_meta(),
            without_scaling(model),
            without_warnings(),
            torch.inference_mode(),
            noted,
        ):
            ids = torch.zeros((_WINDOWS, _TOKENS), dtype=torch.int64, device="meta")
            # Without a cache, families look for several texts in one row, which needs values.
            model(input_ids=ids, use_cache=True)
    except Exception:  # depends on the family
        return None
    count = len(skeleton.experts)
    return None if noted.layer != count else {name: at for name, at in noted.first.items() if at < count}


class _Reads(TorchFunctionMode):
    """Notes the first read of each tensor.

    Attributes:
        layer: Expert layers that were passed.
        first: Value of ``layer`` at the first read, by name.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.layer = 0
        self.first: dict[str, int] = {}
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the tensors among the arguments, then call the function."""
        kwargs = kwargs or {}
        for tensor in _tensors((*args, *kwargs.values())):
            name = self._names.get(id(tensor))
            if name is not None:
                self.first.setdefault(name, self.layer)
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
