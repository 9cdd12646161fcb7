"""Adapters from transformers' model families to the block store and the native kernels."""

import importlib

from moechat.models.light_imports import light_transformers

with light_transformers():
    for _name in ("cache_utils", "masking_utils", "modeling_utils"):
        importlib.import_module(f"transformers.{_name}")
