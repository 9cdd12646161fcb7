"""Families with states: whether these carry across the parts of a prompt, and what a part takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_family
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moechat.models import skeleton as skeleton_module
from moechat.models.attention_cache import cache_shape
from moechat.models.live_bytes import part_bytes, part_of_prompt
from moechat.models.outlining import outline_model
from moechat.models.skeleton import Skeleton, build_skeleton
from moechat.models.state_probe import states_carry
from moechat.sizes.footprint import one_pass_bytes

CARRIES = [
    "qwen3_next",
    "qwen3_5_moe",
    "kimi_linear",
    "bailing_hybrid",
    "granitemoehybrid",
    "lfm2_moe",
    "zaya",
    "nemotron_h",
    "jamba",
    "deepseek_v4",
]


def on_meta(config: Any) -> Skeleton:
    skeleton = build_skeleton(config, torch.float32)
    for entry in skeleton.experts:
        entry.module.forward = lambda hidden, _index, _weights: torch.empty_like(hidden)
    return skeleton


@pytest.mark.parametrize("family", CARRIES)
def test_states_carry(family: str) -> None:
    assert states_carry(tiny_family(family)).reason == ""


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "zaya", "jamba"])
def test_states_carry_in_full_size_with_a_small_trial(family: str) -> None:
    assert states_carry(CONFIG_MAPPING[family]()).carries


def test_the_trial_leaves_the_configuration_and_the_random_numbers_as_they_were() -> None:
    config = tiny_family("qwen3_next")
    before = config.to_dict()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    assert states_carry(config).carries
    assert torch.equal(torch.rand(3), wanted)
    assert config.to_dict() == before


def test_a_family_that_begins_again_in_each_part_takes_one_pass_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Jamba in transformers, without our scan."""
    monkeypatch.setattr(skeleton_module, "carry_scan_states", lambda _: None)
    carry = states_carry(tiny_family("jamba"))
    assert not carry.carries
    assert "begins again" in carry.reason
    skeleton = on_meta(tiny_family("jamba"))
    shape = cache_shape(skeleton.model, skeleton.model.config, torch.float32)
    assert (shape.appendable, shape.in_one_pass) == (0, carry.reason)
    assert "computed in one pass, whose memory grows with them: its code" in shape.note_of_one_pass(10)


def test_a_state_that_is_not_read_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in versions of transformers that begin a scan from nothing in every pass of several tokens."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    scan = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def forgetful(*args: Any, initial_state: Any = None, **named: Any) -> Any:
        return scan(*args, initial_state=None, **named)

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", forgetful)
    assert "begins again" in states_carry(tiny_family("qwen3_next")).reason


def test_parts_are_shorter_where_the_scan_takes_much() -> None:
    kinds = {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    }
    skeleton = on_meta(CONFIG_MAPPING["kimi_linear"](num_hidden_layers=2, **kinds))
    tokens, nbytes = part_of_prompt(skeleton, 1024, in_parts=True)
    assert tokens == 256
    assert nbytes <= 1 << 30 < part_bytes(skeleton, 2 * tokens)
    assert part_of_prompt(skeleton, 512, in_parts=False)[0] == 512


def test_the_memory_of_a_part_is_counted_and_not_that_of_a_prompt_as_long_as_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(skeleton_module, "carry_scan_states", lambda _: None)
    outline = outline_model(CONFIG_MAPPING["qwen3_next"](num_hidden_layers=4), torch.float32, dense_bits=16)
    assert outline.workspace(32768, on_gpu=False) < one_pass_bytes(outline.sizes, 4, 32768) / 8
    in_one = outline_model(tiny_family("jamba"), torch.float32, dense_bits=16)
    assert in_one.workspace(8192, on_gpu=False) > 1.9 * (in_one.workspace(4096, on_gpu=False) - (32 << 20))
