"""The tensors of a recorded pass that are in use while the experts of a layer are computed.

Graphs that share memory reuse what an earlier one does not need any more. That is right as long as they are
replayed once each, in order. Where a graph may be replayed too early, with inputs that mean nothing, and
again once its inputs are there, all that lives from one graph to another has to keep its memory for itself.
"""

# torch does not annotate these classes.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Crossing(TorchDispatchMode):
    """Keeps every tensor of a pass that is alive at a cut.

    A first pass, which is not recorded, shows which tensors these are: they are numbered in the order in
    which operations make them, the same in every pass. The second pass keeps them.

    Attributes:
        kept: Tensors of the second pass that live from one graph to another.
        alike: The second pass has made as many tensors as the first before each cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self._alive: set[int] = set()
        self._made: list[tuple[int, StorageWeakRef]] = []
        self._count = 0
        self._cuts: list[int] = []
        self._expected: list[int] | None = None
        self._unseen = False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave out what is made in the block: recording a graph makes tensors of its own."""
        before, self._unseen = self._unseen, True
        try:
            yield
        finally:
            self._unseen = before

    def second_pass(self) -> None:
        """What follows is the second pass."""
        self._expected, self._cuts = self._cuts, []
        self._made.clear()
        self._count = 0

    @property
    def alike(self) -> bool:
        """See the class."""
        return self._expected == self._cuts

    def cut(self) -> None:
        """A graph ends here, and another begins."""
        self._cuts.append(self._count)
        if self._expected is None:
            self._made = [(number, storage) for number, storage in self._made if not storage.expired()]
            self._alive.update(number for number, _ in self._made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation, and number the tensors with memory of their own that it returns."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._unseen:
            return result
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage()._cdata in given:
                continue
            if self._expected is None:
                self._made.append((self._count, StorageWeakRef(leaf.untyped_storage())))
            elif self._count in self._alive:
                self.kept.append(leaf)
            self._count += 1
        return result
