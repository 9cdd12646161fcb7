"""Loads a model's tokenizer and generation settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer

from moechat.confined.tokenising import panics_reported, require_bounded_tokenizer
from moechat.confined.tokenizer_rules import require_loadable
from moechat.errors import (
    DoesNotFitError,
    ModelRulesError,
    StoreDamagedError,
    UnsupportedModelError,
    one_line,
)
from moechat.models.gguf_splits import LINEAR_PATTERNS
from moechat.models.side_file_checks import (
    GENERATION,
    read_generation_settings,
    require_tokenizer_files,
    wrong_value,
)
from moechat.store.checkpoint_files import CONFIG_FILE, read_config
from moechat.store.file_problems import failures_explained
from moechat.store.side_files import has_tokenizer


def require_assets(directory: Path) -> None:
    """Check, before a long conversion, that tokenizer and generation settings can be loaded where they exist.

    Raises:
        UnsupportedModelError: As :func:`load_tokenizer` and :func:`load_generation_config`.
    """
    load_generation_config(directory)
    load_tokenizer(directory)


def load_tokenizer(directory: Path, *, named: Path | None = None) -> Any:
    """Load the transformers tokenizer in ``directory``; ``None`` if there is none.

    Args:
        directory: With its files.
        named: What messages call the directory; ``None``: as it is.

    Raises:
        UnsupportedModelError: Its files cannot be used, or require custom code.
        StoreDamagedError: The disk fails.
        DoesNotFitError: The system refuses memory, or open files.
        ModelRulesError: Its rules have no reasonable bound; see :mod:`moechat.confined.tokenizer_rules`.
    """
    if not has_tokenizer(_names_in(directory)):
        return None
    require_tokenizer_files(directory)
    if (directory / CONFIG_FILE).exists():
        read_config(directory)  # transformers reads it too
    require_loadable(directory / "tokenizer.json")
    where = directory if named is None else named
    try:
        with failures_explained(where), panics_reported(f"{where}"):
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
        _ = tokenizer.all_special_ids  # fails without end if unk_token is no token
        require_bounded_tokenizer(tokenizer, f"{where}", LINEAR_PATTERNS)
        tokenizer.name_or_path = str(where)
        return tokenizer
    except (ModelRulesError, DoesNotFitError, StoreDamagedError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"the tokenizer in {where} cannot be used: {type(error).__name__}: {one_line(error)}",
            hint="fetch its files again (tokenizer.json, tokenizer_config.json), from the model's repository",
        ) from error


def _names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def load_generation_config(directory: Path) -> GenerationConfig | None:
    """Load the model's ``generation_config.json``; ``None`` if there is none.

    Raises:
        UnsupportedModelError: The file cannot be read, or transformers does not take a value; the message
            names the key.
    """
    settings = read_generation_settings(directory)
    if settings is None:
        return None
    try:
        return GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers raises many types for malformed values
        path = directory / GENERATION
        for key, value in settings.items():
            if not _is_taken(key, value):
                raise wrong_value(path, key, value, one_line(error)) from error
        raise UnsupportedModelError(
            f"{path} cannot be used: {one_line(error)}", hint="fetch it again, or remove it"
        ) from error


def _is_taken(key: str, value: Any) -> bool:
    try:
        GenerationConfig(**{key: value})  # type: ignore[no-untyped-call]
    except Exception:
        return False
    return True


def stop_tokens(generation: GenerationConfig | None, config: Any, tokenizer: Any) -> frozenset[int]:
    """All end-of-sequence tokens in the generation settings, the configuration and the tokenizer."""
    found: set[int] = set()
    for source in (generation, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(
            token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)
        )
    return frozenset(found)
