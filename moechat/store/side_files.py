"""Files copied into a store besides the weights: tokenizer, generation settings, templates, licence."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path

from moechat.errors import CheckpointError
from moechat.store.source_files import TEMPLATES, require_inside, require_regular

MAX_SIDE_FILE_BYTES = 256 << 20
# Any of them is a tokenizer.
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"})

# It only says what to load early, and may be large.
_PREDICTOR = "preload.safetensors"
# Allow-lists: code and pickles are never on them.
_INPUTS = (
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    _PREDICTOR,
)
# For people to read: no result depends on them, so they are not part of a source's identity.
_DOCUMENTS = (
    "README.md",
    "LICENSE",
    "LICENSE.*",
    "LICENSE-*",
    "LICENCE",
    "LICENCE.*",
    "NOTICE",
    "NOTICE.*",
    "USE_POLICY.md",
)
_NEVER = ("*.py", "*.pyc", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.so")


def is_kept(name: str) -> bool:
    """Whether a file of this name is copied into a store; never code or a pickle."""
    return _is_allowed(name, _INPUTS + _DOCUMENTS)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether a tokenizer is among files of these names."""
    return not _TOKENIZERS.isdisjoint(names)


def is_input(name: str) -> bool:
    """Whether results depend on a file of this name: tokenizer, templates, settings."""
    return _is_allowed(name, _INPUTS) and name != _PREDICTOR


def is_document(name: str) -> bool:
    """Whether a file of this name is copied for people only: licence, card, notices."""
    return _is_allowed(name, _DOCUMENTS)


def side_files(directory: Path, *, documents: bool) -> dict[str, Path]:
    """Side files of a checkpoint directory, symbolic links (hub cache) resolved.

    Code, pickles, and names with unprintable characters never count.

    Args:
        directory: The checkpoint.
        documents: Include licence, card and notices.

    Returns:
        Name relative to the checkpoint -> real file.

    Raises:
        CheckpointError: A file is larger than 256 MiB, a link out of the directory, or a FIFO, a socket or a
            device; the message names it.
    """
    found: dict[str, Path] = {}
    names = os.listdir(directory)
    templates = directory / TEMPLATES
    require_inside(templates, directory)
    if templates.is_dir():
        names += [f"{TEMPLATES}/{entry}" for entry in os.listdir(templates)]
    for name in sorted(names):
        path = directory / name
        if not _is_allowed(name, _INPUTS + _DOCUMENTS * documents) or path.is_dir():
            continue
        require_inside(path, directory)
        require_regular(path)
        real = path.resolve()
        if not real.is_file():  # a link to nothing
            continue
        size = real.stat().st_size
        if size > MAX_SIDE_FILE_BYTES:
            raise CheckpointError(f"{directory / name} has {size} bytes, more than {MAX_SIDE_FILE_BYTES}")
        found[name] = real
    return found


def _is_allowed(name: str, patterns: tuple[str, ...]) -> bool:
    # Control characters in a name would reach the terminal in a message.
    return (
        name.isprintable()
        and any(_matches(name, pattern) for pattern in patterns)
        and not any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _NEVER)
    )


def _matches(name: str, pattern: str) -> bool:
    # In fnmatch '*' matches '/' too, so the number of directories is compared separately.
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
