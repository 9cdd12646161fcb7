"""The quantisation of a checkpoint as its configuration states it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointError
from moechat.store.checkpoint_files import read_json

# ModelOpt writes its settings into this file; newer versions repeat them in config.json.
MODELOPT_FILE = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Settings:
    """What a configuration says about quantised weights.

    Attributes:
        method: ``quant_method``, in lower case.
        content: All settings.
        where: The file, for messages.
        dtype: Safetensors type of the plain weights, ``BF16`` or ``F16``, that the model computes with.
    """

    method: str
    content: dict[str, Any]
    where: str
    dtype: str

    def wrong(self, reason: str) -> CheckpointError:
        """The error for a malformed setting."""
        return CheckpointError(f"{self.where}: {reason}", hint="compare it with the model's repository")

    def sizes(self, key: str) -> tuple[int, int] | None:
        """A pair of positive numbers, or ``None``.

        Raises:
            CheckpointError: The setting is something else.
        """
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(is_positive(size) for size in value):
            raise self.wrong(f"{key} is {str(value)[:80]}; two positive numbers are expected")
        return value[0], value[1]

    def number(self, key: str, default: int) -> int:
        """An integer of at least -1.

        Raises:
            CheckpointError: The setting is something else.
        """
        value = self.content.get(key, default)
        if value != -1 and not is_positive(value):
            raise self.wrong(f"{key} is {str(value)[:80]}; a number is expected")
        return int(value)


def is_positive(value: object) -> bool:
    """Whether a JSON value is a positive integer of a plausible size."""
    return type(value) is int and 0 < value < 1 << 31


def read_settings(config: dict[str, Any], directory: Path) -> Settings | None:
    """The quantisation that a checkpoint states; ``None`` if it states none.

    Args:
        config: Content of its ``config.json``.
        directory: The checkpoint; ``hf_quant_config.json`` in it is read if the configuration has nothing.

    Raises:
        CheckpointError: The settings are malformed.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else {}
    stated = (part[key] for part in (config, text) for key in _KEYS if part.get(key) is not None)
    content = next(stated, None)
    where = directory / "config.json"
    if content is None and (directory / MODELOPT_FILE).is_file():
        where = directory / MODELOPT_FILE
        content = _read_modelopt(where)
    if content is None:
        return None
    if isinstance(content, dict) and "expert_dtype" in config:  # DeepSeek-V4: beside its quantisation_config
        content = {"expert_dtype": config["expert_dtype"], **content}
    names = [part.get(key) for part in (text, config) for key in ("dtype", "torch_dtype")]
    dtype = "F16" if next((name for name in names if name), None) == "float16" else "BF16"
    method = content.get("quant_method") if isinstance(content, dict) else None
    if not isinstance(method, str):
        raise CheckpointError(
            f"{where}: its quantization_config names no quant_method",
            hint="compare it with the model's repository",
        )
    return Settings(method.lower(), content, str(where), dtype)


def _read_modelopt(path: Path) -> dict[str, Any]:
    content = read_json(path)
    inner = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path} has no object named quantization")
    return {"quant_method": "modelopt", **inner}
