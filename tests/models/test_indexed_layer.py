"""Keys of an indexer in reserved memory: the tensors of transformers' own layer, whatever came before."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicIndexedLayer

from moechat.models.indexed_layer import IndexedLayer

DIM, INDEX_DIM = 6, 4


def states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 1, tokens, DIM), (1, 1, tokens, DIM), (1, tokens, INDEX_DIM))
    keys, values, indexer = (torch.randn(shape, generator=generator) for shape in shapes)
    return keys, values, indexer


def same(ours: IndexedLayer, theirs: DynamicIndexedLayer) -> bool:
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in ("keys", "values", "indexer_keys")]
    return all(torch.equal(one, other) for one, other in pairs)


def test_it_holds_what_the_layer_of_transformers_holds_and_grows_beyond_its_memory() -> None:
    ours, theirs = IndexedLayer(20), DynamicIndexedLayer()
    for number, tokens in enumerate((7, 1, 5, 30, 1)):
        keys, values, indexer = states(tokens, number)
        for layer in (ours, theirs):
            layer.update(keys, values)
        assert torch.equal(ours.update_indexer(indexer), theirs.update_indexer(indexer))
        assert same(ours, theirs)
        if number in (1, 3):
            for layer in (ours, theirs):
                layer.crop(-3)
            assert same(ours, theirs)


def test_memory_that_is_reserved_is_not_copied() -> None:
    layer = IndexedLayer(40)
    places = set()
    for number in range(5):
        keys, values, indexer = states(8, number)
        layer.update(keys, values)
        places.add(layer.update_indexer(indexer).data_ptr())
    assert len(places) == 1
    layer.reset()
    assert (layer.get_seq_length(), layer.indexer_keys) == (0, None)


def append(layer: IndexedLayer | DynamicIndexedLayer, tokens: int, seed: int, *, keys_first: bool) -> None:
    keys, values, indexer = states(tokens, seed)
    if keys_first:
        layer.update(keys, values)
    layer.update_indexer(indexer)
    if not keys_first:
        layer.update(keys, values)


@pytest.mark.parametrize("keys_first", [True, False])
def test_what_an_interrupted_pass_has_appended_alone_does_not_count(keys_first: bool) -> None:
    """A pass can end between the two, in either order of a family."""
    ours, theirs = IndexedLayer(40), DynamicIndexedLayer()
    for layer in (ours, theirs):
        append(layer, 9, 1, keys_first=keys_first)
    keys, values, indexer = states(4, 2)
    if keys_first:
        ours.update(keys, values)
        ours.crop(-4)
    else:
        ours.update_indexer(indexer)
    for layer in (ours, theirs):
        append(layer, 6, 3, keys_first=keys_first)
    assert same(ours, theirs)
