"""What a trace may hold besides the chosen experts: the routers' distributions and its tokens' embeddings.

FineMoE and MELINOE predict from them. The distribution of a layer is the softmax of its router's output over
all experts (for routers that score with a sigmoid: the scores divided by their sum, before any correction),
computed from the input of the layer's experts. A layer whose router was not found has zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# 512 MiB of float16: 43,000 tokens of a model with 48 layers of 128 experts.
MAX_GATES = 1 << 28
ARRAYS = ("gates", "embedding_ids", "embeddings")
# Sums of distributions differ from 1 by what float16 rounds.
_SUM_TOLERANCE = 0.01


@dataclass(frozen=True)
class TraceGates:
    """Distributions of the routers for every token of a trace, and the embeddings of the tokens that occur.

    Attributes:
        gates: float16 ``[tokens, layers, experts]``: each row sums to 1, or is 0 where the router is unknown.
        embedding_ids: int32 ``[u]``, ascending: token ids that have an embedding.
        embeddings: float16 ``[u, hidden]``: what the model's embedding layer returns for them.

    Raises:
        ValueError: Shapes or values contradict each other.
    """

    gates: npt.NDArray[np.float16]
    embedding_ids: npt.NDArray[np.int32]
    embeddings: npt.NDArray[np.float16]

    def __post_init__(self) -> None:
        ids = self.embedding_ids
        if self.gates.ndim != 3:
            raise ValueError(f"gates has shape {list(self.gates.shape)}, not [tokens, layers, experts]")
        if ids.ndim != 1 or self.embeddings.ndim != 2 or len(ids) != len(self.embeddings):
            raise ValueError(
                f"embeddings has shape {list(self.embeddings.shape)} for {list(ids.shape)} embedding_ids"
            )
        if len(ids) and (ids[0] < 0 or (np.diff(ids) <= 0).any()):
            raise ValueError("embedding_ids is not strictly ascending from 0 on")
        if not np.isfinite(self.embeddings).all():
            raise ValueError("embeddings holds a value that is not finite")
        sums = self.gates.sum(axis=-1, dtype=np.float32)
        # Not a number is in no range.
        sound = (sums == 0) | (np.abs(sums - 1) <= _SUM_TOLERANCE)
        if not sound.all() or (self.gates < 0).any():
            raise ValueError("gates holds a row that is no distribution")

    def rows(self, rows: slice) -> TraceGates:
        """Those of some tokens, with all embeddings."""
        return TraceGates(np.ascontiguousarray(self.gates[rows]), self.embedding_ids, self.embeddings)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the file."""
        return {
            "gates": self.gates,
            "embedding_ids": self.embedding_ids,
            "embeddings": self.embeddings,
        }


def gates_of(arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int, int]) -> TraceGates | None:
    """What a file has of :data:`ARRAYS`; ``None`` if it has no gates.

    Args:
        arrays: Arrays of the file.
        shape: Tokens, layers and experts of its trace.

    Raises:
        ValueError: They have other types or shapes, or contradict each other.
    """
    if "gates" not in arrays:
        return None
    # Shapes before values: a small file can unpack to very many.
    gates = arrays["gates"]
    if gates.shape != shape:
        raise ValueError(f"gates has shape {list(gates.shape)}, not {list(shape)} as the trace")
    if gates.size > MAX_GATES:
        raise ValueError(f"gates has {gates.size} entries, more than {MAX_GATES}")
    ids = arrays.get("embedding_ids", np.zeros(0, dtype=np.int32))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"embedding_ids has type {ids.dtype} and shape {list(ids.shape)}, not integers [u]")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= np.iinfo(np.int32).max:
        raise ValueError(f"embedding_ids runs from {ids.min()} to {ids.max()}; an id is an int32 from 0 on")
    embeddings = arrays.get("embeddings", np.zeros((len(ids), 0), dtype=np.float16))
    if embeddings.size > MAX_GATES:
        raise ValueError(f"embeddings has {embeddings.size} entries, more than {MAX_GATES}")
    for name, array in (("gates", gates), ("embeddings", embeddings)):
        if array.dtype.kind != "f":
            raise ValueError(f"{name} has type {array.dtype}, not floating point")
    with np.errstate(over="ignore"):  # what becomes infinite is refused
        return TraceGates(
            np.ascontiguousarray(gates, dtype=np.float16),
            ids.astype(np.int32),
            np.ascontiguousarray(embeddings, dtype=np.float16),
        )
