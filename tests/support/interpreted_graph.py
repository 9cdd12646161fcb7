"""CUDA graphs without a GPU: every operation of torch, and every launch of an interpreted kernel, is noted
with its tensors, and executed again.

Decisions of Python and the tensors stay the same, as on a GPU. As there, recording computes
nothing: what was computed on the way, which the next operations need to be called at all, is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

# They bring values or sizes to the host, and so wait for the GPU; so does the last, which is what
# `torch.tensor` of Python's numbers is seen as: they go to the GPU from memory that is not pinned.
REFUSED = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "lift_fresh",
)


@dataclass
class Operation:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: list[torch.Tensor]
    fresh: list[bool]  # memory of its own, not an argument's


@dataclass
class Launch:
    """Of a kernel: not run while it is recorded."""

    executor: GridExecutor
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


LAUNCH = GridExecutor.__call__


def _launch_unseen(executor, *arguments, **keywords):
    """The interpreter computes by torch; a GPU's kernels are no operations of torch."""
    with _disable_current_modes():
        LAUNCH(executor, *arguments, **keywords)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation | Launch] = []

    def __enter__(self):
        def note(executor, *arguments, **keywords):
            self.operations.append(Launch(executor, arguments, keywords))

        self.before, GridExecutor.__call__ = GridExecutor.__call__, note
        return super().__enter__()

    def __exit__(self, *exc):
        GridExecutor.__call__ = self.before
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        by_mask = name.startswith("index") and any(tensor.dtype is torch.bool for tensor in given)
        if name in REFUSED or by_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        fresh = [tensor.untyped_storage().data_ptr() not in memory for tensor in results]
        self.operations.append(Operation(func, args, kwargs, results, fresh))
        return result


class InterpretedGraph:
    """See ``moechat.offload.graphs.Graph``."""

    def __init__(self, graphs: InterpretedGraphs) -> None:
        self.graphs = graphs
        self.recorder: Recorder | None = None
        self.operations: list[Operation | Launch] = []
        # A part of the model's pass, not only kernels over blocks and memory for them.
        self.of_model = False

    def begin(self) -> None:
        assert self.recorder is None
        assert self.graphs.recording is None, "recordings do not nest"
        torch.zeros(1, dtype=torch.int64)  # as torch does, for the seed of random numbers
        self.recorder = self.graphs.recording = Recorder()
        self.recorder.__enter__()

    def _stop(self) -> None:
        assert self.recorder is not None
        assert self.graphs.recording is self.recorder
        self.recorder.__exit__(None, None, None)
        self.graphs.recording = None

    def end(self) -> None:
        self._stop()
        self.operations = self.recorder.operations
        self.of_model = any(
            isinstance(operation, Operation)
            and operation.function.overloadpacket.__name__ not in ("empty", "detach")
            for operation in self.operations
        )
        for operation in self.operations:
            if isinstance(operation, Launch):
                continue
            for tensor, fresh in zip(operation.results, operation.fresh, strict=True):
                if fresh and tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    def abandon(self) -> None:
        if self.graphs.recording is not None:
            self._stop()
        self.graphs.abandoned += 1

    def replay(self) -> None:
        assert self.graphs.recording is None
        self.graphs.replayed += self.of_model
        self.graphs.all_replayed += 1
        with torch._C._DisableTorchDispatch():
            for operation in self.operations:
                if isinstance(operation, Launch):
                    LAUNCH(operation.executor, *operation.arguments, **operation.keywords)
                    continue
                if not any(operation.fresh) and not operation.function._schema.is_mutable:
                    continue  # a view
                found = operation.function(*operation.arguments, **operation.keywords)
                again = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
                for tensor, fresh, value in zip(operation.results, operation.fresh, again, strict=True):
                    if fresh:
                        tensor.copy_(value)


class InterpretedGraphs:
    """See ``moechat.offload.graphs.Graphs``."""

    def __init__(self) -> None:
        self.recording: Recorder | None = None
        self.replayed = 0  # parts of the model's pass
        self.all_replayed = 0
        self.abandoned = 0
        self.made: list[InterpretedGraph] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        before, GridExecutor.__call__ = GridExecutor.__call__, _launch_unseen
        try:
            yield
        finally:
            GridExecutor.__call__ = before

    def make_room(self) -> None:
        assert self.recording is None

    def new(self) -> InterpretedGraph:
        self.made.append(InterpretedGraph(self))
        return self.made[-1]
