"""Linear attention of recorded passes by our kernels: five launches in place of torch's forty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moechat.models.cache_argument import STATES
from moechat.models.decode.gated_delta import GatedDelta, recognise_gated_deltas
from moechat.models.decode.wiring import only_known_arguments
from moechat.offload.kernels import gated_delta, layer_steps
from moechat.offload.kernels.steps import served
from moechat.offload.replay_cache import ReplayCache


def recognise_deltas(model: nn.Module) -> dict[nn.Module, GatedDelta]:
    """The mixers of ``model`` that the kernels can compute.

    Args:
        model: On the CPU, but for its projections.
    """
    return {
        module: delta
        for module, delta in recognise_gated_deltas(model).items()
        if delta.k_dim <= gated_delta.MOST_KEY_DIM
    }


def mixed(delta: GatedDelta, x: torch.Tensor, *, states: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mixer's result for a token, ``[1, hidden]``; overwrites its states.

    Args:
        delta: The mixer; :func:`serves_mixer`.
        x: ``[1, hidden]``, contiguous.
        states: As of :meth:`~moechat.models.decode.gated_delta.GatedDelta.states_of`.
    """
    made = gated_delta.step(delta, layer_steps.projected(x, delta.projections), *states)
    (result,) = layer_steps.projected(made, [delta.output])
    return result


def serves_mixer(delta: GatedDelta, x: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the kernels compute a mixer for these hidden states of a token."""
    weights = delta.parameters()
    return (
        x.shape[:-1] == (1, 1)
        and x.is_contiguous()
        and not any(delta.hooks())
        and all(served(x, weight) and weight.is_contiguous() for weight in weights)
        and served(x, states[0])
    )


def delta_forward(module: nn.Module, delta: GatedDelta) -> Callable[..., Any]:
    """A ``forward`` for a mixer: by the kernels, where they serve the inputs."""
    own = module.forward

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        cache = named.get(STATES)
        states = delta.states_of(cache) if isinstance(cache, ReplayCache) else None
        if (
            states is None
            or attention_mask is not None
            or not only_known_arguments(named)
            or not serves_mixer(delta, hidden_states, states)
        ):
            return own(hidden_states, attention_mask=attention_mask, **named)
        return mixed(delta, hidden_states.view(1, -1), states=states).view_as(hidden_states)

    return forward
