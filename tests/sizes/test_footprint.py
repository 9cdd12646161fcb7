"""What a pass takes: the estimate lies above the measured peak, and not far above it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import SUPPORT
from tiny import tiny_config
from transformers import AutoConfig

from moechat.sizes.cache_shape import PREFILL_CHUNK, CacheShape
from moechat.sizes.footprint import (
    PassSizes,
    one_pass_bytes,
    pass_tokens,
    prefill_chunk,
    scratch_bytes,
    workspace_bytes,
)

CHILD = SUPPORT / "footprint_child.py"
MEBI = 1 << 20
GROUPED = {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 2048,
}
LATENT = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "topk_method": "greedy",
}
SCORES = {
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "sliding_window": 128,
}

STATES = {
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
INDEXED = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 256,
    "intermediate_size": 2048,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 512,
    "mlp_layer_types": ["dense", "sparse"],
}
COMPRESSED = {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 8,
    "o_lora_rank": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "sliding_window": 128,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["moe", "moe"],
}
PAIRS = {
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 512,
    "kv_lora_rank": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}


CASES = [
    ["qwen3_moe", "float32", 16, GROUPED],
    ["qwen3_next", "float32", 16, STATES],
    ["kimi_linear", "float32", 16, PAIRS],
    ["deepseek_v4", "float32", 16, COMPRESSED],
    ["qwen3_moe", "bfloat16", 16, GROUPED],
    ["qwen3_moe", "float32", 8, GROUPED],
    ["deepseek_v2", "float32", 16, LATENT],
    ["deepseek_v2", "float32", 8, LATENT],
    ["gpt_oss", "float32", 16, SCORES],
    ["gpt_oss", "float32", 8, SCORES],
    ["deepseek_v32", "float32", 16, INDEXED],
    ["glm_moe_dsa", "float32", 16, {**INDEXED, "indexer_types": ["full", "shared"]}],
]


@pytest.mark.parametrize(("bits", "states"), [(16, False), (16, True), (8, False)])
def test_the_estimate_is_above_the_measured_peak_and_not_far(bits: int, states: bool) -> None:
    # What models leave behind adds up in a process, so those with large states have one of their own.
    cases = [case for case in CASES if bits in case and (case[3] in (STATES, PAIRS, COMPRESSED)) == states]
    done = subprocess.run(
        [sys.executable, str(CHILD), "2560", json.dumps(cases)],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    for (family, dtype, _, _), figures in zip(cases, json.loads(done.stdout), strict=True):
        *passes, (_, _, of_wave, estimate_of_wave) = figures
        assert of_wave <= estimate_of_wave <= 1.5 * of_wave + 64 * MEBI, f"a wave of {family} {dtype} {bits}"
        most = 0
        for tokens, held, measured, estimate in passes:
            # What a pass has left behind is used again by the next: the largest so far counts.
            most = max(most, estimate)
            assert measured <= most, (
                f"{family} {dtype} {bits}, {tokens} over {held}: {measured / MEBI:.0f} MiB"
            )
        # Fixed slack apart, at most half as much again.
        peak = max(measured for _, _, measured, _ in passes)
        assert most <= 1.5 * peak + 48 * MEBI, f"{family} {dtype}: {most / MEBI:.0f} for {peak / MEBI:.0f}"


def test_parts_are_shorter_where_scores_are_held() -> None:
    assert prefill_chunk(PassSizes.of(tiny_config("qwen3_moe"))) == PREFILL_CHUNK
    eager = AutoConfig.for_model("gpt_oss", num_attention_heads=64)
    eager._attn_implementation = "eager"
    assert PassSizes.of(eager).score_copies > 3
    assert prefill_chunk(PassSizes.of(eager)) == 256
    latent = AutoConfig.for_model("deepseek_v2", **LATENT)
    assert PassSizes.of(latent).score_copies == 2
    assert prefill_chunk(PassSizes.of(latent)) == PREFILL_CHUNK
    many = AutoConfig.for_model("deepseek_v2", **{**LATENT, "num_attention_heads": 128})
    assert prefill_chunk(PassSizes.of(many)) == 128


def test_a_family_in_one_pass_takes_a_whole_context() -> None:
    sizes = PassSizes.of(tiny_config("qwen3_moe"))
    parts = CacheShape(True, True, 10_000, 0, ())
    assert pass_tokens(256, parts, 200) == 200
    assert pass_tokens(256, parts, 10_000) == 256
    assert pass_tokens(256, parts, 10_001) == 10_001
    assert one_pass_bytes(sizes, 4, 8000) > workspace_bytes(sizes, 4, 1024, 8000)


def test_figures_grow_with_what_they_depend_on() -> None:
    sizes = PassSizes.of(tiny_config("qwen3_moe"))
    assert workspace_bytes(sizes, 4, 1024, 9000) > workspace_bytes(sizes, 4, 1024, 8000)
    assert workspace_bytes(sizes, 2, 1024, 9000) < workspace_bytes(sizes, 4, 1024, 9000)
    assert scratch_bytes(2048, 16, 8, 1) < MEBI
    assert 30 * MEBI < scratch_bytes(4096, 224, 8, 100_000) <= 110 * MEBI + 64 * 800_000
