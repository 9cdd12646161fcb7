"""Architectures of GGUF files: the logits that transformers computes with the model the file was made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_writing import all_as, write_family

import moechat

TOKENS = [5, 17, 30, 42, 77, 12, 9, 33, 200, 100, 3, 90]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, moechat_home: Path) -> None:
    family = FAMILIES[name]
    config = family.config()
    model = random_model(config)
    write_family(family, config, gguf_tensors(family, model), tmp_path / "m.gguf", all_as(Kind.F32))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    with moechat.load(tmp_path / "m.gguf", bits=16, dense_bits=16, dtype="float32") as engine:
        ours = np.asarray(engine.logits(TOKENS))
    assert np.abs(ours - expected).max() <= 5e-5 * np.abs(expected).max()
