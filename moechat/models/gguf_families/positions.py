"""Rotary parameters of transformers from the metadata of a GGUF file."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moechat.errors import UnsupportedModelError
from moechat.models.gguf_families.architecture import Config
from moechat.models.gguf_metadata import Metadata, quoted

# Rotary scaling of Llama 3.1 and of Llama 4 Scout, which files state by its factors only.
_FREQUENCY_FACTORS = ((1.0, 4.0), (1.0, 1.0))
_ORIGINAL_LENGTH = 8192
FREQUENCY_TABLE = "rope_freqs.weight"


def whole_rotary(metadata: Metadata, head_dim: int) -> Config:
    """Rotary parameters where whole heads are rotated.

    Raises:
        UnsupportedModelError: The file rotates another part.
    """
    if metadata.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{metadata.where}: rope.dimension_count is {metadata.get('rope.dimension_count')}, "
            f"heads have {head_dim}: moechat does not read that"
        )
    return rotary(metadata)


def factored_rotary(metadata: Metadata, head_dim: int) -> Config:
    """As :func:`whole_rotary`, where the file may have a factor for each frequency.

    Raises:
        UnsupportedModelError: The factors are not those of Llama's scaling.
    """
    unscaled = whole_rotary(metadata, head_dim)
    factors = metadata.table(FREQUENCY_TABLE)
    if factors is None or set(factors) == {1.0}:
        return unscaled
    waves = 2 * np.pi * unscaled["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    for low, high in _FREQUENCY_FACTORS:
        found = {
            "rope_type": "llama3",
            "rope_theta": unscaled["rope_theta"],
            "factor": max(factors),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": _ORIGINAL_LENGTH,
        }
        if unscaled["rope_type"] == "default" and _has_factors(waves, factors, found):
            return found
    raise UnsupportedModelError(
        f"{metadata.where}: the factors in {FREQUENCY_TABLE} are of no rotary scaling that moechat knows",
        hint="take the model's own repository, with safetensors files",
    )


def _has_factors(waves: NDArray[np.float64], factors: tuple[float, ...], scaling: Config) -> bool:
    """Whether Llama's scaling divides frequencies of these wave lengths by these factors."""
    longest, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    if len(factors) != len(waves):
        return False
    smooth = np.zeros(len(waves)) if low == high else (longest / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    expected = np.where(
        waves < longest / high, 1, np.where(waves > longest / low, scaling["factor"], between)
    )
    return bool(np.allclose(expected, factors, rtol=1e-4))


def partial_rotary(metadata: Metadata, head_dim: int) -> Config:
    """Rotary parameters with ``partial_rotary_factor``."""
    return rotary(metadata) | {"partial_rotary_factor": rotated_share(metadata, head_dim)}


def rotated_share(metadata: Metadata, head_dim: int, key: str = "rope.dimension_count") -> float:
    """The rotated part of a head, from the number of elements that ``key`` has; without it the whole head."""
    rotated = metadata.size(key, head_dim)
    share = rotated / head_dim
    # transformers rounds the product down.
    return share if int(head_dim * share) == rotated else math.nextafter(share, 2.0)


def rotary(metadata: Metadata, *, base: str = "rope.freq_base", log_multiplier: bool = False) -> Config:
    """Rotary parameters as transformers has them.

    Args:
        metadata: Of the file.
        base: Key of the base.
        log_multiplier: As in DeepSeek's models, YaRN scales attention instead of queries and keys.

    Raises:
        CheckpointError: A value is malformed.
        UnsupportedModelError: The file scales in a way that moechat does not read.
    """
    found: Config = {"rope_theta": float(metadata.number(base, 10000.0))}
    kind = metadata.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default; has no effect without a factor
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.where}: its rotary scaling is {quoted(kind)}, which moechat does not read"
        )
    _require_known_scaling(metadata, kind, log_multiplier)
    # Files of 2023 use the second key.
    key = "rope.scaling.factor" if metadata.get("rope.scaling.factor") is not None else "rope.scale_linear"
    if kind == "yarn":
        found |= {"rope_type": "yarn", "factor": float(metadata.number(key))}
        found["original_max_position_embeddings"] = metadata.size("rope.scaling.original_context_length")
        for own, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{own}") is not None:
                found[name] = float(metadata.number(f"rope.scaling.{own}"))
        if log_multiplier:
            # The converter multiplies it by 0.1, and cancels scaling by any other way.
            scale = float(metadata.number("rope.scaling.yarn_log_multiplier")) * 10
            scale = round(scale, 6)
            found |= {"mscale": scale, "mscale_all_dim": scale, "attention_factor": 1.0}
        return found
    unscaled = kind == "none" or metadata.get(key) in (None, 0)  # 0: not set
    factor = 1.0 if unscaled else float(metadata.number(key))
    return found | ({"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor})


def _require_known_scaling(metadata: Metadata, kind: str, log_multiplier: bool) -> None:
    """Reject rotary scaling parameters that would have an effect and that :func:`rotary` does not use."""
    used = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
    neutral = {
        "alpha": (0,),
        "attn_factor": (1,),
        "yarn_attn_factor": (1,),
        "yarn_ext_factor": (-1, 1 if kind == "yarn" else 0),  # -1: default of the type
        "yarn_log_multiplier": (0,),
    }
    for key in metadata.names("rope.scaling."):
        name = key.removeprefix("rope.scaling.")
        if log_multiplier and name == "yarn_log_multiplier":
            continue
        if name not in used and metadata.get(key) not in neutral.get(name, ()):
            raise metadata.refused(key)
