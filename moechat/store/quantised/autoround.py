"""AutoRound: weights packed as GPTQ or AWQ pack them, with settings of its own.

``packing_format`` names the packing: ``auto_round:auto_gptq`` is GPTQ of version 1, ``auto_round`` and
``auto_round:gptqmodel`` that of version 2, ``auto_round:auto_awq`` AWQ. ``extra_config`` has modules with
other bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moechat.errors import UnsupportedModelError
from moechat.store.quantised import awq, gptq
from moechat.store.quantised.settings import Settings
from moechat.store.quantised.weights import Found
from moechat.store.tensors import TensorSet

_GPTQ = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_USUAL = "auto_round:auto_gptq"


def title(settings: Settings) -> str:
    """The format, for people."""
    packing = _packing(settings)
    translated = _translated(settings, packing)
    inner = awq.title(translated) if packing in _AWQ else gptq.title(translated)
    return f"{inner}, of AutoRound"


def find(tensors: TensorSet, settings: Settings) -> Found:
    """The weights of a checkpoint.

    Raises:
        CheckpointError: A setting is malformed.
        UnsupportedModelError: The packing, or its number of bits, is not read.
    """
    packing = _packing(settings)
    translated = _translated(settings, packing)
    return awq.find(tensors, translated) if packing in _AWQ else gptq.find(tensors, translated)


def _packing(settings: Settings) -> str:
    packing = str(settings.content.get("packing_format") or _USUAL).lower()
    if packing not in _AWQ and packing not in _GPTQ:
        raise UnsupportedModelError(
            f"{settings.where}: packing_format is {packing[:80]!r}; of AutoRound moechat reads "
            f"{', '.join([*_GPTQ, *_AWQ])}",
            hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
        )
    return packing


def _translated(settings: Settings, packing: str) -> Settings:
    """The settings as those of GPTQ or AWQ."""
    content: dict[str, Any] = {
        key: settings.content[key] for key in ("bits", "group_size", "sym") if key in settings.content
    }
    if packing in _GPTQ:
        content |= {"format": _GPTQ[packing], "dynamic": settings.content.get("extra_config")}
    return replace(settings, content=content)
