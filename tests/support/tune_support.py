"""Helpers of the tests of tuning: tiny models, data, and runs without a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny import BYTE_VOCABULARY, tiny_config, write_byte_tokenizer, write_tiny_checkpoint

from moechat.hub.names import resolve
from moechat.tune.run import TuneJob, TuneResult, tune
from moechat.tune.settings import TuneSettings

SMALL = TuneSettings(
    epochs=2,
    learning_rate=5e-3,
    batch=3,
    max_tokens=40,
    lora_rank=2,
    lora_alpha=4,
    held_out=0.25,
    preload_hidden=8,
    preload_epochs=2,
)


def write_model(directory: Path, family: str = "qwen3_moe", shape: int = 0, **changes: Any) -> Path:
    """A tiny random model with a byte tokenizer."""
    config = tiny_config(family, shape, **{"vocab_size": BYTE_VOCABULARY, **changes})
    write_tiny_checkpoint(directory, config)
    write_byte_tokenizer(directory)
    return directory


def write_data(path: Path, lines: int = 12) -> Path:
    """Chats of different lengths, and a text."""
    entries: list[dict[str, Any]] = [
        {"prompt": f"{at}?" + "?" * (at % 4), "answer": "abc"[at % 3] * (3 + at)} for at in range(lines - 1)
    ]
    entries.append({"text": "a text without a prompt"})
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


class Events:
    """Keeps what a run reports; ``on_step`` is called with the number of steps done."""

    def __init__(self, on_step: Callable[[int], None] = lambda done: None) -> None:
        self.phases: list[str] = []
        self.notices: list[str] = []
        self._on_step = on_step

    def phase(self, title: str, total: int) -> None:
        self.phases.append(title)

    def advance(self, done: int, detail: str = "") -> None:
        if self.phases[-1] == "tuning":
            self._on_step(done)

    def notice(self, text: str) -> None:
        self.notices.append(text)


def run(
    model: Path,
    data: Path,
    out: Path,
    events: Events | None = None,
    *,
    micro_batch: int = 2,
    save_every_s: float = 1e9,
    **changes: Any,
) -> TuneResult:
    """Tune on the CPU in this process."""
    job = TuneJob(
        resolve(str(model)),
        data,
        out,
        replace(SMALL, **changes),
        micro_batch=micro_batch,
        cpu=True,
        save_every_s=save_every_s,
    )
    return tune(job, lambda progress: None, events or Events())


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")
