"""The state of an unfinished run, so that the same command goes on."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moechat.atomic_file import replacing
from moechat.errors import MoechatError, StoreDamagedError, UsageError, one_line

STATE_FILE = "state.pt"
_VERSION = 1


def state_directory(out: Path) -> Path:
    """The directory beside ``out`` that holds the state until the run has finished."""
    return out.parent / f".{out.name}.tuning"


def save_state(
    directory: Path,
    identity: Mapping[str, Any],
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
) -> None:
    """Replace the state at once or not at all.

    Args:
        directory: See :func:`state_directory`; made if needed.
        identity: What the run depends on: settings, data, model.
        trained: The trained parameters.
        optimizer: Theirs.
        progress: Numbers and texts, such as the next step.

    Raises:
        MoechatError: It cannot be written.
    """
    state = {
        "version": _VERSION,
        "identity": dict(identity),
        "progress": dict(progress),
        "trained": {name: parameter.detach().cpu() for name, parameter in trained.items()},
        "optimizer": optimizer.state_dict(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        with replacing(directory / STATE_FILE) as file:
            file.write(buffer.getbuffer())
    except OSError as problem:
        raise MoechatError(
            f"the state of the run cannot be written to {directory}: {problem.strerror or problem}",
            hint="make room on the disk; the same command goes on from the last state",
        ) from problem


def read_state(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of an earlier run with the same identity; ``None`` if there is none.

    Raises:
        UsageError: It belongs to other settings, data or another model; the message names the differences.
        StoreDamagedError: It cannot be read.
    """
    path = directory / STATE_FILE
    if not path.exists():
        return None
    hint = f"remove {directory} to begin again"
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        known = state["identity"] if state["version"] == _VERSION else None
    except Exception as error:  # torch.load raises many types
        raise StoreDamagedError(
            f"{path} cannot be read: {type(error).__name__}: {one_line(error)}", hint=hint
        ) from error
    if known is None:
        raise UsageError(f"{path} is of another version of moechat", hint=hint)
    differences = [
        f"{name.replace('_', ' ')} was {_short(known.get(name))}, is {_short(identity.get(name))}"
        for name in sorted(known.keys() | identity.keys())
        if known.get(name) != identity.get(name)
    ]
    if differences:
        raise UsageError(
            f"an unfinished run in {directory} has other settings: {'; '.join(differences)}",
            hint=f"finish it with its own settings, choose another --out, or remove {directory}",
        )
    return dict(state)


def restore(
    state: Mapping[str, Any], trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Load a state into the parameters and their optimizer.

    Raises:
        StoreDamagedError: They do not fit.
    """
    try:
        if state["trained"].keys() != trained.keys():
            raise ValueError("its parameters have other names")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["trained"][name])
        optimizer.load_state_dict(state["optimizer"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise StoreDamagedError(f"the state of the run does not fit the model: {one_line(error)}") from error


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
