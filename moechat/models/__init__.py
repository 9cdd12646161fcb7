"""Adapters from transformers' model families to the block store and the native kernels."""

import importlib
from typing import Any


def _import_caches_without_hqq() -> None:
    """Import transformers' caches as if hqq were not installed, then restore the check.

    For a quantised KV cache, which moechat does not use, they would import hqq and with it torch's compiler.
    That takes a third of the time from program start to a loaded model.
    """
    names: Any = importlib.import_module("transformers.utils")
    available = names.is_hqq_available
    try:
        names.is_hqq_available = lambda *_: False
        importlib.import_module("transformers.cache_utils")
    finally:
        names.is_hqq_available = available


_import_caches_without_hqq()
