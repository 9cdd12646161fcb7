"""Memory that caches use after one another."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import CacheMemory
from moechat.models.packed_rows import row_bytes


def states(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, count, 4, generator=generator), torch.randn(1, 2, count, 6, generator=generator)


def new_cache(layers: int = 2, *, packed: bool = False) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [ReservedLayer(16, packed=packed) for _ in range(layers)]
    return cache


def test_the_memory_is_lent_to_one_cache_at_a_time() -> None:
    memory = CacheMemory()
    first, second = new_cache(), new_cache()
    assert memory.lend(first)
    assert memory.lend(first)
    first.layers[0].update(*states(3, 0))
    place = first.layers[0].next_place()
    assert place.slot == 3
    assert not memory.lend(second)
    second.layers[0].update(*states(3, 1))
    assert second.layers[0].next_place().keys.data_ptr() != place.keys.data_ptr()
    assert torch.equal(first.layers[0].keys, states(3, 0)[0])

    address = place.keys.data_ptr()
    del first, place
    assert not memory.lend(second)  # it holds tokens elsewhere
    third = new_cache()
    assert memory.lend(third)
    third.layers[0].update(*states(2, 2))
    again = third.layers[0].next_place()
    assert again.keys.data_ptr() == address
    assert torch.equal(third.layers[0].keys, states(2, 2)[0])


def test_packed_rows_stay_at_their_addresses_too() -> None:
    memory, addresses = CacheMemory(), []
    for turn in range(2):
        cache = new_cache(packed=True)
        assert memory.lend(cache)
        cache.layers[1].update(*states(3, turn))
        place = cache.layers[1].next_place()
        assert place.slot == 3
        assert place.keys.shape == (1, 2, 16, row_bytes(4))
        assert place.values.shape == (1, 2, 16, row_bytes(6))
        addresses.append((place.keys.data_ptr(), place.values.data_ptr()))
        del cache, place
    assert addresses[0] == addresses[1]


def test_other_layers_get_no_memory() -> None:
    assert not CacheMemory().lend(DynamicCache())
    cache = new_cache()
    cache.layers.append(DynamicSlidingWindowLayer(4))
    assert not CacheMemory().lend(cache)


def test_a_token_written_to_the_next_place_equals_an_appended_one() -> None:
    """Full and window layers; windows move along their memory and back, and are cut while they may."""
    memory, cache = CacheMemory(), DynamicCache()
    cache.layers = [WindowLayer(6, 3), ReservedLayer(64)]
    assert memory.lend(cache)
    expected = [DynamicSlidingWindowLayer(6), ReservedLayer(64)]
    for turn, count in enumerate([2, 1, -1, 1, 1, 2, 1, 1, 1, 5, 1, 1, 3, 1, 1, 1, 1]):
        for layer, other in zip(cache.layers, expected, strict=True):
            if count < 0:
                layer.crop(count)
                other.crop(count)
                continue
            keys, values = states(count, turn)
            other.update(keys, values)
            place = layer.next_place() if count == 1 else None
            if place is None:
                layer.update(keys, values)
            else:
                place.keys[..., place.slot, :] = keys[..., 0, :]
                place.values[..., place.slot, :] = values[..., 0, :]
                layer.advance()
            assert layer.get_seq_length() == other.get_seq_length()
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)


def test_a_full_layer_has_no_next_place() -> None:
    layer = ReservedLayer(4)
    assert layer.next_place() is None
    layer.update(*states(4, 0))
    assert layer.next_place() is None
