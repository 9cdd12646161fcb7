"""Writes the tuned model as a checkpoint directory that transformers and moechat read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moechat.atomic_file import sync_directory
from moechat.errors import MoechatError, UsageError
from moechat.predict.preload import PRELOAD_FILE, PreloadPredictor
from moechat.store.side_files import side_files

FACTS_FILE = "tuning.json"
_SHARD_BYTES = 4 << 30
_CARD = "README.md"


def require_absent(out: Path) -> None:
    """Check that a directory can be made.

    Raises:
        UsageError: It exists, or its parent does not or cannot be written.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} already exists", hint="choose another --out, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"there is no directory {out.parent} for {out.name}")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"{out} cannot be made: no permission to write to {out.parent}")


def write_checkpoint(
    out: Path,
    model: Any,
    source: Path,
    dtype: torch.dtype,
    facts: Mapping[str, Any],
    predictor: PreloadPredictor | None,
) -> None:
    """Write a checkpoint; it appears complete or not at all.

    Args:
        out: The directory, which must not exist.
        model: The transformers model with merged adapters; its weights are converted in place.
        source: Directory of the original, whose tokenizer, template and documents are copied.
        dtype: Of the weights.
        facts: Settings and figures, for ``tuning.json`` and the model card.
        predictor: Saved beside the weights.

    Raises:
        MoechatError: The disk is full or cannot be written.
        UsageError: ``out`` exists.
    """
    require_absent(out)
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        model.to(dtype)
        model.config.use_cache = True
        model.save_pretrained(temporary, max_shard_size=_SHARD_BYTES)
        for name, path in side_files(source, documents=True).items():
            if name == PRELOAD_FILE:  # of an earlier tuning
                continue
            target = temporary / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if predictor is not None:
            predictor.save(temporary / PRELOAD_FILE)
        (temporary / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        _extend_card(temporary / _CARD, facts)
        mode = (temporary / FACTS_FILE).stat().st_mode
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(mode)  # safetensors gives weights to their owner alone
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        os.rename(temporary, out)
        sync_directory(out.parent)
    except OSError as problem:
        raise MoechatError(
            f"the tuned model cannot be written to {out}: {problem.strerror or problem}",
            hint="make room on the disk; the same command goes on from the last state",
        ) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extend_card(path: Path, facts: Mapping[str, Any]) -> None:
    """Say in the model card that the weights were tuned, so that nobody takes them for the original."""
    card = path.read_text(encoding="utf-8", errors="replace").rstrip() + "\n\n" if path.exists() else ""
    card += (
        "## Tuned\n\n"
        f"These weights are those of {facts['model']}, fine-tuned by `moechat tune` so that each sequence "
        f"uses few experts. They answer differently from it. Settings and figures: `{FACTS_FILE}`.\n"
    )
    path.write_text(card, encoding="utf-8")
