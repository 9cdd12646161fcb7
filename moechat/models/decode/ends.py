"""What a model computes before its first decoder layer and behind its last one, for decoded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moechat.models.decode.angles import takes_layer_types
from moechat.models.decode.native_step import NO_ANGLES, NativeStep
from moechat.models.decode.wiring import ends_of, widens_logits
from moechat.models.skeleton import base_of

# How configurations of models that also take pictures or sound name the ids that stand for these.
_MEDIA = ("_token_id", "_token_index")
_NO_MEDIA = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})


class ModelEnds:
    """Embedding, rotary angles and head of a model.

    Args:
        model: A causal language model, or one that also takes pictures or sound.
        steps: Of its first layers, in order.

    Attributes:
        media_ids: Ids that stand for pictures or sound. The family's code may treat them in another way.
    """

    def __init__(self, model: Any, steps: Sequence[NativeStep]) -> None:
        base, config = base_of(model), model.config.get_text_config()
        self._embed, self._rotary, self._norm = ends_of(base)
        self._head, self._widens = model.lm_head, widens_logits(model)
        # Of each layer, what the rotary module takes beside positions.
        types = self._rotary is not None and takes_layer_types(self._rotary)
        self._kinds: list[tuple[Any, ...]] = [
            (config.layer_types[number],) if types else () for number in range(len(steps))
        ]
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        # Factors of the embedding and, as divisor, of the logits (Granite).
        self._multiplier = getattr(base, "embedding_multiplier", None)
        self._divisor = getattr(config, "logits_scaling", None)
        # What the step of a layer takes, those of the same kind take.
        kinds = [(kind, type(step.run), step.angles) for kind, step in zip(self._kinds, steps, strict=True)]
        self._first = [(number, steps[number]) for number in sorted(set(map(kinds.index, kinds)))]
        self.media_ids: frozenset[int] = frozenset()
        if config is not model.config:
            self.media_ids = frozenset(
                value
                for name, value in vars(model.config).items()
                if name.endswith(_MEDIA) and name not in _NO_MEDIA and type(value) is int
            )

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that are called."""
        return tuple(each for each in (self._embed, self._rotary, self._norm, self._head) if each is not None)

    def draw(self, generator: torch.Generator, *sizes: int) -> torch.Tensor:
        """Random ids of texts."""
        number = self._embed.num_embeddings
        usable = torch.tensor([each for each in range(number) if each not in self.media_ids])
        return usable[torch.randint(len(usable), sizes, generator=generator)]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[1, tokens, hidden]`` of ids ``[1, tokens]``."""
        hidden: torch.Tensor = self._embed(ids)
        return hidden if self._multiplier is None else hidden * self._multiplier

    def angles(self, hidden: torch.Tensor, position: int) -> list[Any]:
        """What the rotary module gives each layer for a token at a position: cosines and sines."""
        if self._rotary is None:
            return [NO_ANGLES] * len(self._kinds)
        at = torch.tensor([[position]])
        found = {kind: self._rotary(hidden, at, *kind) for kind in set(self._kinds)}
        return [found[kind] for kind in self._kinds]

    def takes(self, hidden: torch.Tensor, angles: Sequence[Any]) -> bool:
        """Whether the steps of all layers take a token's hidden states and angles."""
        return all(step.takes(hidden, angles[number]) for number, step in self._first)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[1, tokens, vocabulary]`` of what the last layer gives."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._soft_cap is not None:  # rounded as the family's code rounds
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits.float() if self._widens else logits
