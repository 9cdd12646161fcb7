"""Made routing: traces of given popularity and locality, and models of any shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moechat.configurator.estimate import ModelShape
from moechat.errors import UsageError
from moechat.geometry import ExpertGeometry
from moechat.routing.trace import Trace
from moechat.simulate.simulated_model import SimulatedModel

# Sizes of a made model that are not given; those of OLMoE-1B-7B.
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 2048, 1024, 50304
_ITEM_BYTES = 2  # dense weights in bfloat16
_EXPERT_MATRICES, _ATTENTION_MATRICES = 3, 4
# Added to the key of an expert that is used again, subtracted from the others of the previous token. It is
# more than any difference of popularity or draw.
_SURE = 1e3
_FORM = "write LAYERS,EXPERTS,TOP_K,SKEW,REPEAT, such as 32,8,2,0.1,0.3"
_MOST_LAYERS, _MOST_EXPERTS, _MOST_SKEW = 1024, 4096, 10.0


@dataclass(frozen=True)
class MadeRouting:
    """Parameters of a made trace.

    Attributes:
        layers: Expert layers.
        experts: Experts in a layer.
        top_k: Experts per token and layer.
        skew: The expert of rank r in a layer is drawn with a probability in proportion to ``r ** -skew``;
            0: all alike. Recorded traces have 0.8 to 1.
        repeat: Probability that a token uses an expert of the previous token again. It is the locality of
            the trace (:meth:`moechat.routing.trace.Trace.locality`), unless a layer has fewer than
            ``2 * top_k`` experts: then a token cannot avoid all experts of the previous one.

    Raises:
        UsageError: A value is out of range.
    """

    layers: int
    experts: int
    top_k: int
    skew: float
    repeat: float

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= _MOST_LAYERS or not 1 <= self.top_k <= self.experts <= _MOST_EXPERTS:
            raise UsageError(
                f"{self.layers} layers with {self.top_k} of {self.experts} experts a token cannot be made",
                hint=f"at most {_MOST_LAYERS} layers of {_MOST_EXPERTS} experts; top-k at most the experts",
            )
        if not 0 <= self.skew <= _MOST_SKEW:
            raise UsageError(f"the skew is {self.skew:g}; it must be between 0 and {_MOST_SKEW:g}")
        if not 0 <= self.repeat <= 1:
            raise UsageError(f"the probability of repeating is {self.repeat:g}; it must be between 0 and 1")

    @classmethod
    def parse(cls, text: str) -> MadeRouting:
        """Parse ``LAYERS,EXPERTS,TOP_K,SKEW,REPEAT``.

        Raises:
            UsageError: A part is missing, or not a number, or out of range.
        """
        parts = text.split(",")
        try:
            layers, experts, top_k = (int(part) for part in parts[:3])
            skew, repeat = (float(part) for part in parts[3:])
        except ValueError:
            raise UsageError(f"{text!r} is not routing that can be made", hint=_FORM) from None
        return cls(layers, experts, top_k, skew, repeat)

    def __str__(self) -> str:
        return f"made {self.layers},{self.experts},{self.top_k},{self.skew:g},{self.repeat:g}"

    def trace(self, tokens: int, *, seed: int = 0) -> Trace:
        """Draw one sequence.

        Each expert of the previous token is used again with the probability ``repeat``; the rest of the
        token's experts are drawn by popularity, without replacement, from those that it did not use.

        Args:
            tokens: Its length.
            seed: Random seed.
        """
        random = np.random.default_rng(seed)
        popularity = -self.skew * np.log(1.0 + np.arange(self.experts))
        popularity = random.permuted(np.tile(popularity, (self.layers, 1)), axis=1)
        chosen = np.empty((tokens, self.layers, self.top_k), dtype=np.int32)
        before: np.ndarray | None = None
        for token in range(tokens):
            # Drawn without replacement by the Gumbel top-k trick.
            keys = popularity + random.gumbel(size=popularity.shape)
            if before is not None:
                again = random.random(before.shape) < self.repeat
                own = np.take_along_axis(keys, before, axis=1)
                np.put_along_axis(keys, before, own + np.where(again, _SURE, -_SURE), axis=1)
            before = np.argsort(-keys, axis=1)[:, : self.top_k]
            chosen[token] = before
        return Trace(chosen, np.array([0, tokens], dtype=np.int64), self.experts)


def made_model(
    layers: int,
    experts: int,
    top_k: int,
    *,
    bits: int = 4,
    hidden: int = _HIDDEN,
    intermediate: int = _INTERMEDIATE,
) -> SimulatedModel:
    """Sizes of a model that does not exist: plain attention, and experts of the given size in every layer."""
    geometry = ExpertGeometry(
        hidden_size=hidden, intermediate_size=intermediate, num_experts=experts, bits=bits
    )
    shape = ModelShape(
        layers=layers,
        experts=experts,
        top_k=top_k,
        bits=bits,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=_EXPERT_MATRICES * hidden * intermediate,
        dense_bytes=layers * _ATTENTION_MATRICES * hidden * hidden * _ITEM_BYTES,
        head_bytes=_VOCABULARY * hidden * _ITEM_BYTES,
        dense_itemsize=_ITEM_BYTES,
        kv_bytes=2 * layers * hidden * _ITEM_BYTES,
        hidden_size=hidden,
    )
    return SimulatedModel(f"made-{layers}x{experts}x{top_k}", shape, geometry)
