"""Dense layers as native code multiplies by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moechat import _native
from moechat.models.linear import PackedLinear, StoredLinear


def native_products(modules: Iterable[Any]) -> list[_native.DenseProduct] | None:
    """The products of some layers; ``None`` if one of them keeps weights that native code does not read."""
    found = list(modules)
    if not all(isinstance(module, StoredLinear | PackedLinear) for module in found):
        return None
    return [module.product() for module in found]
