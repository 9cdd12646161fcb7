"""Routing and requests in one launch each, in Triton's interpreter on machines without a GPU.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from kernel_support import DEVICE
from step_support import TYPES, close, drawn

from moechat.models.decode.routers import Rule
from moechat.models.router_search import Router, Scoring
from moechat.offload.kernels import routing


def rule_of(scoring: str = "softmax", chosen: int = 4, **changes) -> Rule:
    usual = {
        "correction": None,
        "normalise": True,
        "scale": 1.0,
        "order": (0, 1, 2),
        "logits_dtype": torch.float32,
        "weights_dtype": torch.float32,
    }
    return Rule(scoring, chosen, **{**usual, **changes})


RULES = {
    "softmax": (60, rule_of()),
    "scaled": (128, rule_of(chosen=8, normalise=False, scale=2.5)),
    "chosen only": (8, rule_of("softmax-chosen", 2)),
    "corrected": (512, rule_of("sigmoid", 16, correction=drawn(512, seed=4), scale=1.5)),
    "one": (33, rule_of("sigmoid", 1, normalise=False)),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("experts", "rule"), RULES.values(), ids=RULES)
def test_a_router_chooses_as_its_rule(experts: int, rule: Rule, dtype: torch.dtype) -> None:
    # All different in every type, so that no choice is free.
    order = torch.rand((3, experts), generator=torch.Generator().manual_seed(5)).argsort(-1)
    logits = ((order - experts / 2) / 64).to(DEVICE, dtype)
    rule = Rule(**{**vars(rule), "logits_dtype": dtype, "weights_dtype": dtype})
    weights, index = routing.route(logits, rule, rule.correction)
    expected, places = rule.apply(logits)
    assert torch.equal(index, places)
    assert close(weights, expected.to(dtype))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax-chosen"])
def test_of_equal_experts_the_first_are_chosen_once_each(scoring: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 0.0, 1.0, 0.0], [2.0] * 7], device=DEVICE)
    weights, index = routing.route(logits, rule_of(scoring, 5), None)
    assert index.tolist() == [[1, 2, 5, 0, 3], [0, 1, 2, 3, 4]]
    assert weights[1].tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax-chosen"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_give_distinct_experts(value: float, scoring: str) -> None:
    logits = drawn(3, 13)
    logits[0, 3] = value
    logits[1, ::2] = value
    logits[2] = value
    for correction in (None, torch.full((13,), -math.inf, device=DEVICE)):
        _, index = routing.route(logits, rule_of(scoring, 6), correction)
        assert all(0 <= expert < 13 for row in index.tolist() for expert in row)
        assert [len(set(row)) for row in index.tolist()] == [6, 6, 6]


def test_every_expert_may_be_chosen() -> None:
    logits = drawn(2, 16)
    _, index = routing.route(logits, rule_of(chosen=16), None)
    assert torch.equal(index, logits.argsort(-1, descending=True))


def words(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1).view(torch.int32) for part in parts])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize(
    ("scoring", "biased", "corrected"),
    [("none", False, False), ("none", True, False), ("sigmoid", False, True), ("none", False, True)],
)
def test_a_request_has_the_words_that_torch_gives(
    scoring: str, biased: bool, corrected: bool, inputs: bool, dtype: torch.dtype
) -> None:
    for places, picks, experts, hidden in ((0, 1, 3, 7), (1, 3, 5, 600), (2, 8, 16, 64)):
        x, weights = drawn(1, hidden, dtype=dtype), drawn(1, picks, dtype=dtype, seed=2)
        index = torch.randperm(experts + picks, generator=torch.Generator().manual_seed(4))[None, :picks]
        index = index.contiguous().to(DEVICE)
        routers = [
            Router(
                drawn(experts, hidden, seed=5 + place),
                drawn(experts, seed=7) if biased else None,
                Scoring(scoring),
                drawn(experts, seed=8) if corrected else None,
            )
            for place in range(places)
        ]
        ranks = [routing.Ranks(one.weight, one.bias, scoring == "sigmoid", one.correction) for one in routers]
        assert routing.serves_request(x, index, weights)
        found = routing.request(x, index, weights, ranks, inputs=inputs)
        scores = [one.scores(x)[0] for one in routers]
        told = words(index.to(torch.int32), weights.float())
        rest = words(x.float()) if inputs else torch.empty(0, dtype=torch.int32, device=DEVICE)
        # Sums of products round in another order; everything else is the same bit by bit.
        assert torch.equal(found[: 2 * picks], told)
        assert torch.equal(found[2 * picks + places * experts :], rest)
        if scores:
            close_scores = found[2 * picks :][: places * experts].view(torch.float32)
            torch.testing.assert_close(close_scores, torch.cat(scores), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("places", [0, 1, 2])
@pytest.mark.parametrize(("experts", "rule"), RULES.values(), ids=RULES)
def test_a_routed_request_is_the_request_of_what_is_chosen(
    experts: int, rule: Rule, places: int, dtype: torch.dtype
) -> None:
    rule = Rule(**{**vars(rule), "logits_dtype": dtype, "weights_dtype": dtype})
    x, logits = drawn(1, 96, dtype=dtype), drawn(1, experts, dtype=dtype, seed=6)
    # Of later layers, a program for each of their experts.
    ranks = [routing.Ranks(drawn(16, 96, seed=7 + place), None, True, None) for place in range(places)]
    weights, index = routing.route(logits, rule, rule.correction)
    for inputs in (False, True):
        wanted = routing.request(x, index, weights, ranks, inputs=inputs)
        found = routing.routed_request(x, logits, rule, rule.correction, ranks, inputs=inputs)
        # One program or another adds up the powers: weights may differ in their last bit.
        told = slice(rule.chosen, 2 * rule.chosen)
        assert torch.equal(found[: rule.chosen], wanted[: rule.chosen])
        assert close(found[told].view(torch.float32).to(dtype), wanted[told].view(torch.float32).to(dtype))
        assert torch.equal(found[2 * rule.chosen :], wanted[2 * rule.chosen :])


def test_requests_of_other_tensors_are_left_to_torch() -> None:
    x, index, weights = drawn(1, 64), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), drawn(1, 2)
    assert routing.serves_request(x, index, weights)
    assert not routing.serves_request(drawn(2, 64), index, weights)
    assert not routing.serves_request(x, index.int(), weights)
    assert not routing.serves_request(x.double(), index, weights)
    assert not routing.serves_request(drawn(1, 128)[:, ::2], index, weights)
