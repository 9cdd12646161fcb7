"""The context length of a model: its own limit, and what a user wants of it."""

from __future__ import annotations

from typing import Any

from moechat.errors import DoesNotFitError, UsageError

# For models without a stated limit.
_DEFAULT_CONTEXT = 4096


def stated_context(config: Any) -> int | None:
    """Most tokens of prompt and answer together by transformers' configuration; ``None``: it names none."""
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    return own if isinstance(own, int) and own > 1 else None


def context_length(stated: int | None, wanted: int | None) -> int:
    """Most tokens of prompt and answer together: ``wanted``, or the model's own limit.

    Args:
        stated: From :func:`stated_context`.
        wanted: By the user; ``None``: the model's own.

    Raises:
        UsageError: ``wanted`` is less than 2.
        DoesNotFitError: ``wanted`` exceeds the model's limit.
    """
    if wanted is None:
        return stated or _DEFAULT_CONTEXT
    if wanted < 2:
        raise UsageError(f"the context is {wanted} tokens; it must be at least 2")
    if stated is not None and wanted > stated:
        raise DoesNotFitError(
            f"the context is {wanted} tokens; the model was made for {stated}", hint=f"use at most {stated}"
        )
    return wanted
