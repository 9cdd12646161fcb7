"""Loads a model by name: opens or converts the store, plans the memory, loads the weights."""

from moechat.loading.load import gather_knowledge, load_model
from moechat.loading.model import LoadedModel, Progress
from moechat.loading.stores import open_store, require_in_place

__all__ = ["LoadedModel", "Progress", "gather_knowledge", "load_model", "open_store", "require_in_place"]
