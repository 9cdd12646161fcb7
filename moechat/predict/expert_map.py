"""Prediction from the routers' distributions of earlier tokens (FineMoE).

An expert map (section 4.1) is what all routers said of one token, with the token's embedding. A token that is
being decoded is compared with the maps of earlier ones: by its embedding before the first layer, then by the
distributions of the layers that it has passed (section 4.2). The rows of the most similar map say what the
layers ``distance`` ahead will choose; the less similar it is, the more experts are fetched (section 4.3).

Where paper, its code and a plain reading differ, keys of :class:`MapOptions` choose; see ``moechat help
sister-systems``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.predict.requests import MOST_QUEUED, AheadQueue, Floats, Ints, known_part
from moechat.validation import require_whole

Embed = Callable[[int], Floats | None]
Halves = npt.NDArray[np.float16]
_FIRST_ROOM = 64
_LEAST = np.float32(1e-12)  # of a norm
_MOST_ENTRIES = 100_000


@dataclass(frozen=True)
class MapOptions:
    """Parameters of the store of maps.

    Attributes:
        entries: N, most maps that are kept (section 6.1: 1000).
        distance: d, layers from the one that was observed to the one that is predicted (section 6.1: 3).

    Raises:
        UsageError: A value is out of range.
    """

    entries: int = 1000
    distance: int = 3

    def __post_init__(self) -> None:
        require_whole("entries", self.entries, 1, _MOST_ENTRIES)
        require_whole("distance", self.distance, 1, 1 << 10)


@dataclass
class _Token:
    """The running token.

    Attributes:
        id: Its id; -1: not known.
        rows: float32 ``[layers, experts]``: the distributions so far.
        norm: Sum of the squares of these.
        found: Experts that are predicted for later layers, and their shares, by layer.
    """

    id: int
    rows: Floats
    norm: float = 0.0
    found: dict[int, tuple[Ints, Floats]] = field(default_factory=dict)


class ExpertMapPredictor:
    """The store of maps, and the map of the running token.

    Args:
        layers: L, expert layers.
        experts: E, experts of a layer.
        top_k: K, experts that a router chooses.
        options: Parameters.
        embed: The embedding float32 ``[hidden]`` of a token id, or ``None`` where it is not known; without it
            only tokens that have been seen before are recognised.
    """

    needs_gates = True

    # Invariants: entries [0, entries) of _maps [layers, room, experts], _norms [layers, room] and _ids [room]
    # are the store, so that what one layer is compared with lies together. Of _embeddings [room, hidden]
    # those that are known; the others are 0. Maps and embeddings are float16, as they are kept: reading them
    # takes most of the time. _newest[id] is the newest entry with that id. _dot[n] is the product of the
    # running token's layers with map n.
    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        options: MapOptions | None = None,
        *,
        embed: Embed = lambda _: None,
    ) -> None:
        self._layers, self._experts, self._top_k = layers, experts, top_k
        self._options = options or MapOptions()
        self._distance = min(self._options.distance, layers)
        self._embed = embed
        self._count = 0
        self._width = 0  # of an embedding, once one is known
        self._make_room(min(_FIRST_ROOM, self._options.entries))
        self._newest: dict[int, int] = {}
        self._token: _Token | None = None

    @property
    def entries(self) -> int:
        """Number of maps."""
        return self._count

    def begin_request(self, key: object) -> None:
        """See :class:`moechat.predict.requests.RequestPredictor`; maps belong to no request."""

    def begin_pass(self, key: object, token: int) -> AheadQueue | None:
        """See :class:`RequestPredictor`."""
        self._token = _Token(token, np.zeros((self._layers, self._experts), dtype=np.float32))
        self._dot[: self._count] = 0
        if self._count == 0:
            return None
        best, score = self._by_meaning(token)
        if best < 0:
            return None
        for layer in range(min(self._distance, self._layers)):
            self._token.found[layer] = self._wanted(layer, best, score)
        return self._ordered(-1)

    def observe(self, ordinal: int, chosen: Ints, gates: Floats | None) -> None:
        """See :class:`RequestPredictor`."""
        token = self._token
        if token is None:
            return
        row: Floats = known_part(chosen, None, self._experts) if gates is None else gates
        token.rows[ordinal] = row
        token.norm += float(row @ row)
        token.found.pop(ordinal, None)
        if self._count:
            self._dot[: self._count] += _products(self._maps[ordinal, : self._count], row)
        if ordinal == self._layers - 1:
            self._keep(token)
            self._token = None

    def queue(self, ordinal: int) -> AheadQueue | None:
        """See :class:`RequestPredictor`."""
        token, target = self._token, ordinal + self._distance
        if token is None or self._count == 0:
            return None
        if target < self._layers:
            alike = self._along(ordinal)
            best = int(alike.argmax())
            token.found[target] = self._wanted(target, best, float(alike[best]))
        return self._ordered(ordinal)

    def end_request(self, key: object) -> None:
        """See :class:`RequestPredictor`; every token's map was kept when it was complete."""
        self._token = None

    def _along(self, ordinal: int) -> Floats:
        """Cosine of the layers so far with the same layers of each map, ``[entries]`` (equation 5)."""
        assert self._token is not None
        own = np.float32(np.sqrt(self._token.norm) or 1)
        found: Floats = self._dot[: self._count] / np.maximum(
            self._norms[ordinal, : self._count] * own, _LEAST
        )
        return found.astype(np.float32, copy=False)

    def _by_meaning(self, token: int) -> tuple[int, float]:
        """The map of the token with the most similar embedding (equation 4), -1 if there is none, and the
        similarity. The embedding of a decoded token is that of its id, so a token seen before matches its
        newest map exactly.
        """
        known = self._newest.get(token)
        if known is not None:
            return known, 1.0
        alike = self._meanings(token)
        if alike is None:
            return -1, 0.0
        best = int(alike.argmax())
        return best, float(alike[best])

    def _meanings(self, token: int) -> Floats | None:
        """Cosine of a token's embedding with that of each map, ``[entries]``; ``None``: it has none."""
        vector = self._unit(token)
        if vector is None or self._width == 0:
            return None
        return _products(self._embeddings[: self._count], vector)

    def _unit(self, token: int) -> Floats | None:
        vector = self._embed(token) if token >= 0 else None
        if vector is None:
            return None
        length = float(np.linalg.norm(vector))
        if not 0 < length < np.inf:
            return None
        found: Floats = (vector / length).astype(np.float32)
        return found

    def _wanted(self, layer: int, entry: int, score: float) -> tuple[Ints, Floats]:
        """What is fetched by a map's row: its best experts until their shares add up to ``1 - score``, and at
        least K (equations 6 to 8), and these shares. None has a share of 0.
        """
        threshold = min(1.0, max(0.0, 1.0 - score))
        row = self._maps[layer, entry].astype(np.float32)
        order = np.argsort(-row, kind="stable")
        shares = row[order]
        count = max(self._top_k, int(np.searchsorted(np.cumsum(shares), threshold)) + 1)
        count = min(count, int(np.count_nonzero(row)))
        return order[:count].astype(np.int32), shares[:count]

    def _ordered(self, ordinal: int) -> AheadQueue | None:
        """What is predicted for later layers by p / distance (section 4.3); ``ordinal`` -1: before the first
        layer.
        """
        assert self._token is not None
        found = self._token.found
        layers, experts, scores, priority = [], [], [], []
        for layer in sorted(found):
            if layer <= ordinal:
                continue
            named, shares = found[layer]
            layers.append(np.full(len(named), layer, dtype=np.int32))
            experts.append(named)
            scores.append(shares)
            priority.append(shares / np.float32(layer - ordinal))
        if not layers:
            return None
        order = np.argsort(-np.concatenate(priority), kind="stable")[:MOST_QUEUED]
        return AheadQueue(
            np.concatenate(layers)[order], np.concatenate(experts)[order], np.concatenate(scores)[order]
        )

    def _keep(self, token: _Token) -> None:
        """Keep the map of a token; in a full store it replaces the most redundant one (section 4.4)."""
        if token.norm <= 0:
            return
        if self._count < self._options.entries:
            if self._count == len(self._ids):
                self._make_room(min(2 * self._count, self._options.entries))
            at = self._count
            self._count += 1
        else:
            at = int(self.redundancy(token.id, self._along(self._layers - 1)).argmax())
            if self._newest.get(int(self._ids[at])) == at:
                del self._newest[int(self._ids[at])]
        self._put(at, token.id, token.rows)

    def redundancy(self, token: int, alike: Floats) -> Floats:
        """How much each map repeats that of a token, ``[entries]``: ``d/L`` of the embeddings' similarity,
        the rest of the maps' (section 4.4).

        Args:
            token: Its id.
            alike: Cosine of its map with each, ``[entries]``.
        """
        share = np.float32(self._distance / self._layers)
        meanings = self._meanings(token)
        if meanings is None:
            meanings = (self._ids[: self._count] == token).astype(np.float32)
        found: Floats = share * meanings + (1 - share) * alike
        return found

    def _put(self, at: int, token: int, rows: Floats) -> None:
        self._maps[:, at] = rows
        kept = self._maps[:, at].astype(np.float32)
        self._norms[:, at] = np.sqrt(np.cumsum((kept**2).sum(axis=1)))
        self._ids[at] = token
        if token >= 0:
            self._newest[token] = at
        vector = self._unit(token)
        if vector is not None and self._width == 0:
            self._width = len(vector)
            self._embeddings = np.zeros((len(self._ids), self._width), dtype=np.float16)
        if self._width:
            self._embeddings[at] = 0 if vector is None else vector

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """See :class:`RequestPredictor`: float16 ``maps [n, layers, experts]``.

        Not the tokens: in their order their ids are the text of answers. So kept maps are found by their
        distributions alone.
        """
        return {"maps": self._maps[:, : self._count].swapaxes(0, 1).copy()}

    def learn(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """See :class:`RequestPredictor`."""
        maps = arrays["maps"]
        if maps.ndim != 3 or maps.shape[1:] != (self._layers, self._experts):
            raise ValueError(f"maps has shape {list(maps.shape)}")
        maps = maps.astype(np.float32)
        if not np.isfinite(maps).all() or (maps < 0).any() or (maps.sum(axis=2) > 1.05).any():
            raise ValueError("a row of maps is no distribution")
        for rows in maps[-self._options.entries :]:
            if self._count == len(self._ids):
                self._make_room(min(2 * self._count, self._options.entries))
            self._count += 1
            self._put(self._count - 1, -1, rows)

    def _make_room(self, room: int) -> None:
        def grown(name: str, shape: tuple[int, ...], kind: type, *, axis: int = 0) -> Any:
            larger: npt.NDArray[Any] = np.zeros(shape, dtype=kind)
            if self._count:
                known = (slice(None),) * axis + (slice(self._count),)
                larger[known] = getattr(self, name)[known]
            return larger

        self._maps = grown("_maps", (self._layers, room, self._experts), np.float16, axis=1)
        self._norms = grown("_norms", (self._layers, room), np.float32, axis=1)
        self._ids = grown("_ids", (room,), np.int32)
        self._dot = grown("_dot", (room,), np.float32)
        self._embeddings = grown("_embeddings", (room, self._width), np.float16)


def _products(rows: Halves, vector: Floats) -> Floats:
    """``rows [n, m] @ vector [m]``, float32 ``[n]``."""
    found = np.empty((1, len(rows)), dtype=np.float32)
    inputs = np.ascontiguousarray(vector, dtype=np.float32)[None]
    _native.rows16_forward(rows.view(np.uint16), True, inputs, None, found)
    products: Floats = found[0]
    return products
