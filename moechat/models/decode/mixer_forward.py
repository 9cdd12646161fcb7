"""The ``forward`` of mixers with states whose tokens native code computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from moechat.models.cache_argument import STATES
from moechat.models.decode.products import is_sequence
from moechat.models.decode.wiring import only_known_arguments

States = tuple[torch.Tensor, torch.Tensor]
# (hidden states [1, tokens, hidden], states, whether these have just been made) -> result.
Compute = Callable[[torch.Tensor, States, bool], torch.Tensor]


class StatefulMixer(Protocol):
    """What is known of such a mixer."""

    @property
    def mixer(self) -> Any:
        """The module."""

    def states_of(self, cache: Any) -> States | None:
        """Its states in an attention cache; ``None`` before the first token."""

    def begun_in(self, cache: Any) -> States | None:
        """As :meth:`states_of`; before the first token the cache gets states of zeros."""

    def hooks(self) -> tuple[Any, ...]:
        """Hook dictionaries of all modules that are bypassed."""


def mixer_forward(
    known: StatefulMixer, size: int, dtype: torch.dtype, compute: Compute
) -> Callable[..., Any]:
    """A ``forward`` for ``known.mixer``: ``compute`` for the tokens of one sequence on the CPU, else its own.

    Args:
        known: The mixer.
        size: Hidden size.
        dtype: Of hidden states, and of the states of the convolution.
        compute: Overwrites the states.
    """
    own, hooks, states_of, begun_in = known.mixer.forward, known.hooks(), known.states_of, known.begun_in

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        if (
            is_sequence(hidden_states, size, dtype)
            and attention_mask is None
            and not any(hooks)
            and only_known_arguments(named)
        ):
            cache: Any = named.get(STATES)
            found = states_of(cache)
            states = begun_in(cache) if found is None else found
            if states is not None and states[0].dtype is dtype:
                return compute(hidden_states, states, found is None)
        return own(hidden_states, attention_mask=attention_mask, **named)

    return forward
