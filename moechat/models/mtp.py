"""The head of a model for multi-token prediction (MTP), as a model of one decoder layer.

The head guesses the token behind the next one, from the model's hidden states and the next token
(DeepSeek-V3, 2024, section 2.2): both are normalised and joined, and a projection makes hidden states of
them. A decoder layer of the model's own kind, a norm and the model's own head do the rest. So a head is the
same family with one layer, whose embedding is replaced by :class:`MtpInputs`. All that loads and computes
models does so for heads too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moechat.errors import UnsupportedModelError
from moechat.models.mtp_types import MTP_TYPES
from moechat.models.skeleton import Skeleton, base_of, build_skeleton

_EMBEDDING = "embed_tokens"
_TOKEN_NORM, _HIDDEN_NORM, _PROJECTION = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"
# DeepSeek stores a head as one more layer. These parts of it are not parts of a decoder layer.
_BESIDE_LAYER = {
    "enorm": f"{_EMBEDDING}.{_TOKEN_NORM}",
    "hnorm": f"{_EMBEDDING}.{_HIDDEN_NORM}",
    "eh_proj": f"{_EMBEDDING}.{_PROJECTION}",
    "shared_head.norm": "norm",
}
_SHARED = ("embed_tokens.", "shared_head.head.")  # the model's own, which some checkpoints repeat


class MtpInputs(nn.Module):
    """Makes the hidden states that go into the layer of a head; in the place of an embedding.

    Args:
        norm: Class of the model's norms.
        hidden_size: Width of hidden states.
        eps: Of the norms.
        dtype: Of hidden states.

    Attributes:
        embedding: The model's own, once it is loaded.
        rows: ``[1, tokens, hidden]``, the model's hidden states behind its last norm, each for the token
            before the one that is embedded; ``None``: zeros. Set for each call.
    """

    def __init__(self, norm: type[nn.Module], hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding: Any = _NoEmbedding(hidden_size, dtype)
        self.pre_fc_norm_embedding = norm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.rows: torch.Tensor | None = None

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding."""
        found: int = self.embedding.num_embeddings
        return found

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[1, tokens, hidden]`` of ids ``[1, tokens]``."""
        embedded = self.embedding(ids)
        rows = torch.zeros_like(embedded) if self.rows is None else self.rows
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(rows)], dim=-1)
        projected: torch.Tensor = self.fc(joined)
        return projected


class _NoEmbedding(nn.Module):
    """Stands for the model's embedding where only shapes matter."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = 1
        self._hidden_size, self._dtype = hidden_size, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty((*ids.shape, self._hidden_size), device=ids.device, dtype=self._dtype)


def build_mtp_skeleton(config: Any, dtype: torch.dtype, experts_implementation: str = "eager") -> Skeleton:
    """Build the head of a model on the meta device; :attr:`Skeleton.state` is without embedding and head.

    Args:
        config: Configuration of the model.
        dtype: Type of the dense parameters.
        experts_implementation: As for :func:`moechat.models.skeleton.build_skeleton`.

    Raises:
        UnsupportedModelError: Heads of this family are not known.
    """
    if config.model_type not in MTP_TYPES:
        raise UnsupportedModelError(f"multi-token prediction of {config.model_type!r} is not known")
    skeleton = build_skeleton(_one_layer(config), dtype, experts_implementation)
    model, text = skeleton.model, skeleton.model.config.get_text_config()
    base = base_of(model)
    name = f"{_base_name(skeleton)}.{_EMBEDDING}"
    shared = (f"{name}.weight", "lm_head.weight")
    state = {key: tensor for key, tensor in skeleton.state.items() if key not in shared}
    norm = type(base.layers[0].input_layernorm)
    with torch.device("meta"):
        inputs = MtpInputs(norm, text.hidden_size, text.rms_norm_eps, dtype).to(dtype)
    base.embed_tokens = inputs
    model.lm_head = nn.Identity()
    state.update({f"{name}.{key}": tensor for key, tensor in inputs.state_dict().items()})
    return replace(skeleton, state=state)


def _one_layer(config: Any) -> Any:
    """The configuration with one decoder layer, which attends to all tokens and has experts."""
    one = deepcopy(config)
    text = one.get_text_config()
    for part in (one, text):
        part._attn_implementation = None  # chosen anew: that of the model may be native by now
    text.num_hidden_layers = 1
    text.tie_word_embeddings = one.tie_word_embeddings = False
    for name, value in (
        ("layer_types", ["full_attention"]),
        ("mlp_layer_types", ["sparse"]),
        ("mlp_only_layers", []),
        ("first_k_dense_replace", 0),
    ):
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    return one


def _base_name(skeleton: Skeleton) -> str:
    return skeleton.layers_name.removesuffix(".layers")


def mtp_names(skeleton: Skeleton, keys: Iterable[str], depth: int) -> dict[str, str]:
    """Checkpoint tensors of a head by the names that they would have in a checkpoint of it alone.

    They are named as Qwen does (``mtp.fc.weight``, ``mtp.layers.0...``), or as DeepSeek does, as those of
    another layer (``model.layers.61.eh_proj.weight``).

    Args:
        skeleton: The head.
        keys: Names of all tensors of the checkpoint.
        depth: Decoder layers of the model.
    """
    base, found = _base_name(skeleton), {}
    further = re.compile(rf"(?:.+\.)?layers\.{depth}\.(.+)")
    for key in keys:
        if key.startswith("mtp."):
            rest = key.removeprefix("mtp.")
            if rest.startswith((_PROJECTION, "pre_fc_norm_")):
                found[f"{base}.{_EMBEDDING}.{rest}"] = key
            else:
                found[f"{base}.{rest}"] = key
        elif (match := further.fullmatch(key)) is not None and not match[1].startswith(_SHARED):
            part, _, kind = match[1].rpartition(".")
            found[f"{base}.{_BESIDE_LAYER.get(part, f'layers.0.{part}')}.{kind}"] = key
    return found


def hub_names(skeleton: Skeleton) -> dict[str, str]:
    """Names of the dense weights of a head in a checkpoint, as Qwen names them, by those in the head."""
    base = _base_name(skeleton) + "."
    dense = [name for name in skeleton.state if name not in skeleton.expert_names]
    return {name: "mtp." + name.removeprefix(base).removeprefix(f"{_EMBEDDING}.") for name in dense}
