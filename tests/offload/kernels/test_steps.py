"""Norms, rotary embedding and routing in one launch each, in Triton's interpreter on machines without a GPU.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from kernel_support import DEVICE
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from moechat.models.decode.norms import Norm
from moechat.models.decode.routers import Rule
from moechat.models.router_search import Router, Scoring
from moechat.offload.kernels import steps

TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the largest element. The interpreter cuts what it converts to bfloat16, where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).abs().max()
    return float(error) <= TOLERANCE[found.dtype] * float(expected.float().abs().max())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "norm", [Norm(1e-6, 0.0, True), Norm(1e-5, 1.0, False)], ids=["round first", "offset"]
)
def test_a_norm_equals_its_reference(norm: Norm, dtype: torch.dtype) -> None:
    for columns in (1, 7, 128, 2880):
        x, weight = drawn(1, 2, 3, columns, dtype=dtype) * 3, drawn(columns, dtype=dtype, seed=2)
        found = steps.rms_norm(x, weight, norm)
        assert found.is_contiguous()
        assert close(found, norm.apply(x, weight))


def test_eps_matters_for_small_rows_and_not_for_others() -> None:
    norm, weight = Norm(1e-5, 0.0, False), drawn(40, seed=2)
    for size in (0.0, 1e-4, 1e4):
        x = drawn(2, 40) * size
        assert close(steps.rms_norm(x, weight, norm), norm.apply(x, weight))


def test_rows_may_be_parts_of_longer_ones() -> None:
    norm, weight = Norm(1e-6, 0.0, True), drawn(24, seed=2)
    for x in (
        drawn(1, 5, 40)[..., :24],
        drawn(1, 1, 40)[..., 8:32],
        drawn(1, 3, 2, 40)[..., :24],
        drawn(1, 2, 3, 24)[:, :, 0],
    ):
        assert steps.row_stride(x) is not None
        assert close(steps.rms_norm(x, weight, norm), norm.apply(x, weight))


def test_rows_without_a_single_stride_are_refused() -> None:
    weight = drawn(24)
    for x in (drawn(1, 3, 2, 24)[:, :, :1].transpose(0, 1).expand(3, 2, 1, 24), drawn(24, 3).T):
        assert steps.row_stride(x) is None
        with pytest.raises(ValueError, match="rows of strides"):
            steps.rms_norm(x, weight, Norm(1e-6, 0.0, True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("module", "dim", "angles", "width"),
    [
        (modeling_qwen3_moe, 24, 24, 24),
        (modeling_qwen3_moe, 128, 128, 128),
        (modeling_gpt_oss, 24, 12, 24),
        (modeling_glm4_moe, 24, 12, 12),
        (modeling_glm4_moe, 42, 10, 10),
    ],
    ids=["whole", "whole 128", "shared", "part", "odd part"],
)
def test_rotary_embeddings_equal_the_families_functions(module, dim, angles, width, dtype) -> None:
    for tokens in (1, 3):
        q = drawn(1, tokens, 4, dim, dtype=dtype).transpose(1, 2)
        # Keys inside of a longer row, as where a family computes queries, keys and values together.
        k = drawn(1, tokens, 3, dim + 5, dtype=dtype, seed=2)[..., 5:].transpose(1, 2)
        cos, sin = drawn(2, 1, tokens, angles, dtype=dtype, seed=3)
        expected = module.apply_rotary_pos_emb(q, k, cos, sin)
        for found, wanted in zip(steps.rotate(q, k, cos, sin, width), expected, strict=True):
            assert found.transpose(1, 2).is_contiguous()
            assert close(found, wanted)


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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (60, rule_of()),
        (128, rule_of(chosen=8, normalise=False, scale=2.5)),
        (8, rule_of("softmax-chosen", 2)),
        (512, rule_of("sigmoid", 16, correction=drawn(512, seed=4), scale=1.5)),
        (33, rule_of("sigmoid", 1, normalise=False)),
    ],
    ids=["softmax", "scaled", "chosen only", "corrected", "one"],
)
def test_a_router_chooses_as_its_rule(experts: int, rule: Rule, dtype: torch.dtype) -> None:
    # All different in every type, so that no choice is free.
    order = torch.rand((3, experts), generator=torch.Generator().manual_seed(5)).argsort(-1)
    logits = ((order - experts / 2) / 64).to(DEVICE, dtype)
    rule = Rule(**{**vars(rule), "logits_dtype": dtype, "weights_dtype": dtype})
    weights, index = steps.route(logits, rule, rule.correction)
    expected, places = rule.apply(logits)
    assert torch.equal(index, places)
    assert close(weights, expected.to(dtype))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax-chosen"])
def test_of_equal_experts_the_first_are_chosen_once_each(scoring: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 0.0, 1.0, 0.0], [2.0] * 7], device=DEVICE)
    weights, index = steps.route(logits, rule_of(scoring, 5), None)
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
        _, index = steps.route(logits, rule_of(scoring, 6), correction)
        assert all(0 <= expert < 13 for row in index.tolist() for expert in row)
        assert [len(set(row)) for row in index.tolist()] == [6, 6, 6]


def test_every_expert_may_be_chosen() -> None:
    logits = drawn(2, 16)
    _, index = steps.route(logits, rule_of(chosen=16), None)
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
        ranks = [steps.Ranks(one.weight, one.bias, scoring == "sigmoid", one.correction) for one in routers]
        assert steps.serves_request(x, index, weights)
        found = steps.request(x, index, weights, ranks, inputs=inputs)
        scores = [one.scores(x)[0] for one in routers]
        told = words(index.to(torch.int32), weights.float())
        rest = words(x.float()) if inputs else torch.empty(0, dtype=torch.int32, device=DEVICE)
        # Sums of products round in another order; everything else is the same bit by bit.
        assert torch.equal(found[: 2 * picks], told)
        assert torch.equal(found[2 * picks + places * experts :], rest)
        if scores:
            close_scores = found[2 * picks :][: places * experts].view(torch.float32)
            torch.testing.assert_close(close_scores, torch.cat(scores), rtol=1e-5, atol=1e-4)


def test_requests_of_other_tensors_are_left_to_torch() -> None:
    x, index, weights = drawn(1, 64), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), drawn(1, 2)
    assert steps.serves_request(x, index, weights)
    assert not steps.serves_request(drawn(2, 64), index, weights)
    assert not steps.serves_request(x, index.int(), weights)
    assert not steps.serves_request(x.double(), index, weights)
    assert not steps.serves_request(drawn(1, 128)[:, ::2], index, weights)
