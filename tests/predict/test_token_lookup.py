"""The first layer is predicted by the token, where that is right more often than its router."""

from __future__ import annotations

import numpy as np
import pytest

from moechat.predict.token_lookup import TokenLookup


def row(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


def test_a_token_likely_uses_what_it_used_last() -> None:
    lookup = TokenLookup()
    assert lookup.find(7) is None
    lookup.learn([7, 8, 7], np.array([[1, 2], [3, 4], [5, 6]]))
    found = lookup.find(7)
    assert found is not None
    assert found.tolist() == [5, 6]
    assert len(lookup) == 2


def test_it_is_used_once_it_has_been_right_more_often_than_the_router() -> None:
    lookup = TokenLookup()
    lookup.learn([1], row(0, 1)[None])
    for turn in range(8):
        assert not lookup.better, turn
        lookup.compare(1, row(0, 1), np.array([1, 2], np.int32))
    assert lookup.better
    assert (lookup.lookup_share, lookup.router_share) == (1.0, pytest.approx(0.5))
    for _ in range(60):
        lookup.compare(1, row(2, 3), np.array([2, 3], np.int32))
    assert not lookup.better


def test_tokens_that_are_not_known_do_not_count_against_it() -> None:
    lookup = TokenLookup()
    for token in range(20):
        lookup.compare(token, row(0, 1), np.array([0, 1], np.int32))
    assert (lookup.lookup_share, lookup.router_share) == (0.0, 0.0)
    assert not lookup.better


def test_a_router_that_says_nothing_is_right_about_nothing() -> None:
    lookup = TokenLookup()
    lookup.learn([1], row(0)[None])
    for _ in range(8):
        lookup.compare(1, row(0), None)
    assert lookup.better
