"""Rotary frequencies that depend on the longest position of a pass, and the prompts that they limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from moechat.sizes.cache_shape import UNLIMITED


def part_limit(model: nn.Module, config: Any) -> tuple[int, str]:
    """Most tokens of a prompt whose keys and values do not depend on the number of tokens after them; and why
    there is a limit.
    """
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None) is not None:
        return 0, "its attention is cut into chunks of tokens"
    kinds = {kind for kind, _, _ in _rotary_scaling(model)}
    if "dynamic" in kinds:
        return 0, "its rotary frequencies depend on the longest position"
    if "longrope" in kinds:
        # Beyond this length all tokens of a pass use other rotary frequencies.
        parameters = getattr(text, "rope_parameters", None) or {}
        limit = parameters.get("original_max_position_embeddings")
        limit = limit or getattr(text, "original_max_position_embeddings", None)
        limit = limit if isinstance(limit, int) else 0
        return limit, f"its rotary frequencies change beyond {limit} tokens"
    return UNLIMITED, ""


def _rotary_scaling(model: nn.Module) -> list[tuple[str, Any, dict[str, Any]]]:
    """Modules whose rotary frequencies depend on the longest position: kind, module, its parameters."""
    found = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        for name in [kind for kind in kinds if kind in ("longrope", "dynamic")]:
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
            found.append((name, module, parameters if isinstance(parameters, dict) else {}))
    return found


@contextmanager
def without_scaling(model: nn.Module) -> Iterator[None]:
    """Disable the choice of rotary frequencies by position, which needs values that meta tensors do
    not have.
    """
    with ExitStack() as undo:
        for _, module, parameters in _rotary_scaling(model):
            before = dict(vars(module))
            undo.callback(vars(module).update, before)
            undo.callback(parameters.update, dict(parameters))
            module.rope_type = "default"
            module.rope_init_fn = module.compute_default_rope_parameters
            parameters["rope_type"] = "default"
        yield
