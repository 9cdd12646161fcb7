"""How far logits are from those of a reference, summed up window by window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class LogitErrors:
    """Sums over all tokens so far.

    A constant added to all logits of a token changes nothing, so each token's mean is taken off first.
    """

    tokens: int = 0
    scored: int = 0
    difference: float = 0.0
    reference: float = 0.0
    largest: float = 0.0
    divergence: float = 0.0
    expected: float = 0.0
    same: int = 0
    nll: float = 0.0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor | None) -> None:
        """Take in one window.

        Args:
            logits: float32 ``[tokens, vocabulary]``.
            reference: The same shape.
            targets: int64 ``[tokens]``, the tokens that follow; ``None`` where the text says nothing.
        """
        for ours, theirs in zip(torch.split(logits, 64), torch.split(reference, 64), strict=True):
            centred = theirs.double() - theirs.double().mean(1, keepdim=True)
            apart = ours.double() - ours.double().mean(1, keepdim=True) - centred
            self.difference += apart.square().sum().item()
            self.reference += centred.square().sum().item()
            self.largest = max(self.largest, apart.abs().max().item())
            said, meant = ours.double().log_softmax(1), theirs.double().log_softmax(1)
            self.divergence += (meant.exp() * (meant - said)).sum().item()
            self.expected -= (meant.exp() * said).sum().item()
            self.same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        self.tokens += len(logits)
        if targets is not None:
            self.nll += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            self.scored += len(targets)

    def to_json(self) -> dict[str, Any]:
        """Relative error (Frobenius), largest error, mean divergence in nats, share of equal first choices,
        and perplexity: on the text, or where it says nothing on what the reference would say.
        """
        per_token = self.nll / self.scored if self.scored else self.expected / self.tokens
        return {
            "tokens": self.tokens,
            "relative": math.sqrt(self.difference / self.reference),
            "largest": self.largest,
            "divergence": self.divergence / self.tokens,
            "same_choice": self.same / self.tokens,
            "perplexity": math.exp(per_token),
        }
