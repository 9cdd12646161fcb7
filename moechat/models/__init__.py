"""Family adapters: what transformers knows about a model, in the terms of the block store."""

import importlib
from typing import Any


def _import_caches_without_hqq() -> None:
    """Import transformers' caches as if hqq were not installed, then undo the pretence.

    For a quantised KV cache that moechat does not use, they would import hqq, and with it torch's compiler: a
    third of the time from the start of the program to a loaded model.
    """
    names: Any = importlib.import_module("transformers.utils")
    available = names.is_hqq_available
    try:
        names.is_hqq_available = lambda *_: False
        importlib.import_module("transformers.cache_utils")
    finally:
        names.is_hqq_available = available


_import_caches_without_hqq()
