"""From a name to a model that can run: open or convert the store, plan the memory, load the weights."""

from moechat.loading.model import DTYPES, LoadedModel, Progress, dense_type, parse_budget
from moechat.loading.on_cpu import load_model
from moechat.loading.stores import open_store, require_in_place

__all__ = [
    "DTYPES",
    "LoadedModel",
    "Progress",
    "dense_type",
    "load_model",
    "open_store",
    "parse_budget",
    "require_in_place",
]
