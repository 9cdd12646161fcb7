"""Other repositories with the weights of a known model, from which ``download ALIAS`` may choose.

Only repositories whose weights are those of the model itself, in another number format: FP8 by the model's
maker, or GGUF files. Whether they still exist, and what they hold, is read from the hub when it is needed.
Nothing here needs torch or the network.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moechat.hub.model_ref import (
    PREFERRED_BITS,
    ModelRef,
    expand_alias,
    holds_manifest,
    normalised,
    parse_hub_name,
)

_OTHERS: dict[str, tuple[str, ...]] = {
    "Qwen/Qwen3.6-35B-A3B": ("Qwen/Qwen3.6-35B-A3B-FP8", "unsloth/Qwen3.6-35B-A3B-GGUF"),
    "Qwen/Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B-GGUF"),
    "Qwen/Qwen3-Coder-Next": ("Qwen/Qwen3-Coder-Next-FP8", "Qwen/Qwen3-Coder-Next-GGUF"),
    "zai-org/GLM-4.7-Flash": ("unsloth/GLM-4.7-Flash-GGUF",),
    "zai-org/GLM-4.5-Air": ("zai-org/GLM-4.5-Air-FP8", "unsloth/GLM-4.5-Air-GGUF"),
    "google/gemma-4-26B-A4B-it": ("unsloth/gemma-4-26B-A4B-it-GGUF",),
    "MiniMaxAI/MiniMax-M2.5": ("unsloth/MiniMax-M2.5-GGUF",),
    "deepseek-ai/DeepSeek-V4-Flash": ("unsloth/DeepSeek-V4-Flash-GGUF",),
    "openai/gpt-oss-20b": ("ggml-org/gpt-oss-20b-GGUF",),
    "openai/gpt-oss-120b": ("ggml-org/gpt-oss-120b-GGUF",),
}


def sources_of(model: str) -> tuple[str, ...]:
    """The repositories that an alias may be downloaded from, the maker's first.

    Returns:
        Empty if ``model`` is no alias, or names a revision or a file: then it names one source already.
    """
    repository = expand_alias(normalised(model))
    if repository is None or repository not in _OTHERS:
        return ()
    return (repository, *_OTHERS[repository])


def find_in_other_source(repository: str, models: Path, bits: int | None) -> ModelRef | None:
    """A store in the library that was made from another source of a known model.

    Args:
        repository: The maker's repository.
        models: The library.
        bits: Bits of the store, or :data:`moechat.geometry.KEEP`; ``None`` takes any, in the order of
            ``PREFERRED_BITS``.
    """
    for candidate in PREFERRED_BITS if bits is None else (bits,):
        for other in _OTHERS.get(repository, ()):
            plain = parse_hub_name(other)
            end = plain.library_path(models, candidate).name.removeprefix(plain.slug)
            for path in sorted(models.glob(f"{plain.slug}*{end}")):
                variant = path.name.removesuffix(end).removeprefix(plain.slug)
                if (variant == "" or variant.startswith("+")) and _is_store(path):
                    ref = parse_hub_name(f"{other}:{variant[1:]}" if variant else other)
                    return replace(ref, store=path)
    return None


def _is_store(path: Path) -> bool:
    try:
        return holds_manifest(path)
    except OSError:
        return False
