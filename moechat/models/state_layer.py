"""States of linear attention and convolutions, in memory that successive attention caches reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

# Attributes of a layer that hold its states, each a dictionary of tensors.
STATES = ("conv_states", "recurrent_states")


class StateMemory:
    """Memory of the states of one layer, with one user at a time."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, kind: str, number: int, state: torch.Tensor) -> torch.Tensor:
        """``state`` in the memory that held the last one with this name; if it does not fit, its own is kept.

        Args:
            kind: One of :data:`STATES`.
            number: Of the state in the layer.
            state: Its first values.
        """
        held = self._tensors.get((kind, number))
        if (
            held is None
            or held.shape != state.shape
            or held.dtype is not state.dtype
            or held.device != state.device
        ):
            self._tensors[kind, number] = state
            return state
        if held is not state:
            held.copy_(state)
        return held


class StateLayer(LinearAttentionLayer):
    """States of one layer. They keep their memory: transformers overwrites them for each token.

    Attributes:
        memory: Memory to use; ``None``: the layer allocates its own.
    """

    memory: StateMemory | None = None
    memory_type = StateMemory

    def lazy_initialization(self, *arguments: Any, **named: Any) -> None:
        """As transformers' own layer."""
        super().lazy_initialization(*arguments, **named)
        if self.memory is None:
            return
        for kind in STATES:
            states = getattr(self, kind)
            for number, state in states.items():
                if state is not None:
                    states[number] = self.memory.take(kind, number, state)

    @property
    def is_initialized(self) -> bool:
        """Whether it holds a state."""
        return bool(self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Its states."""
        return [state for kind in STATES for state in getattr(self, kind).values() if state is not None]

    def sharing(self) -> StateLayer:
        """Another layer with the same states, in the same memory."""
        made = StateLayer(self.number_of_states)
        for name, value in vars(self).items():
            setattr(made, name, dict(value) if isinstance(value, dict) else value)
        return made

    def shares(self, other: StateLayer) -> bool:
        """Whether all that is known of the states of both is the same, memory included."""
        theirs = vars(other)
        return all(
            _same(theirs.get(name), value) for name, value in vars(self).items() if isinstance(value, dict)
        )


@dataclass(frozen=True)
class CopiedStates:
    """The layer of an attention cache for a token before which its states are copied.

    Attributes:
        layer: The layer.
        copies: By kind and number of a state; of the same shape and type.
    """

    layer: StateLayer
    copies: Mapping[tuple[str, int], torch.Tensor]

    def copy(self) -> None:
        """Copy the states as they are now."""
        for (kind, number), to in self.copies.items():
            to.copy_(getattr(self.layer, kind)[number])

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """As native code gets the copies: their addresses, 0 for one that there is not, and their bytes."""
        found = [self.copies.get((kind, 0)) for kind in STATES]
        addresses = [0 if copy is None else copy.data_ptr() for copy in found]
        sizes = [0 if copy is None else copy.nbytes for copy in found]
        return addresses[0], addresses[1], sizes[0], sizes[1]


def places_of_states(places: Callable[[Any], tuple[int, int] | None], layer: Any) -> tuple[int, ...] | None:
    """What native code gets for a token: the result of ``places`` for the layer, and where its copies go."""
    if type(layer) is not CopiedStates:
        return places(layer)
    found = places(layer.layer)
    return None if found is None else (*found, *layer.addresses)


def _same(found: Any, wanted: dict[int, Any]) -> bool:
    return found.keys() == wanted.keys() and all(found[number] is value for number, value in wanted.items())


def layer_in(cache: Any, index: int) -> Any:
    """A layer of an attention cache; ``None`` if it has none of this index, or there is no cache."""
    layers = getattr(cache, "layers", ())
    return layers[index] if index < len(layers) else None


def token_states(
    layer: Any, before_shape: tuple[int, ...], state_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """States of a layer's convolution and its float32 states, as native code overwrites them for a token.

    ``None``: before the first token, of another shape, or of another kind of layer.

    Args:
        layer: Of an attention cache.
        before_shape: Of the convolution's.
        state_shape: Of the others.
    """
    if type(layer) is not StateLayer or layer.record_past or not layer.has_previous_state[0]:
        return None
    before, state = layer.conv_states[0], layer.recurrent_states[0]
    if before is None or state is None or not (before.is_contiguous() and state.is_contiguous()):
        return None
    fits = before.shape == before_shape and state.shape == state_shape and state.dtype is torch.float32
    return (before, state) if fits else None


def begun_states(
    layer: Any, before_shape: tuple[int, ...], state_shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As :func:`token_states`; before the first token, a layer gets states of zeros.

    Args:
        layer: Of an attention cache.
        before_shape: Of the convolution's, whose last size is the number of its tokens.
        state_shape: Of the others.
        dtype: Of the convolution's.
    """
    if type(layer) is StateLayer and not layer.record_past and not layer.has_previous_state[0]:
        before = torch.zeros(before_shape, dtype=dtype)
        layer.update_conv_state(before, conv_kernel_size=before_shape[-1])
        layer.update_recurrent_state(torch.zeros(state_shape))
    return token_states(layer, before_shape, state_shape)


def token_convolution(layer: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """As :func:`token_states`, of a layer that has only the states of a convolution, of this shape."""
    if type(layer) is not StateLayer or layer.record_past or not layer.has_previous_state[0]:
        return None
    before = layer.conv_states[0]
    fits = before is not None and before.shape == shape and before.is_contiguous()
    return before if fits and layer.recurrent_states[0] is None else None
