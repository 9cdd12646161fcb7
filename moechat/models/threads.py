"""Dense products that do not depend on the number of threads.

MKL shares the columns of a product among its threads, and takes another kernel, which rounds differently,
where a share is narrow. With ``MKL_CBWR=AUTO,STRICT`` (see ``moechat/__init__.py``) this is left, measured
with torch 2.13 on an AMD CPU for 1 to 16 threads: products of 2 or 3 rows, and those with fewer than 12
columns a thread. Products of a single row are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

# Passes of 2 to this many tokens are computed by one thread.
_FEW_TOKENS = 3
_COLUMNS_A_THREAD = 16


@contextmanager
def one_thread(needed: bool = True) -> Iterator[None]:
    """Let torch use one thread inside, where ``needed``."""
    threads = torch.get_num_threads()
    if not needed or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def steady_columns(columns: int) -> bool:
    """Whether a product with so many outputs rounds the same with torch's threads as with one."""
    return torch.get_num_threads() <= columns // _COLUMNS_A_THREAD


def steady_pass(tokens: int) -> Any:
    """Context for a pass of ``tokens`` tokens in which the number of threads makes no difference."""
    return one_thread(1 < tokens <= _FEW_TOKENS)


def steady_modules(model: nn.Module) -> None:
    """Let modules with so few outputs that threads would make a difference, such as routers, use one
    thread.

    What is few is decided at every call: the number of threads belongs to the process, and whoever loads
    another model changes it.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding):
            module.forward = _steady(module.forward, weight.shape[0])


def _steady(forward: Callable[..., Any], columns: int) -> Callable[..., Any]:
    @wraps(forward)  # whoever asks for its parameters sees those of the module
    def call(*arguments: Any, **named: Any) -> Any:
        # Well under a microsecond where the module is wide.
        if steady_columns(columns):
            return forward(*arguments, **named)
        with one_thread():
            return forward(*arguments, **named)

    return call
