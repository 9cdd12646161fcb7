"""Architectures of GGUF files: the logits that transformers computes with the model the file was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_writing import all_as, write_family

import moechat
from moechat.errors import MoechatError
from moechat.models.gguf_families.positions import rotated_share
from moechat.models.gguf_metadata import Metadata
from moechat.models.gguf_source import opened_gguf
from moechat.store.gguf_header import GgufHeader

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


def test_mistral_large_3_is_not_taken_for_deepseek_v2(tmp_path: Path) -> None:
    """llama.cpp has both in one architecture; queries that grow with positions tell them apart."""
    family = replace(FAMILIES["mistral4"], architecture="deepseek2")
    config = family.config()
    tensors = gguf_tensors(family, random_model(config))
    write_family(family, config, tensors, tmp_path / "m.gguf", all_as(Kind.F16))
    with opened_gguf(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config["model_type"] == "mistral4"
        assert checkpoint.config["rope_parameters"]["llama_4_scaling_beta"] == 0.1


def test_the_rotated_part_of_a_head_has_as_many_elements_as_the_file_says() -> None:
    """transformers multiplies and rounds down."""
    for size in range(32, 513, 8):
        for rotated in range(2, size + 1, 2):
            header = GgufHeader({"m.rope.dimension_count": rotated}, {}, 0)
            assert int(size * rotated_share(Metadata(header, "m", "m.gguf"), size)) == rotated


def llama4_with(factors: Any, kind: Kind, path: Path) -> None:
    """A file with these factors of rotary frequencies."""
    family = FAMILIES["llama4"]
    config = family.config(num_hidden_layers=2)
    tensors = gguf_tensors(family, random_model(config))
    tensors["rope_freqs.weight"] = np.asarray(factors, np.float32)
    write_family(
        family, config, tensors, path, lambda name, shape: kind if name.startswith("rope") else Kind.F32
    )


@pytest.mark.parametrize(
    ("factors", "kind", "message"),
    [
        (np.linspace(1, 3, 32), Kind.F32, "of no rotary scaling that moechat knows"),
        (np.ones(16) * 2, Kind.F32, "of no rotary scaling that moechat knows"),
        (np.ones(32), Kind.F16, "is no list of numbers in F32"),
    ],
)
def test_factors_of_frequencies_that_no_scaling_has_are_refused(
    factors: Any, kind: Kind, message: str, tmp_path: Path
) -> None:
    llama4_with(factors, kind, tmp_path / "m.gguf")
    with pytest.raises(MoechatError, match=message), opened_gguf(tmp_path / "m.gguf"):
        pass


def test_factors_of_one_scale_nothing(tmp_path: Path) -> None:
    llama4_with(np.ones(32), Kind.F32, tmp_path / "m.gguf")
    with opened_gguf(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_dense_weights_have_the_values_of_a_quantised_file(
    name: str, kind: Kind, tmp_path: Path, moechat_home: Path
) -> None:
    """What differs is the rounding of activations to 16 bits."""
    family = FAMILIES[name]
    config = family.config()
    tensors = gguf_tensors(family, random_model(config))
    write_family(family, config, tensors, tmp_path / "m.gguf", all_as(kind))
    exact = tmp_path / "exact.gguf"
    write_family(family, config, tensors, exact, all_as(kind), dequantised=True, but_experts=True)
    with moechat.load(tmp_path / "m.gguf", activation_bits=16, dtype="float32") as engine:
        ours = np.asarray(engine.logits(TOKENS))
        form = engine.passes.loaded.form
    with moechat.load(exact, dense_bits=16, activation_bits=32, dtype="float32") as engine:
        expected = np.asarray(engine.logits(TOKENS))
    assert "lm_head" in form.encodings
    # The file has these transposed, so they are quantised to 8 bits.
    assert {layer.rpartition(".")[2] for layer in form.quantised} <= {"kv_b_proj"}
    # The median, because where two experts are nearly equal the least rounding exchanges them.
    errors = np.abs(ours - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(errors) <= (5e-2 if form.quantised else 1e-3)
