"""Angles of rotary embeddings: looked up where each position has its own, else left to the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, write_tiny_checkpoint
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

import moechat
from moechat.models.decode.angles import angle_count, recognise_angles, tabled_angles

KINDS = [("qwen3_moe", Qwen3MoeRotaryEmbedding), ("gpt_oss", GptOssRotaryEmbedding)]


def module_of(family: str, kind: Any) -> Any:
    return kind(tiny_config(family))


def test_the_family_computes_a_table_once() -> None:
    module = module_of(*KINDS[0])
    ours = recognise_angles(module)
    assert ours is not None
    calls: list[int] = []
    x = torch.zeros(1, 1, 8)
    real = type(module).forward
    try:
        type(module).forward = lambda self, x, at: calls.append(at.numel()) or real(self, x, at)
        looked = tabled_angles(module)
        for position in (*range(256), 256, 257, 3):
            looked(x, torch.tensor([[position]]))
    finally:
        type(module).forward = real
    assert calls == [256, 256]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_looked_up_token_has_the_angles_of_its_position(family: str, kind: Any, dtype: torch.dtype) -> None:
    module = module_of(family, kind)
    ours = recognise_angles(module)
    assert ours is not None
    x = torch.zeros(1, 1, 8, dtype=dtype)
    whole = module(x, torch.arange(1000)[None])
    # Forth and back, so that tables are made, dropped and made again.
    for position in (0, 1, 255, 256, 999, 3, 700, 257):
        found = ours(x, torch.tensor([[position]]))
        for part, table in zip(found, whole, strict=True):
            assert part.shape == (1, 1, table.shape[-1])
            assert part.dtype is dtype
            assert part.is_contiguous()
            torch.testing.assert_close(part[0, 0], table[0, position], rtol=0, atol=1e-6)


def test_several_tokens_and_sequences_use_the_family_s_module() -> None:
    module = module_of(*KINDS[0])
    ours = recognise_angles(module)
    assert ours is not None
    x = torch.zeros(2, 3, 8)
    for positions in ([[4, 5, 6]], [[4], [9]]):
        at = torch.tensor(positions)
        assert all(map(torch.equal, ours(x, at), module(x, at)))


def test_angles_that_depend_on_more_than_the_position_are_not_replaced() -> None:
    class Louder(Qwen3MoeRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cos, sin = super().forward(x, position_ids)
            return cos * x.mean(), sin

    class Further(Qwen3MoeRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return super().forward(x, position_ids - position_ids.max())

    class Layered(Qwen3MoeRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> Any:
            return super().forward(x, position_ids)

    for kind in (Louder, Further, Layered):
        assert recognise_angles(module_of("qwen3_moe", kind)) is None
    dynamic = module_of(*KINDS[0])
    dynamic.rope_type = "dynamic"
    assert recognise_angles(dynamic) is None


def test_a_loaded_model_looks_its_angles_up(tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("qwen3_moe"))
    with moechat.load(tmp_path / "model", bits=16, dtype="float32") as engine:
        assert engine.loaded.native_modules.angles == ["model.rotary_emb"]


class Spread(Qwen3MoeRotaryEmbedding):
    """Takes a position in three dimensions, as models for texts and images do, and rotates by their sum."""

    takes_one = True

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if position_ids.ndim == 2 and not self.takes_one:
            raise ValueError("one dimension")
        sums = position_ids.expand(3, *position_ids.shape[-2:]).sum(0)
        return super().forward(x, sums)


@pytest.mark.parametrize("takes_one", [True, False])
def test_equal_positions_in_several_dimensions_are_looked_up_as_one(takes_one: bool) -> None:
    module = module_of("qwen3_moe", Spread)
    module.takes_one = takes_one
    ours = recognise_angles(module)
    assert ours is not None
    assert angle_count(module) == module.inv_freq.numel() * 2
    x = torch.zeros(1, 1, 8)
    for position in (0, 3, 300):
        at = torch.tensor([[position]])
        wanted = module(x, at.expand(3, 1, 1))
        for found in (ours(x, at), ours(x, at.expand(3, 1, 1))):
            assert all(map(torch.allclose, found, wanted))
    unequal = torch.tensor([[[1]], [[2]], [[4]]])
    assert all(map(torch.equal, ours(x, unequal), module(x, unequal)))


def test_a_module_whose_angles_have_as_many_dimensions_as_positions_gets_only_one() -> None:
    class Stacked(Qwen3MoeRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            if position_ids.ndim == 2:
                return super().forward(x, position_ids)
            each = [super(Stacked, self).forward(x, at) for at in position_ids]
            return tuple(map(torch.stack, zip(*each, strict=True)))

    module = module_of("qwen3_moe", Stacked)
    ours = recognise_angles(module)
    assert ours is not None
    x, at = torch.zeros(1, 1, 8), torch.tensor([[7]])
    assert all(map(torch.allclose, ours(x, at), module(x, at)))
    assert ours(x, at.expand(3, 1, 1))[0].shape == (3, *module(x, at)[0].shape)
