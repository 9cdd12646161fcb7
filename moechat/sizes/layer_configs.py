"""Configurations of single decoder layers, for families whose layers differ (Gemma 4: the size of a head)."""

from __future__ import annotations

from typing import Any


def layer_configs(text: Any) -> list[Any]:
    """The configuration of each decoder layer: the same object for all of them if the layers are alike.

    Args:
        text: Configuration of a text model. transformers refuses to read from it what its layers differ in.
    """
    if not getattr(text, "is_heterogeneous", False):
        return [text] * int(text.num_hidden_layers)
    return list(text.per_layer_config)


def different_configs(text: Any) -> list[Any]:
    """Those of :func:`layer_configs` without repetitions of one object."""
    return list({id(each): each for each in layer_configs(text)}.values())
