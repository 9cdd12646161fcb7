"""Modules of a model, wrapped so that a wave can leave a layer at its experts and enter it again.

While no wave is at work, a wrapped module does what it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from moechat.models.wave_chunks import Chunk, NotInWavesError


class AtExperts(Exception):  # noqa: N818 - no error
    """Leaves a layer at its experts."""


@dataclass
class Step:
    """How the wrapped modules behave at the moment.

    Attributes:
        chunk: The chunk that is computed.
        layer: Takes the place of a decoder layer: number, arguments; ``None``: layers compute.
        resumes: Step 3; else step 1.
    """

    chunk: Chunk
    layer: Callable[[int, tuple[Any, ...], dict[str, Any]], Any] | None = None
    resumes: bool = False


class WaveModules:
    """Decoder layers, experts, and the modules between whose outputs step 3 of a wave takes from step 1.

    Args:
        layers: Decoder layers, in order.
        experts: Experts module of each; ``None``: it has none.

    Attributes:
        step: What a wave does at the moment; ``None``: nothing, so that all modules are as before.
    """

    def __init__(self, layers: Sequence[nn.Module], experts: Sequence[nn.Module | None]) -> None:
        self.step: Step | None = None
        self._layers = layers
        self._experts = experts
        self._wrapped = False

    def wrap(self) -> None:
        """Wrap layers, experts and the modules whose outputs step 3 takes from step 1; once."""
        if self._wrapped:
            return
        self._wrapped = True
        for number, (layer, experts) in enumerate(zip(self._layers, self._experts, strict=True)):
            if experts is not None:
                for module in _kept_modules(layer, experts):
                    _replace(module, self._keeping(module))
                _replace(experts, self._answering(experts))
            _replace(layer, self._standing_in(number, layer))

    def _standing_in(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        own = layer.forward

        def forward(*args: Any, **named: Any) -> Any:
            step = self.step
            if step is None or step.layer is None:
                return own(*args, **named)
            return step.layer(number, args, named)

        return forward

    def _keeping(self, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **named: Any) -> Any:
            step = self.step
            if step is None or step.layer is not None:
                return own(*args, **named)
            outputs = step.chunk.outputs
            if step.resumes and outputs:
                known, out = outputs.popleft()
                if known is not module:
                    raise NotInWavesError("modules are called in another order")
                return out
            out = own(*args, **named)
            if not step.resumes:
                outputs.append((module, _without_weights(out, step.chunk)))
            return out

        return forward

    def _answering(self, experts: nn.Module) -> Callable[..., Any]:
        own = experts.forward

        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> Any:
            step = self.step
            if step is None or step.layer is not None:
                return own(hidden_states, top_k_index, top_k_weights)
            part = step.chunk
            if not step.resumes:
                part.request = (hidden_states, top_k_index, top_k_weights)
                raise AtExperts
            answer, part.answer = part.answer, None
            if answer is None:
                raise NotInWavesError("a layer calls its experts twice")
            return answer.reshape(hidden_states.shape)

        return forward


@contextmanager
def counted_results(layers: Sequence[nn.Module]) -> Iterator[set[int]]:
    """Collects how many results layers return in a tuple; 0: no tuple."""
    counts: set[int] = set()

    def count(_layer: nn.Module, _args: Any, out: Any) -> None:
        counts.add(len(out) if isinstance(out, tuple) else 0)

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _kept_modules(layer: nn.Module, experts: nn.Module) -> list[nn.Module]:
    """The largest modules of a layer that do not contain its experts, except norms: these cost less to
    compute again than their outputs cost memory.
    """
    found: list[nn.Module] = []
    above = {module for module in layer.modules() if any(part is experts for part in module.modules())}
    for module in above:
        if module is not experts:
            found += [child for child in module.children() if child not in above and not _is_norm(child)]
    return found


def _without_weights(out: Any, chunk: Chunk) -> Any:
    """An output without the weights of attention, ``[1, heads, tokens, keys]``, which layers do not read.

    Hidden states in several streams, ``[1, tokens, streams, hidden]``, stay.
    """
    tokens, hidden = chunk.tokens, chunk.hidden.shape[-1]
    if not isinstance(out, tuple):
        return out

    def is_weights(item: Any) -> bool:
        if not isinstance(item, torch.Tensor) or item.ndim != 4 or item.shape[2] != tokens:
            return False
        return item.shape[1] != tokens or item.shape[3] != hidden

    return tuple(None if is_weights(item) else item for item in out)


def _is_norm(module: nn.Module) -> bool:
    weights = [weight for weight in module.parameters() if weight is not None]
    return bool(weights) and all(weight.ndim == 1 for weight in weights) and not list(module.children())


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    # inspect.signature then shows the module's parameters, and attributes of native replacements stay.
    module.__dict__["forward"] = wraps(module.forward)(forward)
