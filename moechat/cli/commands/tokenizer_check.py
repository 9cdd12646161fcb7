"""Refuses a model that texts cannot be encoded for, before it is converted or loaded."""

from __future__ import annotations

import os
from pathlib import Path

from moechat.cli.engine_import import import_engine
from moechat.config import user_paths
from moechat.errors import UsageError
from moechat.hub.model_ref import MANIFEST, USUAL_FORMS, ModelRef
from moechat.hub.names import resolve
from moechat.store.side_files import has_tokenizer

_WITHOUT = "`moechat plan` and `moechat bench` need none"


def require_tokenizer(model: str, bits: int | None) -> None:
    """Check that a model on this machine has a tokenizer.

    Args:
        model: Its name.
        bits: Bits that the user gave.

    Raises:
        UsageError: It has none.
        MoechatError: There is no such model, or a GGUF file is damaged.
    """
    ref = resolve(model, bits=bits)
    if ref.store is not None:
        if not _has_tokenizer(ref.store):
            raise UsageError(
                f"{ref.name} has no tokenizer, so it can neither read nor write text",
                hint=f"convert it again from a directory with its tokenizer.json; {_WITHOUT}",
            )
        return
    assert ref.checkpoint is not None
    if ref.checkpoint.is_dir():
        if not _has_tokenizer(ref.checkpoint):
            raise UsageError(
                f"{ref.checkpoint} has no tokenizer",
                hint="put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside its "
                f"weights; {_WITHOUT}",
            )
        return
    if not _is_converted(ref, bits):  # reading the vocabulary takes a while
        import_engine()
        from moechat.models.gguf_source import has_vocabulary

        if not has_vocabulary(ref.checkpoint):
            raise UsageError(
                f"{ref.checkpoint} has no tokenizer",
                hint="take another file of this model, or its repository with safetensors files",
            )


def _has_tokenizer(directory: Path) -> bool:
    try:
        return has_tokenizer(os.listdir(directory))
    except OSError:  # loading it gives the reason
        return True


def _is_converted(ref: ModelRef, bits: int | None) -> bool:
    forms = USUAL_FORMS if bits is None else (bits,)
    return any((ref.library_path(user_paths().models, form) / MANIFEST).exists() for form in forms)
