"""Norms and rotary embedding in one launch each, in Triton's interpreter on machines without a GPU.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from step_support import TYPES, close, drawn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from moechat.models.decode.norms import Norm
from moechat.offload.kernels import steps


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


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sum_is_normed_and_kept(dtype: torch.dtype) -> None:
    norm = Norm(1e-6, 0.0, True)
    for columns in (1, 7, 128, 2880):
        x, added = drawn(1, 1, columns, dtype=dtype), drawn(1, 1, columns, dtype=dtype, seed=2) * 3
        weight, expected = drawn(columns, dtype=dtype, seed=3), x + added
        for total in (torch.empty_like(x), added):
            found = steps.add_rms_norm(x, added.clone() if total is not added else added, weight, norm, total)
            assert close(total, expected)
            assert close(found, norm.apply(expected, weight))


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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_rotary_embeddings_of_neighbours_equal_the_families_function(dim, dtype) -> None:
    for tokens in (1, 3):
        # Both inside of longer rows, as of latent attention.
        q = drawn(1, tokens, 4, dim + 16, dtype=dtype)[..., 16:].transpose(1, 2)
        k = drawn(1, tokens, 1, dim + 32, dtype=dtype, seed=2)[..., 32:].transpose(1, 2)
        cos, sin = drawn(2, 1, tokens, dim // 2, dtype=dtype, seed=3).repeat(1, 1, 1, 2)
        expected = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q, k, cos, sin)
        for found, wanted in zip(steps.rotate(q, k, cos, sin, dim, neighbours=True), expected, strict=True):
            assert close(found, wanted)
