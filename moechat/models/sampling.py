"""Chooses the next token by the model's generation settings and the user's options."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from moechat import _native
from moechat.errors import NotFiniteError, UsageError
from moechat.sampling_ranges import MOST_TOP_K, RANGES

# Below this temperature, dividing logits overflows float32, and the choice is greedy anyway.
_GREEDY_BELOW = 1e-4


_DAMAGED = "if it computes in float16, try --dtype float32; else fetch its files again: they may be damaged"


def require_finite(logits: torch.Tensor) -> None:
    """Check that a token could be chosen.

    Args:
        logits: ``[vocab]``, on the CPU. Some may be minus infinity: models exclude tokens so.

    Raises:
        NotFiniteError: One is NaN or infinity, or all are minus infinity.
    """
    if _native.largest_logit(logits.detach().float().contiguous().numpy()) < 0:
        raise NotFiniteError("the model's logits are not finite", hint=_DAMAGED)


def _require_distinct(scores: torch.Tensor) -> None:
    """Once an answer: hidden states that overflow are normalised to zeros, and all logits are equal then.

    Raises:
        NotFiniteError: They are.
    """
    values = scores.numpy()
    if len(values) > 1 and values[0] == values[-1] and values.min() == values.max():
        raise NotFiniteError(
            f"the model gives all {len(values)} tokens the same logit, {values[0]:g}: no token can be chosen",
            hint=_DAMAGED,
        )


# Names in errors.
_IN_WORDS = {
    "top_p": "top-p",
    "min_p": "min-p",
    "repetition_penalty": "repetition penalty",
    "presence_penalty": "presence penalty",
    "frequency_penalty": "frequency penalty",
}


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters; ``temperature`` 0 is greedy.

    Attributes:
        temperature: Divides the logits.
        top_k: Candidates kept; 0 keeps all.
        top_p: Nucleus probability.
        min_p: Least probability relative to the likeliest token.
        repetition_penalty: Divides positive logits of tokens in the prompt or the answer, multiplies negative
            ones (CTRL, section 4.1).
        presence_penalty: Subtracted from the logits of tokens that the answer has, as in OpenAI's API.
        frequency_penalty: The same, times how often it has them.

    Raises:
        UsageError: A value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in RANGES:
            _coerce(self, name, float)
        _coerce(self, "top_k", operator.index)
        for name, allowed in RANGES.items():
            if (value := getattr(self, name)) not in allowed:
                raise UsageError(f"{_IN_WORDS.get(name, name)} is {value}; it must be {allowed}")
        if not 0 <= self.top_k <= MOST_TOP_K:
            raise UsageError(f"top-k is {self.top_k}; it must be 0 (off) or more, at most {MOST_TOP_K}")

    @classmethod
    def from_generation_config(cls, config: Any) -> SamplingSettings:
        """The defaults in a model's generation config; greedy if it does not enable sampling."""
        if config is None:
            return cls()
        sample = bool(getattr(config, "do_sample", False))
        settings = cls(temperature=1.0 if sample else 0.0)
        names = ("temperature", "top_k", "top_p", "min_p") if sample else ()
        for name in (*names, "repetition_penalty"):
            found = getattr(config, name, None)
            if found is not None:
                # A value out of range in a model's config is ignored, so that the model stays usable.
                shipped: dict[str, Any] = {name: found}
                with suppress(UsageError):
                    settings = replace(settings, **shipped)
        return settings

    def override(self, **flags: float | None) -> SamplingSettings:
        """These settings, with every flag that is not ``None`` replaced."""
        given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
        if (
            self.temperature == 0.0
            and "temperature" not in given
            and given.keys() & {"top_k", "top_p", "min_p"}
        ):
            # Options that truncate the distribution imply sampling.
            given["temperature"] = 1.0
        return replace(self, **given)


def _coerce(settings: SamplingSettings, name: str, to: Callable[[Any], float]) -> None:
    """Convert a field to its type; callers pass ints, numpy scalars, or by mistake other values."""
    value = getattr(settings, name)
    try:
        if isinstance(value, bool | str):
            raise TypeError
        object.__setattr__(settings, name, to(value))
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name.replace('_', '-')} is {value!r}; it must be a number") from None


class Sampler:
    """Draws tokens for one answer.

    Args:
        settings: Sampling parameters.
        seed: Makes the draws repeatable on one machine and version.
        bias: Added to the logits of some tokens, by id.
    """

    def __init__(
        self, settings: SamplingSettings, seed: int, bias: Mapping[int, float] | None = None
    ) -> None:
        self.settings = settings
        self._generator = torch.Generator().manual_seed(seed)
        self._penalty = None
        if settings.repetition_penalty != 1.0:
            self._penalty = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)
        self._checked = False
        self._greedy = settings.temperature < _GREEDY_BELOW
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if bias:
            self._bias = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)
        self._drawn: Counter[int] | None = None
        if settings.presence_penalty or settings.frequency_penalty:
            self._drawn = Counter()

    def draw(self, history: torch.Tensor, logits: torch.Tensor, forbidden: torch.Tensor | None = None) -> int:
        """Choose a token.

        The steps equal transformers' logits warpers of the same names, in their order: temperature, top-k,
        top-p, min-p; before them bias and penalties.

        Args:
            history: int64 ``[1, tokens]``, prompt and answer so far, for the repetition penalty.
            logits: ``[vocab]`` of the last position; not changed.
            forbidden: bool ``[vocab]``, tokens that must not be drawn; not all of them.

        Raises:
            NotFiniteError: The logits are not finite, or all equal, so no token can be drawn.
        """
        scores = logits.detach().float()
        if not self._checked:
            _require_distinct(scores)
            self._checked = True
        if self._penalty is not None:
            scores = self._penalty(history, scores.unsqueeze(0))[0]
        if self._drawn or self._bias is not None or forbidden is not None:
            scores = self._changed(scores.clone(), forbidden)
        values = scores.contiguous().numpy()
        if self._greedy:
            token = _native.largest_logit(values)
        else:
            settings = self.settings
            quantile = torch.rand((), dtype=torch.float64, generator=self._generator).item()
            token = _native.sample(
                values, settings.temperature, settings.top_k, settings.top_p, settings.min_p, quantile
            )
        if token < 0:
            raise NotFiniteError("the model's logits are not finite: no token can be drawn", hint=_DAMAGED)
        if self._drawn is not None:
            self._drawn[token] += 1
        return token

    def _changed(self, scores: torch.Tensor, forbidden: torch.Tensor | None) -> torch.Tensor:
        if self._drawn:
            counts = torch.tensor(list(self._drawn.values()), dtype=torch.float32)
            settings = self.settings
            penalties = settings.presence_penalty + settings.frequency_penalty * counts
            scores[torch.tensor(list(self._drawn))] -= penalties
        if self._bias is not None:
            ids, values = self._bias
            scores[ids] += values
        return scores if forbidden is None else scores.masked_fill_(forbidden, -torch.inf)
