"""Experts that quantisers have unstacked give the store of the stacked checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from quantised_support import is_expert, nvfp4, tensors_of, unstacked, write_pair, write_shards
from tiny import write_tiny_checkpoint

from moechat.errors import CheckpointError
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.store import Store

LAYOUTS: dict[str, dict[str, bool]] = {
    "gemma4": {},
    "qwen3_vl_moe": {},
    "llama4_text": {"transposed": True},
    "gpt_oss": {"transposed": True, "alternating": True},
}
FIRST = "model.language_model.layers.0.experts.3.up_proj.weight"


def converted(directory: Path, destination: Path) -> Store:
    checkpoint = Checkpoint.open(directory)
    return convert(checkpoint, plan_checkpoint(checkpoint), destination, bits=4, source_name="x")


def rewritten(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    shutil.copy(source / "config.json", target)
    write_shards(target, tensors)
    return target


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_store_is_that_of_the_stacked_checkpoint(tmp_path: Path, family: str) -> None:
    source = tmp_path / "source"
    write_tiny_checkpoint(source, tiny_family(family))
    linear = unstacked(tensors_of(source), **LAYOUTS[family])
    assert any(name.endswith("experts.7.up_proj.weight") for name in linear)
    expected = converted(source, tmp_path / "a").manifest.files
    made = converted(rewritten(source, tmp_path / "linear", linear), tmp_path / "b").manifest.files
    assert any(name.startswith("experts") for name in made)
    assert {name: expected.get(name) for name in made} == made  # without generation_config.json


@pytest.fixture
def gemma(tmp_path: Path) -> dict[str, Any]:
    write_tiny_checkpoint(tmp_path / "source", tiny_family("gemma4"))
    return {"source": tmp_path / "source", "linear": unstacked(tensors_of(tmp_path / "source"))}


def test_they_may_be_quantised(tmp_path: Path, gemma: dict[str, Any]) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    packed, decoded = tmp_path / "packed", tmp_path / "decoded"
    pack = nvfp4(divides=False)
    write_pair(gemma["source"], packed, decoded, pack, settings, choose=is_expert, tensors=gemma["linear"])
    made, expected = (converted(path, path / "store").manifest.files for path in (packed, decoded))
    assert {name for name in made if made[name] != expected[name]} == {"config.json"}


def test_a_missing_matrix_is_named(tmp_path: Path, gemma: dict[str, Any]) -> None:
    del gemma["linear"][FIRST]
    directory = rewritten(gemma["source"], tmp_path / "broken", gemma["linear"])
    prefix = FIRST.partition(".3.")[0]
    with pytest.raises(CheckpointError, match=f"expert 3 in {prefix} has no weight for its up projection"):
        converted(directory, tmp_path / "store")
