"""Finds the outline of a model: from the package, from the user's cache, else by counting a model."""

from __future__ import annotations

from pathlib import Path

from moechat.geometry import AUTO_BITS, DEFAULT_ACTIVATION_BITS, PLAIN_KV_BITS, DenseBits
from moechat.outline.config_source import ConfigSource
from moechat.outline.kept_outlines import OutlineRequest, read_outline, write_outline
from moechat.outline.packaged_outlines import packaged_outline
from moechat.sizes.model_outline import ModelOutline
from moechat.store.tensor_headers import HeaderTable


def find_outline(
    config: ConfigSource,
    dtype: str,
    *,
    dense_bits: DenseBits = AUTO_BITS,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    kv_bits: int = PLAIN_KV_BITS,
    on_gpu: bool = False,
    headers: HeaderTable | None = None,
    directory: Path | None = None,
    keep: bool = True,
) -> ModelOutline:
    """The outline of a model.

    Args:
        config: Its configuration.
        dtype: Compute type of the dense weights, by its name in torch.
        dense_bits: Bits per dense weight: 16, 8, 6, 4 or ``auto``.
        activation_bits: Bits of the inputs of packed weights: 8, 16 or 32.
        kv_bits: Bits of a key or value in the attention cache: 16 or 8.
        on_gpu: The dense part runs on a GPU.
        headers: Names, types and shapes of its stored weights; ``None``: they are not here.
        directory: Of kept outlines; ``None``: there are none.
        keep: Keep a new one there.

    Raises:
        UnsupportedModelError: As :func:`moechat.models.outlining.outline_model`.
    """
    request = OutlineRequest(
        config=config.digest,
        dtype=dtype,
        dense_bits=dense_bits,
        activation_bits=activation_bits,
        kv_bits=kv_bits,
        on_gpu=on_gpu,
        headers="" if headers is None else headers.digest(),
    )
    found = None if config.shape is None else packaged_outline(config.shape, request)
    if found is None and directory is not None:
        found = read_outline(directory, request)
    if found is None:
        found = count_outline(config, request, headers)
        if directory is not None and keep and config.is_still():
            write_outline(directory, request, found)
    return found


def count_outline(config: ConfigSource, request: OutlineRequest, headers: HeaderTable | None) -> ModelOutline:
    """Count a model; see :func:`moechat.models.outlining.outline_model`."""
    # Imported here: they take seconds.
    import torch

    from moechat.models.outlining import outline_model

    return outline_model(
        config.read(),
        getattr(torch, request.dtype),
        dense_bits=request.dense_bits,
        activation_bits=request.activation_bits,
        kv_bits=request.kv_bits,
        on_gpu=request.on_gpu,
        source=headers,
    )
