"""Makes dense products independent of the number of threads.

MKL divides the columns of a product among its threads and uses another kernel, which rounds differently, for
narrow shares. With ``MKL_CBWR=AUTO,STRICT`` (see ``moechat/__init__.py``) two cases remain, measured with
torch 2.13 on an AMD CPU for 1 to 16 threads: products of 2 or 3 rows, and those with fewer than 12 columns
per thread. Products of a single row do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

# Passes of 2 to this many tokens use one thread.
_FEW_TOKENS = 3
_COLUMNS_PER_THREAD = 16


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give torch ``count`` threads in the block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(needed: bool = True) -> AbstractContextManager[None]:
    """Limit torch to one thread in the block, if ``needed``."""
    return torch_threads(1) if needed else nullcontext()


def is_thread_invariant(columns: int) -> bool:
    """Whether a product with ``columns`` outputs rounds the same with torch's threads as with one."""
    return torch.get_num_threads() <= columns // _COLUMNS_PER_THREAD


def thread_invariant_pass(tokens: int) -> Any:
    """Context manager that makes a pass of ``tokens`` tokens independent of the number of threads."""
    return one_thread(1 < tokens <= _FEW_TOKENS)


def make_thread_invariant(model: nn.Module) -> None:
    """Limit modules with few outputs, such as routers, to one thread if threads would change their rounding.

    Decided at every call, because the number of threads can change when another model is loaded.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding):
            module.forward = _thread_invariant(module.forward, weight.shape[0])


def _thread_invariant(forward: Callable[..., Any], columns: int) -> Callable[..., Any]:
    @wraps(forward)  # inspect.signature then shows the module's parameters
    def call(*arguments: Any, **named: Any) -> Any:
        # Overhead for a wide module is well under a microsecond.
        if is_thread_invariant(columns):
            return forward(*arguments, **named)
        with one_thread():
            return forward(*arguments, **named)

    return call
