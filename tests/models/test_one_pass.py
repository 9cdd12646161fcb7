"""One pass over a text with a decoder layer in memory at a time, against transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.experts_interface import is_experts_module
from moechat.models.one_pass import OnePass
from moechat.models.skeleton import load_config
from moechat.store.checkpoint import Checkpoint

# The shape with odd sizes of each family; some have layers without experts.
CASES = [(family, len(shapes) - 1) for family, shapes in tiny.SHAPES.items()]


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if is_experts_module(part)}


@pytest.mark.parametrize(("family", "shape"), CASES, ids=[family for family, _ in CASES])
def test_the_experts_of_every_layer_see_what_they_see_in_the_whole_model(
    family: str, shape: int, tmp_path: Path
) -> None:
    tiny.write_tiny_checkpoint(tmp_path, tiny.tiny_config(family, shape))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    whole.eval()
    ids = torch.randint(2, 101, (3, 40), generator=torch.Generator().manual_seed(1))
    seen: list[tuple[torch.Tensor, ...]] = []
    own = experts_of(whole)
    for part in own.values():
        part.register_forward_pre_hook(lambda _part, inputs: seen.append(inputs))
    with torch.inference_mode():
        whole(input_ids=ids, use_cache=False)
    wanted, parts = list(seen), list(own.values())

    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_checkpoint(checkpoint)
    assert [layer.module for layer in plan.layers] == list(own)
    asked: list[int] = []

    def experts(ordinal: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        asked.append(ordinal)
        wanted_hidden, wanted_index, wanted_weights = wanted[ordinal]
        torch.testing.assert_close(hidden, wanted_hidden.reshape(hidden.shape), rtol=1e-4, atol=1e-4)
        assert (index == wanted_index.reshape(index.shape)).float().mean() > 0.99
        torch.testing.assert_close(weights, wanted_weights.reshape(weights.shape), rtol=1e-3, atol=1e-3)
        return parts[ordinal](hidden, index, weights)

    one_pass = OnePass(load_config(tmp_path))
    keys = [key for layer in plan.read_before for key in layer]
    one_pass.run(checkpoint.tensors, keys, ids, experts)
    assert asked == list(range(len(parts)))
    # Nothing stays in memory, and the head was never read.
    kept = {name for name, weight in one_pass.skeleton.model.named_parameters() if not weight.is_meta}
    assert not any(name.startswith(one_pass.skeleton.layers_name + ".") for name in kept)
    assert set(keys) < set(plan.dense_keys)
    if not whole.config.tie_word_embeddings:
        assert "lm_head.weight" not in keys


def test_tensors_are_asked_for_no_earlier_than_the_plan_says(tmp_path: Path) -> None:
    """What is read before a layer's experts is enough to get there: a download relies on it."""
    tiny.write_tiny_checkpoint(tmp_path, tiny.tiny_config("deepseek_v3", 0))
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_checkpoint(checkpoint)
    may = set(plan.read_before[0])
    tensors = checkpoint.tensors

    class Here:
        """The tensors that have come."""

        def keys(self) -> Any:
            return tensors.keys()

        def info(self, key: str) -> Any:
            return tensors.info(key)

        def array(self, key: str) -> Any:
            assert key in may
            return tensors.array(key)

        def release(self, names: Any) -> None:
            tensors.release(names)

    def experts(ordinal: int, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        may.update(*plan.read_before[: ordinal + 2])
        return torch.zeros_like(hidden)

    keys = [key for layer in plan.read_before for key in layer]
    OnePass(load_config(tmp_path)).run(Here(), keys, torch.ones((2, 8), dtype=torch.int64), experts)
    assert may == set(keys)
