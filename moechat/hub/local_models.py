"""Models in local directories and files: block stores, checkpoints, GGUF files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from moechat.errors import ModelNotFoundError
from moechat.hub.gguf_parts import GGUF_SUFFIX, first_gguf_part
from moechat.hub.model_ref import MANIFEST, MAX_MANIFEST_BYTES, ModelRef, suggest_name

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # no store has files of these names
_MAX_LISTED = 8
_KINDS_HINT = "name the directory that holds config.json and the .safetensors files, or a .gguf file"
_SLUG_NAME = 60


def local_model(model: str, empty_error: type[ModelNotFoundError] = ModelNotFoundError) -> ModelRef:
    """The model at a path: a store, a checkpoint directory, or a GGUF file.

    Args:
        model: The path; ``~`` is expanded.
        empty_error: Raised where the path exists and holds no model.

    Raises:
        ModelNotFoundError: The path does not exist, cannot be opened, or holds no model or several.
    """
    try:
        path = Path(model).expanduser().resolve()
        is_directory, exists = path.is_dir(), path.exists()
        is_store, has_config = _is_store(path), (path / _CONFIG).is_file()
        gguf_files = [] if is_store or has_config else _gguf_models(path)
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long, no home of that user
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"the directory {model} cannot be opened: {reason}") from error
    if not exists:
        kind = "file" if path.suffix.lower() == GGUF_SUFFIX else "directory"
        raise ModelNotFoundError(f"there is no {kind} {path}", hint=suggest_name(model) or _KINDS_HINT)
    if not is_directory and not gguf_files:
        raise empty_error(
            f"{path} is neither a directory nor a .gguf file",
            hint=_KINDS_HINT,
        )
    if len(gguf_files) > 1:
        raise ModelNotFoundError(
            f"{path} holds {len(gguf_files)} GGUF models",
            hint=f"name one of them: {', '.join(map(str, gguf_files[:_MAX_LISTED]))}",
        )
    if gguf_files:
        path = gguf_files[0]
    name = (path.stem if gguf_files else path.name) or "root"
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    slug = f"{_safe(name)}-{digest}"
    if is_store:
        return ModelRef(name=name, slug=slug, store=path)
    if not has_config and not gguf_files:
        raise empty_error(
            f"{path} holds no model: there is neither {_CONFIG} nor {MANIFEST} nor a .gguf file",
            hint=_KINDS_HINT,
        )
    return ModelRef(name=name, slug=slug, checkpoint=path)


def _gguf_models(path: Path) -> list[Path]:
    """The GGUF models at a path, a file or a directory; of a model in several parts the first."""
    if path.is_file():
        found = [path] if path.suffix.lower() == GGUF_SUFFIX else []
    else:
        found = sorted(entry for entry in path.glob("*") if entry.suffix.lower() == GGUF_SUFFIX)
    first = {first_gguf_part(entry.name): entry for entry in reversed(found)}
    return [entry.with_name(name) for name, entry in sorted(first.items())]


def _is_store(path: Path) -> bool:
    """Whether a directory is a block store, perhaps a damaged one.

    Web exports of checkpoints have a ``manifest.json`` too, so beside weights it must have our fields.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        return False
    if not any((path / name).exists() for name in _WEIGHTS):
        return True
    try:
        with open(manifest, "rb") as file:
            content = json.loads(file.read(MAX_MANIFEST_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "format_version" in content


def _safe(name: str) -> str:
    """A part of a file name: ASCII letters, digits and single dashes, so never the ``--`` of a hub name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:_SLUG_NAME].rstrip("-.") or "model"
