"""What AWQ and GPTQ share: weights stored as ``qweight``, ``qzeros`` and ``scales`` of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found, PackedWeight, matrix_shape
from moechat.store.tensors import TensorSet

_CODES = "qweight"
_TYPES = {_CODES: ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32"), "g_idx": ("I32",)}

Make = Callable[[TensorSet, str, dict[str, str], Settings], PackedWeight]


def find_modules(tensors: TensorSet, settings: Settings, make: Make) -> Found:
    """The weights of all modules with a ``qweight``.

    Args:
        tensors: The stored tensors.
        settings: Of the checkpoint.
        make: Makes a weight of the tensors, its name, its parts and the settings.
    """
    found = Found()
    for stored in tensors:
        stem, _, last = stored.rpartition(".")
        if last != _CODES:
            continue
        name = f"{stem}.weight"
        try:
            found.add(make(tensors, name, dict(_parts(tensors, stem)), settings))
        except (CheckpointError, UnsupportedModelError) as problem:
            found.problems[name] = problem
            found.hidden.add(stored)
    return found


def do_not_fit(tensors: TensorSet, name: str, parts: dict[str, str], title: str) -> CheckpointError:
    """The error for parts whose shapes contradict each other or the settings."""
    shapes = ", ".join(f"{part.rpartition('.')[2]} {list(tensors.info(part)[1])}" for part in parts.values())
    return CheckpointError(
        f"{tensors.file_of(parts[_CODES]).path}: the parts of {name!r} do not fit together as {title}: "
        f"{shapes}",
        hint="config.json and tensors contradict each other: take both from the same repository",
    )


def group_columns(settings: Settings) -> int:
    """Columns of a group; 0: a whole row.

    Raises:
        CheckpointError: The setting is malformed.
    """
    size = settings.number("group_size", settings.number("q_group_size", 128))
    return 0 if size == -1 else size


def grouping(columns: int) -> str:
    """What shares a scale, for people."""
    return f"groups of {columns}" if columns else "a scale for each row"


def _parts(tensors: TensorSet, stem: str) -> Iterator[tuple[str, str]]:
    where = tensors.file_of(f"{stem}.{_CODES}").path
    for role, types in _TYPES.items():
        part = f"{stem}.{role}"
        if part not in tensors:
            if role == "g_idx":
                continue
            raise CheckpointError(
                f"{where}: tensor {stem + '.' + _CODES!r} has no {part!r}",
                hint="take a complete copy of the checkpoint",
            )
        kind, shape = tensors.info(part)
        if role != "g_idx":
            matrix_shape(tensors, part, most=2)
        if kind not in types or len(shape) != (1 if role == "g_idx" else 2):
            raise CheckpointError(
                f"{tensors.file_of(part).path}: tensor {part!r} is {kind} {list(shape)}; {types[0]} is "
                f"expected, of {1 if role == 'g_idx' else 2} dimensions"
            )
        yield role, part
