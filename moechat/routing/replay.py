"""Playback of a trace in place of a model's routers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.routing.trace import Trace


class Replay:
    """A cursor over a trace. Layer 0 of a pass advances it; the other layers of the pass read the same
    tokens.

    After the last token it starts again from the first. Not thread-safe.

    Args:
        trace: A trace in the shape of the model.
        position: First token of the next pass.
    """

    def __init__(self, trace: Trace, position: int = 0) -> None:
        self.trace = trace
        # int64 like the output of torch's routers.
        self._experts = np.ascontiguousarray(trace.experts, dtype=np.int64)
        self._experts.flags.writeable = False
        self._tokens = trace.tokens
        self._layers = trace.layers
        self.rewind(position)

    def rewind(self, position: int = 0) -> None:
        """Set the first token of the next pass.

        Raises:
            ValueError: ``position`` is out of range.
        """
        if not 0 <= position < self._tokens:
            raise ValueError(f"position is {position}; the trace has {self._tokens} tokens")
        self._start = position  # first token of the current pass, or of the next one
        self._count = 0  # tokens of the current pass

    @property
    def position(self) -> int:
        """First token of the next pass."""
        return (self._start + self._count) % self._tokens

    def route(self, ordinal: int, tokens: int) -> npt.NDArray[np.int64]:
        """Experts that layer ``ordinal`` chooses for the tokens of this pass.

        Args:
            ordinal: Expert layer; 0 starts a new pass.
            tokens: Tokens of the pass.

        Returns:
            int64 ``[tokens, k]``, read-only.

        Raises:
            ValueError: The layer does not exist, or ``tokens`` differs from layer 0 of this pass.
        """
        if ordinal == 0:
            self._start = (self._start + self._count) % self._tokens
            self._count = tokens
        elif tokens != self._count:
            raise ValueError(f"layer {ordinal} has {tokens} tokens, layer 0 of this pass {self._count}")
        if not 0 <= ordinal < self._layers or tokens < 1:
            raise ValueError(f"{tokens} tokens of layer {ordinal}: there are {self._layers} layers")
        start = self._start
        if start + tokens <= self._tokens:
            rows = self._experts[start : start + tokens, ordinal]
            return rows if tokens == 1 else np.ascontiguousarray(rows)
        wrapped: npt.NDArray[np.int64] = self._experts[
            np.arange(start, start + tokens) % self._tokens, ordinal
        ]
        return wrapped

    def row(self, ordinal: int, ahead: int) -> tuple[int, int]:
        """Token and layer of the choice ``ahead`` layers after layer ``ordinal`` of the last token of this
        pass.
        """
        turns, layer = divmod(ordinal + ahead, self._layers)
        return (self._start + self._count - 1 + turns) % self._tokens, layer

    def upcoming(self, ordinal: int, ahead: int) -> npt.NDArray[np.int64]:
        """Experts chosen ``ahead`` layers after layer ``ordinal`` of the last token of this pass.

        The layers of the next token follow the last layer.

        Returns:
            int64 ``[k]``, read-only.
        """
        token, layer = self.row(ordinal, ahead)
        chosen: npt.NDArray[np.int64] = self._experts[token, layer]
        return chosen

    def future(self) -> npt.NDArray[np.int32]:
        """All choices from the next pass to the end of the trace: int32 ``[tokens, layers, k]``."""
        return self.trace.experts[self.position :]
