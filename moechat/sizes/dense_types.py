"""Types that the dense part of a model computes in, by their names in torch."""

from __future__ import annotations

from moechat import _native

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def automatic_type() -> str:
    """Type of dense weights on this CPU: bfloat16 if it has native bf16 products, else float32."""
    # Without native support, torch's bf16 products on a CPU are several times slower than float32.
    features = _native.cpu_features()
    native_bf16 = features.get("avx512_bf16", False) or features.get("amx_bf16", False)
    return "bfloat16" if native_bf16 else "float32"


def resolve_type(
    name: str, *, on_gpu: bool, capability: tuple[int, int] | None = None, here: bool = True
) -> str:
    """Compute type of the dense part.

    Args:
        name: ``float32``, ``bfloat16``, ``float16`` or ``auto``.
        on_gpu: The dense part runs on a GPU.
        capability: CUDA compute capability of the GPU.
        here: The machine is this one; for the CPU of another one, native bf16 products are unknown.
    """
    if name != "auto":
        return name
    if on_gpu:
        return gpu_type(capability)
    return automatic_type() if here else "float32"


def gpu_type(capability: tuple[int, int] | None) -> str:
    """Type of dense weights on a GPU: bfloat16 from compute capability 8.0, else float16.

    Args:
        capability: Compute capability; ``None`` (unknown) counts as recent.
    """
    return "bfloat16" if capability is None or capability >= (8, 0) else "float16"
