"""Routers are found in every family, and rank the experts as the model's own choice does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import CASES, UNLISTED, tiny_config, write_tiny_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from moechat.models.dense import load_dense
from moechat.models.outlining import outline_model
from moechat.models.router_search import Router, Scoring, copied_bytes, find_routers
from moechat.models.skeleton import ExpertsModule, Skeleton, build_skeleton
from moechat.store.checkpoint import Checkpoint

# Families that choose among groups of experts first: the groups are not modelled, so the choice agrees in
# part.
GROUPED = {("deepseek_v2", 1): 0.5, ("deepseek_v3", 0): 0.55, ("deepseek_v3", 1): 0.9}
CORRECTED = {
    "deepseek_v3": Scoring.SIGMOID,
    "glm4_moe": Scoring.SIGMOID,
    "ernie4_5_moe": Scoring.SOFTMAX,
    "dots1": Scoring.SIGMOID,
    "lfm2_moe": Scoring.SIGMOID,
    "afmoe": Scoring.SIGMOID,
    "minimax_m2": Scoring.SIGMOID,
}


def loaded(directory: Path, family: str, shape: int) -> Skeleton:
    config = tiny_config(family, shape)
    write_tiny_checkpoint(directory, config)
    skeleton = build_skeleton(config, torch.float32)
    load_dense(skeleton, Checkpoint.open(directory).tensors)
    return skeleton


def choices_of_the_model(directory: Path, skeleton: Skeleton) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and chosen experts of each layer while transformers itself runs the model."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = named.get("hidden_states", arguments[0] if arguments else None)
        index = named.get("top_k_index", arguments[1] if len(arguments) > 1 else None)
        seen.append((hidden.reshape(-1, hidden.shape[-1]), index))

    for entry in skeleton.experts:
        model.get_submodule(entry.name).register_forward_pre_hook(record, with_kwargs=True)
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        model(torch.randint(3, 101, (1, 60), generator=generator))
    return seen


@pytest.mark.parametrize(("family", "shape"), CASES + [(family, 0) for family in UNLISTED])
def test_top_k_of_the_scores_is_what_the_model_chooses(family: str, shape: int, tmp_path: Path) -> None:
    skeleton = loaded(tmp_path, family, shape)
    routers = find_routers(skeleton.model, skeleton.experts)
    choices = choices_of_the_model(tmp_path, skeleton)
    assert len(routers) == len(choices) == len(skeleton.experts)
    for router, (hidden, index) in zip(routers, choices, strict=True):
        assert router is not None
        assert router.weight.dtype == torch.float32
        assert router.weight.is_contiguous()
        assert not router.weight.is_inference()
        best = router.scores(hidden).topk(index.shape[-1], dim=-1).indices
        agreement = (index[:, :, None] == best[:, None, :]).any(dim=-1).float().mean()
        assert agreement >= GROUPED.get((family, shape), 0.995)
        assert router.agreement >= GROUPED.get((family, shape), 0.995)
        assert router.scoring is CORRECTED.get(family, Scoring.NONE)
        assert (router.correction is not None) == (family in CORRECTED)
        assert (router.bias is not None) == (family == "gpt_oss")


def test_routers_are_found_in_a_bfloat16_model(tmp_path: Path) -> None:
    config = tiny_config("glm4_moe", 0)
    write_tiny_checkpoint(tmp_path, config)
    skeleton = build_skeleton(config, torch.bfloat16)
    load_dense(skeleton, Checkpoint.open(tmp_path).tensors)
    (router,) = find_routers(skeleton.model, skeleton.experts)
    assert router is not None
    assert router.agreement > 0.9


class Experts(nn.Module):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden


class Block(nn.Module):
    """A layer whose router is a transposed matrix, and which can be set to choose by other values."""

    def __init__(self, *, honest: bool, arguments: int = 1) -> None:
        super().__init__()
        self.experts = Experts()
        self.w = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
        self.honest = honest
        self.arguments = arguments

    def forward(self, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if len(others) + 1 != self.arguments:
            raise TypeError("arguments are missing")
        logits = hidden.reshape(-1, 16) @ self.w
        index = (logits if self.honest else -logits).topk(2, dim=-1).indices
        return self.experts(hidden, index, torch.ones(index.shape))


def find_in(block: Block) -> Router | None:
    entry: Any = ExpertsModule.__new__(ExpertsModule)
    for name, value in {
        "name": "block.experts",
        "module": block.experts,
        "num_experts": 8,
        "hidden_size": 16,
    }.items():
        object.__setattr__(entry, name, value)
    model = nn.Module()
    model.block = block
    (router,) = find_routers(model, [entry])
    return router


def test_a_transposed_router_is_turned() -> None:
    block = Block(honest=True)
    router = find_in(block)
    assert router is not None
    assert torch.equal(router.weight, block.w.T)
    assert router.agreement == 1.0


def test_a_router_with_other_choices_is_left_out() -> None:
    assert find_in(Block(honest=False)) is None


def test_a_module_that_wants_more_than_hidden_states_is_left_out() -> None:
    assert find_in(Block(honest=True, arguments=2)) is None


@pytest.mark.parametrize("latent", [None, 32])
def test_the_bytes_of_copies_are_counted_before_weights_are_there(latent: int | None, tmp_path: Path) -> None:
    """Experts of Nemotron-H can work on vectors that are narrower than what their router reads."""
    config = tiny_family("nemotron_h")
    config.moe_latent_size = latent
    write_tiny_checkpoint(tmp_path, config)
    skeleton = build_skeleton(config, torch.bfloat16)
    counted = copied_bytes(skeleton.model, skeleton.experts)
    load_dense(skeleton, Checkpoint.open(tmp_path).tensors)
    found = find_routers(skeleton.model, skeleton.experts)
    assert skeleton.experts[0].hidden_size == (latent or config.hidden_size)
    assert counted == sum(router.weight.nbytes for router in found if router is not None)
    assert (counted == 0) == (latent is not None)
    outline = outline_model(config, torch.bfloat16, dense_bits=16)
    assert outline.router_copies == counted


def test_searching_leaves_no_hook_behind() -> None:
    block = Block(honest=True)
    find_in(block)
    hidden = torch.zeros(1, 3, 16)
    assert torch.equal(block(hidden), hidden)
