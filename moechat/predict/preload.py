"""Predicts from the prompt which experts its answer will use (MELINOE; Raje, Nayak and Joshi, section 3.1.2).

Two layers of neurons rank the experts of all layers, from the mean of the prompt's token embeddings.
``moechat tune`` trains them and saves them beside the tuned checkpoint. The paper takes a sentence embedder;
the model's own embeddings need no second model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moechat.atomic_file import replacing
from moechat.errors import CheckpointError, MoechatError, MoechatWarning, one_line
from moechat.store.safetensors_file import SafetensorsFile

PRELOAD_FILE = "preload.safetensors"
# Only the end of a long prompt counts, so that a prediction takes a fraction of a millisecond.
MOST_TOKENS = 512
_MAX_BYTES = 1 << 30
_MAX_SIZE = 1 << 16  # of embeddings and hidden neurons
_MAX_SCORES = 1 << 20  # layers x experts
_VERSION = 1
_METADATA = "moechat_preload"
_NAMES = ("hidden.weight", "hidden.bias", "scores.weight", "scores.bias")

# Embeddings of tokens: a function of int64 [n] to [n, embedding size], or their table [tokens, embedding
# size]. The mean over a float32 table takes a fifth of the time, as its rows are not copied.
Embed = Callable[[torch.Tensor], torch.Tensor] | torch.Tensor


class PreloadPredictor:
    """Ranks the experts of all layers for the answer to a prompt.

    Attributes:
        layers: Expert layers.
        experts: Experts of a layer.
        embedding_size: Width of the embeddings.
    """

    def __init__(
        self,
        hidden: tuple[torch.Tensor, torch.Tensor],
        scores: tuple[torch.Tensor, torch.Tensor],
        layers: int,
        embed: Embed,
    ) -> None:
        """Take the weights.

        Args:
            hidden: Weight ``[hidden, embedding size]`` and bias ``[hidden]`` of the hidden neurons, float32.
            scores: Weight ``[layers * experts, hidden]`` and bias ``[layers * experts]``, float32.
            layers: Expert layers.
            embed: The model's embeddings of tokens.

        Raises:
            ValueError: The shapes do not fit together, or a value is not finite.
        """
        weights = [tensor.detach().to("cpu", torch.float32).contiguous() for tensor in (*hidden, *scores)]
        self._hidden, self._hidden_bias, self._scores, self._scores_bias = weights
        shapes = [tuple(tensor.shape) for tensor in weights]
        neurons, self.embedding_size = shapes[0] if len(shapes[0]) == 2 else (0, 0)
        rows = shapes[3][0] if len(shapes[3]) == 1 else 0
        if shapes != [(neurons, self.embedding_size), (neurons,), (rows, neurons), (rows,)] or not neurons:
            raise ValueError(f"shapes {shapes} do not fit together")
        if layers < 1 or rows < 1 or rows % layers:
            raise ValueError(f"{rows} scores cannot be divided among {layers} layers")
        if not all(bool(tensor.isfinite().all()) for tensor in weights):
            raise ValueError("a weight is not finite")
        self.layers = layers
        self.experts = rows // layers
        self._embed = embed

    def scores(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Rank the experts for the answer to a prompt; only the last :data:`MOST_TOKENS` tokens count.

        Args:
            ids: Token ids of the prompt.

        Returns:
            float32 ``[layers, experts]``, highest for the experts that the answer will use most. Of an empty
            prompt: the scores of a mean embedding of zeros.
        """
        with torch.inference_mode():
            mean = mean_embedding(self._embed, ids, self.embedding_size)
            hidden = torch.addmv(self._hidden_bias, self._hidden, mean).relu_()
            scores = torch.addmv(self._scores_bias, self._scores, hidden)
        result: npt.NDArray[np.float32] = scores.reshape(self.layers, self.experts).numpy()
        return result

    def save(self, path: Path) -> None:
        """Write the weights; the file is replaced at once or not at all.

        Raises:
            OSError: It cannot be written.
        """
        from safetensors.torch import save

        tensors = (self._hidden, self._hidden_bias, self._scores, self._scores_bias)
        # A single entry, as the order of several is not that of the file before.
        metadata = {_METADATA: _kind(self.layers, self.experts)}
        with replacing(path) as file:
            file.write(save(dict(zip(_NAMES, tensors, strict=True)), metadata=metadata))

    @classmethod
    def load(cls, path: Path, *, layers: int, experts: int, embed: Embed) -> PreloadPredictor | None:
        """Read the weights that :meth:`save` has written.

        A file that is damaged, or was made for another model, is as good as none: it is named in a
        :class:`~moechat.errors.MoechatWarning`.

        Args:
            path: The file, or the directory that may have one.
            layers: Expert layers of the model.
            experts: Experts of a layer.
            embed: The model's embeddings of tokens.

        Returns:
            ``None`` if there is no file, or no usable one.
        """
        if path.is_dir():
            path = path / PRELOAD_FILE
        if not os.path.lexists(path):
            return None
        try:
            return cls._read(path, layers, experts, embed)
        except (MoechatError, OSError, ValueError) as error:
            warnings.warn(
                f"{path} is not used, so no experts are loaded by the prompt: {one_line(error)}",
                MoechatWarning,
                stacklevel=2,
            )
            return None

    @classmethod
    def _read(cls, path: Path, layers: int, experts: int, embed: Embed) -> PreloadPredictor:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"it has {path.stat().st_size} bytes, more than {_MAX_BYTES}")
        file = SafetensorsFile.open(path)
        kind, wanted = file.metadata.get(_METADATA, "nothing")[:80], _kind(layers, experts)
        if kind != wanted:
            raise CheckpointError(f"it is {kind}; the model needs {wanted}")
        if sorted(file.tensors) != sorted(_NAMES):
            raise CheckpointError(f"it holds other tensors than {', '.join(_NAMES)}")
        for name, entry in file.tensors.items():
            most = _MAX_SCORES if name.startswith("scores") else _MAX_SIZE
            if entry.dtype != "F32" or not all(0 < size <= most for size in entry.shape):
                raise CheckpointError(f"{name} is {entry.dtype} {list(entry.shape)}")
        first, second, third, fourth = (torch.from_numpy(file.array(name).copy()) for name in _NAMES)
        predictor = cls((first, second), (third, fourth), layers, embed)
        if predictor.experts != experts:
            raise CheckpointError(f"it ranks {predictor.experts} experts of a layer; the model has {experts}")
        width = embedding_width(embed)
        if width != predictor.embedding_size:
            raise CheckpointError(f"it takes embeddings of {predictor.embedding_size}; the model has {width}")
        return predictor


def _kind(layers: int, experts: int) -> str:
    return f"version {_VERSION} for {layers} layers of {experts} experts"


def embedding_width(embed: Embed) -> int:
    """Width of the embeddings."""
    first = embed if isinstance(embed, torch.Tensor) else embed(torch.zeros(1, dtype=torch.int64))
    return int(first.shape[-1])


def mean_embedding(embed: Embed, ids: Sequence[int], size: int) -> torch.Tensor:
    """The mean embedding of the last :data:`MOST_TOKENS` tokens, float32 ``[size]``; zeros without tokens."""
    last = ids[-MOST_TOKENS:]
    if not len(last):
        return torch.zeros(size)
    rows = torch.as_tensor(last, dtype=torch.int64)
    if not isinstance(embed, torch.Tensor):
        return embed(rows).detach().mean(0, dtype=torch.float32).cpu()
    if embed.dtype != torch.float32 or embed.device.type != "cpu":
        return embed.detach()[rows].mean(0, dtype=torch.float32).cpu()
    return torch.nn.functional.embedding_bag(rows[None], embed.detach(), mode="mean")[0].cpu()
