"""Prediction of the first layer by the token; FineMoE (section 4.2) looks up tokens of similar meaning.

No layer of the same token comes before the first one, so its router can only be asked with what the last
layer of the token before has given. But what it will see is mostly the token's embedding, so a token that was
seen before likely uses the experts that it used then. Which of the two is right more often is counted while
tokens are decoded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

# Tokens that are remembered; the vocabularies of today's models have up to 262,144.
_MOST_TOKENS = 1 << 18
# Weight of the newest token in the shares that are compared, and tokens before they are.
_NEWEST = 0.05
_LEAST_SEEN = 8


class TokenLookup:
    """The experts that the first layer chose for each token when it last occurred.

    Attributes:
        lookup_share: Share of a token's experts that were found by looking the token up, a moving mean.
        router_share: The same of the best experts of the router's prediction.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Ints] = {}
        self.lookup_share = 0.0
        self.router_share = 0.0
        self._compared = 0

    def __len__(self) -> int:
        return len(self._seen)

    def find(self, token: int) -> Ints | None:
        """The experts of a token, int32 ``[k]``; ``None``: it was not seen yet."""
        return self._seen.get(token)

    @property
    def better(self) -> bool:
        """Whether looking tokens up is right more often than the router's prediction."""
        return self._compared >= _LEAST_SEEN and self.lookup_share > self.router_share

    def learn(self, tokens: list[int], chosen: npt.NDArray[np.int64]) -> None:
        """What the first layer has chosen in a pass.

        Args:
            tokens: Ids of its tokens.
            chosen: ``[tokens, k]``.
        """
        for token, row in zip(tokens, chosen, strict=True):
            if token in self._seen or len(self._seen) < _MOST_TOKENS:
                self._seen[token] = row.astype(np.int32)

    def compare(self, token: int, chosen: npt.NDArray[np.int64], predicted: Ints | None) -> None:
        """Count which of the two was right; to be called before :meth:`learn`.

        Args:
            token: Id of a decoded token.
            chosen: ``[k]``.
            predicted: The best ``k`` experts of the router's prediction; ``None``: there was none.
        """
        found = self.find(token)
        if found is None:
            return
        of_router = 0.0 if predicted is None else _share(predicted, chosen)
        weight = max(_NEWEST, 1 / (self._compared + 1))
        self._compared += 1
        self.lookup_share += weight * (_share(found, chosen) - self.lookup_share)
        self.router_share += weight * (of_router - self.router_share)


def _share(named: Ints, chosen: npt.NDArray[np.int64]) -> float:
    return len(set(named.tolist()) & set(chosen.tolist())) / max(1, len(chosen))
