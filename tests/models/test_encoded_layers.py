"""Layers that use the encoded rows of a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_bytes import bytes_of_dense
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_writing import all_as, write_family
from kept_support import DENSE_ENCODINGS, file_rows, values
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

import moechat
from moechat import _native
from moechat.models.linear import (
    EncodedEmbedding,
    PackedLinear,
    encoded_embedding,
    only_scales_rows,
)

COLUMNS = 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_an_embedding_decodes_the_rows_that_are_looked_up(encoding: str, dtype: torch.dtype) -> None:
    rows = file_rows(np.random.default_rng(1), encoding, 9, COLUMNS)
    made = encoded_embedding(nn.Embedding(9, COLUMNS), rows, encoding, dtype)
    ids = torch.tensor([[3, 8], [0, 3]])
    torch.testing.assert_close(
        made(ids), torch.from_numpy(values(encoding, rows)).to(dtype)[ids], rtol=0, atol=0
    )
    assert made(ids[:0]).shape == (0, 2, COLUMNS)
    with pytest.raises(IndexError, match="ids -1 to 9 are not within 9 rows"):
        made(torch.tensor([9, -1]))


def test_an_embedding_that_scales_its_rows_goes_on_doing_so() -> None:
    rows = file_rows(np.random.default_rng(1), "q8_0", 9, COLUMNS)
    scaled = Gemma4TextScaledWordEmbedding(9, COLUMNS, 0, embed_scale=3.0)
    made = encoded_embedding(scaled, rows, "q8_0", torch.float32)
    assert isinstance(made, Gemma4TextScaledWordEmbedding)
    ids = torch.tensor([4, 2])
    torch.testing.assert_close(made(ids), 3.0 * torch.from_numpy(values("q8_0", rows))[ids])


def test_an_embedding_with_a_computation_of_its_own_is_left_alone() -> None:
    class Own(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(ids, self.weight) + super().forward(ids)

    assert only_scales_rows(nn.Embedding)
    assert only_scales_rows(Gemma4TextScaledWordEmbedding)
    assert not only_scales_rows(Own)


@pytest.mark.parametrize("dense_bits", ["auto", 16, 8, 6, 4])
@pytest.mark.parametrize("name", ["glm4moe", "gemma4", "qwen3next", "qwen35moe"])
def test_layers_and_memory_are_as_the_form_says(
    name: str, dense_bits: int | str, tmp_path: Path, moechat_home: Path
) -> None:
    family = FAMILIES[name]
    config = family.config()
    write_family(
        family, config, gguf_tensors(family, random_model(config)), tmp_path / "m.gguf", all_as(Kind.Q8_0)
    )
    with moechat.load(tmp_path / "m.gguf", dense_bits=dense_bits) as engine:
        loaded = engine.passes.loaded
        model, form, source = loaded.model, loaded.form, loaded.store.dense
        for layer, module in model.named_modules():
            if isinstance(module, PackedLinear):
                encoding = module.layout.encoding
                assert encoding == form.encodings.get(layer.removesuffix(".inner"))
                assert (encoding is None) == (dense_bits in (8, 6, 4)), layer
                if encoding is None and name == "glm4moe" and f"{layer}.weight" in source:
                    packed = _native.pack_linear(module.layout, source.array(f"{layer}.weight"))
                    np.testing.assert_array_equal(module.data, packed)
        assert any(isinstance(module, EncodedEmbedding) for module in model.modules())
        # Empty buffers share an address.
        assert abs(bytes_of_dense(model) - form.nbytes) <= 64
