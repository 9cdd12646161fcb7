"""Models from quantised safetensors: the stores and logits of the plain checkpoint that they decode to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_support import (
    TOKENS,
    Pack,
    fp8,
    is_expert,
    is_linear,
    stacked,
    tensors_of,
    write_pair,
    write_source,
)
from transformers import AutoModelForCausalLM

import moechat
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.progress import ConvertProgress
from moechat.store.quantised.schemes import source_format


@dataclass(frozen=True)
class Case:
    """One way of storing a model."""

    pack: Pack
    settings: dict[str, Any]
    title: str
    family: str = "qwen3_moe"
    shape: int = 0
    choose: Callable[[str, torch.Tensor], bool] = is_linear
    stacked: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


def block_fp8(*block: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic", **more}


CASES = {
    "fp8 blocks": Case(fp8((128, 128)), block_fp8(128, 128), "FP8 in blocks of 128 x 128"),
    "fp8 edges": Case(fp8((48, 40)), block_fp8(48, 40), "FP8 in blocks of 48 x 40", "deepseek_v3", 1),
    "fp8 stacked": Case(
        fp8((64, 64), dtype=torch.bfloat16),
        block_fp8(64, 64),
        "FP8 in blocks of 64 x 64",
        choose=lambda name, tensor: tensor.dim() == 3 or is_linear(name, tensor),
        stacked=True,
    ),
    "fp8 exponents": Case(
        fp8((128, 128), dtype=torch.float8_e8m0fnu),
        block_fp8(128, 128, scale_fmt="ue8m0"),
        "FP8 in blocks of 128 x 128",
        "mixtral",
        1,
    ),
    "fp8 tensors": Case(
        fp8("tensor"), {"quant_method": "fp8", "weight_block_size": None}, "FP8", "mixtral", choose=is_expert
    ),
    "fp8 rows": Case(
        fp8("row", scale="_scale"), {"quant_method": "fbgemm_fp8"}, "FP8 with a scale for each row"
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def pair(tmp_path: Path, case: Case) -> tuple[Path, Path]:
    """A quantised checkpoint and the plain one that it decodes to."""
    source = write_source(tmp_path / "source", case.family, case.shape, **case.changes)
    tensors = stacked(tensors_of(source)) if case.stacked else None
    packed, decoded = tmp_path / "packed", tmp_path / "decoded"
    write_pair(source, packed, decoded, case.pack, case.settings, choose=case.choose, tensors=tensors)
    return packed, decoded


def test_the_store_is_that_of_the_checkpoint_it_decodes_to(
    tmp_path: Path, case: Case, pair: tuple[Path, Path]
) -> None:
    packed, decoded = (Checkpoint.open(path) for path in pair)
    assert packed.keys() == decoded.keys()
    expected = convert(decoded, plan_checkpoint(decoded), tmp_path / "a", bits=4, source_name="a")
    events: list[ConvertProgress] = []
    made = convert(
        packed, plan_checkpoint(packed), tmp_path / "b", bits=4, source_name="b", progress=events.append
    )
    assert made.geometry == expected.geometry
    other = {
        name for name in made.manifest.files if made.manifest.files[name] != expected.manifest.files[name]
    }
    assert other == {"config.json"}
    for directory in (pair[0], made.path):
        assert source_format(packed.config, directory) == case.title
    (notice,) = (event.detail for event in events if event.stage == "notice")
    stated, loss = re.fullmatch(
        r"experts are (.+) in the checkpoint; they are quantised again, to 4 bits, which changes a weight by "
        r"([0-9.]+) % \(root mean square of the first expert\)",
        notice,
    ).groups()  # type: ignore[union-attr]
    assert stated.startswith(case.title.split()[0])
    assert 3 < float(loss) < 12


def test_logits_are_those_of_transformers(moechat_home: Path, pair: tuple[Path, Path]) -> None:
    packed, decoded = pair
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    with moechat.load(packed, bits=16, dense_bits=16, dtype="float32") as engine:
        ours = torch.as_tensor(np.asarray(engine.logits(TOKENS)))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
