"""The schemes that quantised checkpoints are read in, by the name that a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.checkpoint_files import read_config
from moechat.store.quantised import autoround, awq, compressed, fp8, gptq, modelopt, mxfp4
from moechat.store.quantised.settings import Settings, read_settings
from moechat.store.quantised.weights import Found, PackedTensors
from moechat.store.tensors import TensorSet


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of storing quantised weights.

    Attributes:
        find: Finds the weights in a checkpoint. Raises ``CheckpointError`` for malformed settings and
            ``UnsupportedModelError`` for a variant that is not read.
        title: The format that the settings state, for people.
    """

    find: Callable[[TensorSet, Settings], Found]
    title: Callable[[Settings], str]


SCHEMES = {
    "fp8": Scheme(fp8.find, fp8.title),
    "fbgemm_fp8": Scheme(fp8.find, fp8.title),
    "compressed-tensors": Scheme(compressed.find, compressed.title),
    "modelopt": Scheme(modelopt.find, modelopt.title),
    "awq": Scheme(awq.find, awq.title),
    "gptq": Scheme(gptq.find, gptq.title),
    "auto-round": Scheme(autoround.find, autoround.title),
    "mxfp4": Scheme(mxfp4.find, mxfp4.title),
}


def require_readable(method: str, where: str) -> None:
    """Check the ``quant_method`` of a checkpoint.

    Raises:
        UnsupportedModelError: moechat does not read it.
    """
    known = sorted(SCHEMES)
    if method.lower() not in known:
        raise UnsupportedModelError(
            f"the weights in {where} are packed with {method!r}; moechat reads {', '.join(known)}",
            hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
        )


def plain_view(tensors: TensorSet, config: dict[str, Any], directory: Path) -> TensorSet:
    """The tensors of a checkpoint with plain ones in place of quantised ones.

    A method that is not read leaves the tensors as they are; :func:`require_readable` refuses it.

    Args:
        tensors: As they are in the files.
        config: Content of ``config.json``.
        directory: The checkpoint.

    Raises:
        CheckpointError: The settings are malformed, or no tensor is stored as they state.
        UnsupportedModelError: A variant of a scheme is not read.
    """
    settings = read_settings(config, directory)
    if settings is None:
        found = mxfp4.find(tensors, None)
        return PackedTensors(tensors, found, where=str(directory)) if found.hidden else tensors
    scheme = SCHEMES.get(settings.method)
    if scheme is None:
        return tensors
    found = scheme.find(tensors, settings)
    if not found.weights and not found.problems:
        raise CheckpointError(
            f"{settings.where} says quant_method {settings.method!r}, but none of the {len(tensors)} tensors "
            f"is stored so ({next(iter(tensors), 'none')!r} and the others are plain)",
            hint="config.json and tensors contradict each other: take both from the same repository",
        )
    return PackedTensors(tensors, found, where=str(directory))


def source_format(config: dict[str, Any], directory: Path) -> str | None:
    """The format of a checkpoint's quantised weights, for people; ``None`` if none are stated.

    Args:
        config: Content of ``config.json``.
        directory: The checkpoint, or the store that was made from it.

    Raises:
        CheckpointError: The settings are malformed.
    """
    settings = read_settings(config, directory)
    if settings is None:
        return None
    scheme = SCHEMES.get(settings.method)
    return settings.method if scheme is None else scheme.title(settings)


def source_format_of(directory: Path) -> str | None:
    """As :func:`source_format`, of a store; ``None`` if its configuration cannot be read."""
    try:
        return source_format(read_config(directory), directory)
    except CheckpointError:
        return None
