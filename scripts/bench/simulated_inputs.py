"""Traces, machines and models of the scripts that simulate, from their command lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from made_routing import made_model

from moechat.errors import UsageError
from moechat.hardware.profile import HardwareProfile
from moechat.hardware.profile_file import read_profile, reference_profile
from moechat.routing.trace import Trace
from moechat.simulate.simulated_model import SimulatedModel, model_for, shape_of_trace


def numbers(option: str, text: str) -> list[float]:
    """Numbers separated by commas, at least one."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} is {text!r}", hint="write numbers separated by commas") from None


def split_paths(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Traces and machine files among the paths, directories replaced by the traces in them."""
    traces: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.npz"))
            if not found:
                raise UsageError(f"there is no trace (.npz) in {path}")
            traces += found
        elif path.suffix != ".toml":
            traces.append(path)
    return traces, [path for path in paths if path.suffix == ".toml" and not path.is_dir()]


def profiles_of(names: str, files: Sequence[Path]) -> tuple[HardwareProfile, ...]:
    """Shipped machines by name (``none``: none of them), then those in files."""
    shipped = [] if names == "none" else [reference_profile(name) for name in names.split(",")]
    profiles = (*shipped, *(read_profile(file) for file in files))
    if not profiles:
        raise UsageError("there is no machine", hint="name one with --profiles, or give a .toml file")
    return profiles


def own_model(trace: Trace, bits: int) -> SimulatedModel:
    """The known model of a trace's shape, or a made one."""
    try:
        name = shape_of_trace(trace)
    except UsageError:
        return made_model(trace.layers, trace.num_experts, trace.top_k, bits=bits)
    return model_for(name, trace, bits)
