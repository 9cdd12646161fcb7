"""Connects the tier of a model with predictors that learn from requests.

The engine says when requests and tokens begin and end; the layers say what their routers chose. Only tokens
that are decoded alone are observed: not prompts, and not passes that several answers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.predict.requests import AheadQueue, RequestPredictor, known_part


class Distributing(Protocol):
    """A router; see :meth:`moechat.models.router_search.Router.distribution`."""

    def distribution(self, hidden: torch.Tensor) -> torch.Tensor: ...


class PromptPredictor(Protocol):
    """Predicts from a prompt; see :class:`moechat.predict.preload.PreloadPredictor`."""

    def scores(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """float32 ``[layers, experts]``."""
        ...


class Requests:
    """The requests of one tier.

    Args:
        layers: Expert layers.
        experts: Experts of a layer.
        predictor: Learns from requests; ``None``: none does.
        routers: Router of each layer, for their distributions; ``None`` where it is not known.
        prompts: Predicts from prompts what to load beside them; ``None``: nothing is loaded.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        predictor: RequestPredictor | None = None,
        routers: Sequence[Distributing | None] = (),
        prompts: PromptPredictor | None = None,
    ) -> None:
        self._layers, self._experts = layers, experts
        self.predictor = predictor
        self._routers = routers
        self._prompts = prompts
        self._open = False  # a pass of one token is under way that is observed

    def begin(
        self,
        runner: _native.ExpertRunner,
        key: object,
        ids: Sequence[int],
        kept: npt.NDArray[np.int32],
    ) -> None:
        """A request begins.

        Args:
            runner: The tier's.
            key: The request.
            ids: Its prompt.
            kept: int32 ``[layers]``: experts that each layer keeps.
        """
        runner.begin_request()
        if self.predictor is not None:
            self.predictor.begin_request(key)
        if self._prompts is not None:
            order = np.argsort(-self._prompts.scores(ids), axis=1, kind="stable").astype(np.int32)
            layers = np.repeat(np.arange(self._layers, dtype=np.int32), kept)
            best = np.concatenate([row[:count] for row, count in zip(order, kept, strict=True)])
            runner.prefetch_ahead(layers, best, stays=True)

    def begin_pass(self, runner: _native.ExpertRunner, key: object, token: int) -> None:
        """A token of a request is decoded alone.

        Args:
            runner: The tier's.
            key: The request.
            token: Its id.
        """
        if self.predictor is None:
            return
        self._open = True
        self._fetch(runner, self.predictor.begin_pass(key, token), None)

    def chosen(
        self,
        runner: _native.ExpertRunner,
        ordinal: int,
        index: npt.NDArray[Any],
        weight: npt.NDArray[np.float32],
        hidden: torch.Tensor | None,
        max_bytes: int | None,
    ) -> None:
        """A router of a pass has chosen; fetches what is expected next.

        Args:
            runner: The tier's, in which the layer has begun.
            ordinal: Expert layer.
            index: ``[tokens, k]``.
            weight: float32 ``[tokens, k]``.
            hidden: float32 ``[tokens, hidden]`` on the CPU, the input of the experts; ``None``: it is not
                there.
            max_bytes: Most bytes to fetch; ``None``: no limit.
        """
        if not self._open or self.predictor is None or len(index) != 1:
            return
        row = index[0].astype(np.int32)
        gates = self._gates(ordinal, row, weight[0], hidden) if self.predictor.needs_gates else None
        self.predictor.observe(ordinal, row, gates)
        self._open = ordinal < self._layers - 1
        self._fetch(runner, self.predictor.queue(ordinal), max_bytes)

    def end(self, key: object) -> None:
        """A request has ended; harmless when repeated."""
        self._open = False
        if self.predictor is not None:
            self.predictor.end_request(key)

    def _gates(
        self,
        ordinal: int,
        row: npt.NDArray[np.int32],
        weight: npt.NDArray[np.float32],
        hidden: torch.Tensor | None,
    ) -> npt.NDArray[np.float32]:
        """Distribution of a router; where it cannot be had, the weights of the chosen experts."""
        router = self._routers[ordinal] if ordinal < len(self._routers) else None
        if router is not None and hidden is not None:
            found: npt.NDArray[np.float32] = router.distribution(hidden[-1:])[0].numpy()
            return found
        return known_part(row, weight, self._experts)

    def _fetch(self, runner: _native.ExpertRunner, queue: AheadQueue | None, max_bytes: int | None) -> None:
        if queue is not None and len(queue.experts):
            runner.prefetch_ahead(queue.layers, queue.experts, queue.scores, max_bytes)
