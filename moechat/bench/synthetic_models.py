"""Synthetic models: shapes of known models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moechat.errors import UsageError
from moechat.hub.known_shapes import shape_names, shape_values
from moechat.models.mtp import build_mtp_skeleton, hub_names
from moechat.models.skeleton import build_skeleton, config_from
from moechat.store.progress import ProgressCallback
from moechat.store.store import Store
from moechat.store.synthetic import SyntheticModel, write_synthetic_store

__all__ = [
    "Shape",
    "cut_shape",
    "describe_shape",
    "load_shape",
    "shape_names",
    "store_name",
    "synthetic_store",
]

# Part of the directory name of a synthetic store.
_REVISION = 1


@dataclass(frozen=True)
class Shape:
    """The shape of a known model, possibly reduced.

    Attributes:
        name: Name in ``moechat/hub/shapes``.
        layers: Number of decoder layers.
        all_layers: Number of decoder layers of the model.
        vocabulary: Size of the vocabulary.
        all_vocabulary: Size of the model's vocabulary.
        config: The transformers configuration of the reduced shape.
    """

    name: str
    layers: int
    all_layers: int
    vocabulary: int
    all_vocabulary: int
    config: Any

    @property
    def cuts(self) -> list[str]:
        """Descriptions of the reductions."""
        cuts = []
        if self.layers < self.all_layers:
            cuts.append(f"{self.layers} of {self.all_layers} decoder layers")
        if self.vocabulary < self.all_vocabulary:
            cuts.append(f"a vocabulary of {self.vocabulary} instead of {self.all_vocabulary} tokens")
        return cuts


def load_shape(name: str, *, layers: int | None = None, vocabulary: int | None = None) -> Shape:
    """Load the shape of a known model.

    Args:
        name: One of :func:`moechat.hub.known_shapes.shape_names`.
        layers: Decoder layers to keep; ``None`` keeps all.
        vocabulary: Tokens to keep; ``None`` keeps all.

    Raises:
        UsageError: The name is unknown, or the model has fewer layers or tokens.
    """
    return cut_shape(name, shape_values(name), layers=layers, vocabulary=vocabulary)


def cut_shape(
    name: str, values: Mapping[str, Any], *, layers: int | None = None, vocabulary: int | None = None
) -> Shape:
    """The shape of a transformers configuration.

    Args:
        name: Name to show, and for directories.
        values: Content of a ``config.json``.
        layers: As in :func:`load_shape`.
        vocabulary: As in :func:`load_shape`.

    Raises:
        UsageError: The model has fewer layers or tokens.
    """
    all_layers, all_tokens = values["num_hidden_layers"], values["vocab_size"]
    dense = values.get("first_k_dense_replace", 0)
    kept = all_layers if layers is None else layers
    if not dense < kept <= all_layers:
        raise UsageError(f"{name} has {all_layers} layers; {kept} of them cannot be kept")
    tokens = all_tokens if vocabulary is None else vocabulary
    if not 2 <= tokens <= all_tokens:
        raise UsageError(f"{name} has a vocabulary of {all_tokens} tokens; {tokens} of them cannot be kept")
    # Special tokens would be outside a smaller vocabulary, and have no meaning with random weights.
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    changes = {"num_hidden_layers": kept, "vocab_size": tokens, "dtype": "bfloat16", **special}
    # Lists with an entry for each layer, such as kinds of attention.
    by_layer = {
        key: value[:kept]
        for key, value in values.items()
        if isinstance(value, list) and len(value) == all_layers
    }
    config = config_from({**values, **by_layer, **changes}, Path(name))
    return Shape(name, kept, all_layers, tokens, all_tokens, config)


def describe_shape(shape: Shape, *, bits: int = 4, seed: int = 0, mtp: bool = False) -> SyntheticModel:
    """Content of a store of this shape, determined by building the model without weights.

    Args:
        shape: The shape.
        bits: Of a weight of the experts.
        seed: Of the weights.
        mtp: With a head for multi-token prediction.

    Raises:
        UnsupportedModelError: The installed transformers cannot build it, or heads of this family are not
            known.
        UsageError: ``bits`` is out of range.
    """
    skeleton = build_skeleton(shape.config, torch.bfloat16)
    experts = skeleton.expert_names
    tied = set(getattr(skeleton.model, "all_tied_weights_keys", None) or {})
    dense = {
        name: tuple(tensor.shape)
        for name, tensor in skeleton.state.items()
        if name not in experts and name not in tied
    }
    if mtp:
        head = build_mtp_skeleton(shape.config, torch.bfloat16)
        names = hub_names(head)
        dense |= {names[name]: tuple(head.state[name].shape) for name in sorted(names)}
    return SyntheticModel(
        name=f"synthetic {shape.name}",
        config=shape.config.to_dict(),
        geometry=skeleton.experts[0].geometry(bits),
        layers=[(entry.layer, entry.name) for entry in skeleton.experts],
        dense=dense,
        seed=seed,
        chosen=frozenset(
            name for name in dense if name in skeleton.state and not skeleton.state[name].is_floating_point()
        ),
        mtp=mtp,
    )


def store_name(shape: Shape, bits: int, *, mtp: bool = False) -> str:
    """Directory name of a shape's store."""
    head = "-mtp" if mtp else ""
    return f"{shape.name}-{shape.layers}l-{shape.vocabulary}v-{bits}bit{head}-r{_REVISION}"


def synthetic_store(
    shape: Shape,
    parent: Path,
    *,
    bits: int = 4,
    mtp: bool = False,
    progress: ProgressCallback | None = None,
) -> Store:
    """Open the store of a shape in ``parent``; written if it does not exist.

    Args:
        shape: The shape.
        parent: Directory of stores.
        bits: Of a weight of the experts.
        mtp: With a head for multi-token prediction.
        progress: As for :func:`moechat.store.synthetic.write_synthetic_store`.

    Raises:
        MoechatError: See :func:`describe_shape` and
            :func:`moechat.store.synthetic.write_synthetic_store`.
    """
    model = describe_shape(shape, bits=bits, mtp=mtp)
    return write_synthetic_store(model, parent / store_name(shape, bits, mtp=mtp), progress=progress)
