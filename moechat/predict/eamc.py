"""Prediction from the expert activations of earlier requests (MoE-Infinity).

An expert activation matrix (EAM, section 4.1) counts how many tokens of a request chose each expert of each
layer. The collection (EAMC, section 4.2) keeps those of some hundred requests. While a token is decoded, its
own choices so far are compared with the collection, and the best match says which experts the later layers
will use (section 5).

Where paper, its code and a plain reading differ, keys of :class:`EamcOptions` choose; see
``moechat help sister-systems``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moechat.predict.requests import MOST_QUEUED, AheadQueue, Floats, Ints
from moechat.validation import require_choice, require_whole

Match = Literal["prefix", "full"]
# Matches whose similarity differs from the best by no more count as equal: sums of float32.
_TIE = 1e-6
# Share of the last priority of a queue that the next one tries first.
_ALIKE = np.float32(0.9)
_TINY = np.finfo(np.float32).tiny
_FIRST_ROOM = 16
_MOST_ENTRIES = 100_000


@dataclass(frozen=True)
class EamcOptions:
    """Parameters of the collection.

    Attributes:
        entries: N, most matrices that are kept; the paper finds 120 to suffice (figure 13), its code keeps
            1000.
        match: ``prefix``: the layers that the token has passed are compared with the same layers of the
            collection; ``full``: with whole matrices, as section 4.2 defines the distance.

    Raises:
        UsageError: A value is out of range.
    """

    entries: int = 1000
    match: Match = "prefix"

    def __post_init__(self) -> None:
        require_whole("entries", self.entries, 1, _MOST_ENTRIES)
        require_choice("match", self.match, ("prefix", "full"))


@dataclass
class _Request:
    counts: Floats  # [layers, experts]: of decoded tokens
    tokens: int = 0


class EamcPredictor:
    """The collection, and the matrix of the running token.

    Never rescans the collection: each observed layer adds ``k`` rows ``[entries]`` to the dot products.

    Args:
        layers: L, expert layers.
        experts: E, experts of a layer.
        options: Parameters.
    """

    needs_gates = False

    # Invariants: columns [0, entries) of _rows, _prefix and _scale are the collection; each matrix is scaled
    # so that a row of it sums to 1. _matrices[n] is the same matrix as _rows[:, :, n]: products read one
    # expert of all entries, a match reads one entry whole, and each lies together. _dot[n] is the product of
    # the running token's layers with entry n. _least is the last priority of the queue before.
    def __init__(self, layers: int, experts: int, options: EamcOptions | None = None) -> None:
        self._layers, self._experts = layers, experts
        self._options = options or EamcOptions()
        self._count = 0
        self._make_room(min(_FIRST_ROOM, self._options.entries))
        self._requests: dict[object, _Request] = {}
        self._running: _Request | None = None
        self._chosen = 0  # experts of the running token so far
        self._least = np.float32(0)
        # Decay of the priority with the distance, [layers, 1]: 1 - (i - l) / L.
        self._decay: Floats = (1 - np.arange(layers) / layers).astype(np.float32)[:, None]

    @property
    def entries(self) -> int:
        """Number of matrices."""
        return self._count

    def begin_request(self, key: object) -> None:
        """See :class:`moechat.predict.requests.RequestPredictor`."""
        self._requests[key] = _Request(np.zeros((self._layers, self._experts), dtype=np.float32))

    def begin_pass(self, key: object, token: int) -> AheadQueue | None:
        """See :class:`RequestPredictor`; always ``None``: nothing is known of a token before its first
        router.
        """
        if key not in self._requests:
            self.begin_request(key)
        self._running = self._requests[key]
        self._running.tokens += 1
        self._chosen = 0
        self._dot[: self._count] = 0
        return None

    def observe(self, ordinal: int, chosen: Ints, gates: Floats | None) -> None:
        """See :class:`RequestPredictor`."""
        if self._running is None:
            return
        self._running.counts[ordinal, chosen] += 1
        self._chosen += len(chosen)
        if self._count:
            self._dot[: self._count] += self._rows[ordinal, chosen, : self._count].sum(axis=0)

    def similarity(self, ordinal: int) -> Floats:
        """Cosine of the running token, whose layers up to ``ordinal`` were observed, with each entry,
        ``[entries]``.
        """
        norms = self._prefix[ordinal] if self._options.match == "prefix" else self._prefix[-1]
        own = np.sqrt(np.float32(max(1, self._chosen)))
        found: Floats = self._dot[: self._count] / (norms[: self._count] * own)
        return found

    def queue(self, ordinal: int) -> AheadQueue | None:
        """See :class:`RequestPredictor`."""
        first = ordinal + 1
        if self._running is None or self._count == 0 or first == self._layers:
            return None
        alike = self.similarity(ordinal)
        matches = np.flatnonzero(alike >= alike.max() - _TIE)
        shares: Floats
        if len(matches) == 1:
            shares = self._matrices[matches[0], first:]
        else:
            weights = self._scale[matches] / self._scale[matches].sum()
            rows = self._matrices[matches, first:].reshape(len(matches), -1)
            shares = (weights @ rows).reshape(-1, self._experts)
        priority: Floats = (shares * self._decay[1 : self._layers - ordinal]).reshape(-1)
        wanted = self._most_urgent(priority)
        layers, experts = np.divmod(wanted, self._experts)
        return AheadQueue(
            (layers + first).astype(np.int32),
            experts.astype(np.int32),
            shares.reshape(-1)[wanted].astype(np.float32),
        )

    def _most_urgent(self, priority: Floats) -> npt.NDArray[np.intp]:
        """Places of the highest priorities, in their order."""
        # Queues of successive layers are alike, so few places are above what the last one ended with.
        wanted = np.flatnonzero(priority >= max(_ALIKE * self._least, _TINY))
        if len(wanted) < MOST_QUEUED:
            wanted = np.flatnonzero(priority)
        if len(wanted) > MOST_QUEUED:
            # The least priority that is queued: twice as fast by values as by places.
            some = priority[wanted]
            wanted = wanted[some >= np.partition(some, -MOST_QUEUED)[-MOST_QUEUED]]
        wanted = wanted[np.argsort(-priority[wanted], kind="stable")][:MOST_QUEUED]
        self._least = priority[wanted[-1]] if len(wanted) == MOST_QUEUED else np.float32(0)
        return wanted

    def end_request(self, key: object) -> None:
        """See :class:`RequestPredictor`."""
        request = self._requests.pop(key, None)
        if request is self._running:
            self._running = None
        if request is not None and request.tokens > 0:
            self.add(request.counts)

    def add(self, counts: Floats) -> None:
        """Add the matrix ``[layers, experts]`` of a request; in a full collection it replaces the one most
        like it (section 4.2).
        """
        total = float(counts.sum()) / self._layers
        if total <= 0:
            return
        matrix = (counts / total).astype(np.float32)
        if self._count < self._options.entries:
            if self._count == self._rows.shape[2]:
                self._make_room(min(2 * self._count, self._options.entries))
            at = self._count
            self._count += 1
        else:
            flat = self._matrices[: self._count].reshape(self._count, -1)
            at = int(np.argmax((flat @ matrix.reshape(-1)) / self._prefix[-1, : self._count]))
        self._rows[:, :, at] = matrix
        self._matrices[at] = matrix
        self._prefix[:, at] = np.sqrt(np.cumsum((matrix**2).sum(axis=1)))
        self._scale[at] = total

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """See :class:`RequestPredictor`: float16 ``matrices [layers, experts, n]``, float32 ``scale [n]``."""
        return {
            "matrices": np.moveaxis(self._matrices[: self._count], 0, 2).astype(np.float16, order="C"),
            "scale": self._scale[: self._count].copy(),
        }

    def learn(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """See :class:`RequestPredictor`."""
        matrices, scale = arrays["matrices"], arrays["scale"]
        if matrices.shape != (self._layers, self._experts, len(scale)):
            raise ValueError(f"matrices has shape {list(matrices.shape)}")
        matrices = matrices.astype(np.float32)
        if not np.isfinite(matrices).all() or (matrices < 0).any() or not (scale > 0).all():
            raise ValueError("matrices or scale holds a value that is no count")
        if not np.isfinite(scale).all() or not np.allclose(matrices.sum(axis=1), 1, atol=0.05):
            raise ValueError("a row of matrices does not sum to 1")
        for at in range(max(0, len(scale) - self._options.entries), len(scale)):
            self.add(matrices[:, :, at] * scale[at])

    def _make_room(self, room: int) -> None:
        def grown(name: str, shape: tuple[int, ...]) -> Floats:
            larger = np.zeros((*shape, room), dtype=np.float32)
            if self._count:
                larger[..., : self._count] = getattr(self, name)[..., : self._count]
            return larger

        matrices = np.zeros((room, self._layers, self._experts), dtype=np.float32)
        if self._count:
            matrices[: self._count] = self._matrices[: self._count]
        self._matrices: Floats = matrices
        self._rows: Floats = grown("_rows", (self._layers, self._experts))
        self._prefix: Floats = grown("_prefix", (self._layers,))
        self._scale: Floats = grown("_scale", ())
        # A pass that is under way ends without predictions from the new entries.
        self._dot: Floats = grown("_dot", ())
