"""The attention cache: its size known beforehand, growing without copies, filled in parts."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CASES, UNLISTED, tiny_config
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moechat.errors import UnsupportedModelError
from moechat.geometry import PACKED_KV_BITS, PLAIN_KV_BITS
from moechat.models.attention_cache import cache_shape, new_cache
from moechat.models.cache_argument import CACHE, cache_of
from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.packed_rows import pack, row_bytes, unpack
from moechat.models.skeleton import build_skeleton
from moechat.offload.experts import IMPLEMENTATION, attach, register
from moechat.sizes.cache_shape import PREFILL_CHUNK

ALL = [*CASES, *((family, 0) for family in UNLISTED)]
# Their cache is no DynamicCache.
NOT_PACKED = {"minimax"}
# Their states do not carry across parts, so their prompts go in one pass.
IN_ONE_PASS = {"minimax"}


class Nothing:
    """Experts on the meta device."""

    def forward(self, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(hidden)


def shape_of(config: Any, bits: int = PLAIN_KV_BITS) -> Any:
    register()
    skeleton = build_skeleton(config, torch.float32, IMPLEMENTATION)
    for entry in skeleton.experts:
        attach(entry.module, Nothing())  # type: ignore[arg-type]
    return cache_shape(skeleton.model, skeleton.model.config, torch.float32, bits=bits)


def held(cache: Any) -> int:
    """Bytes that a cache holds; what transformers' own layers show may be a part of a larger tensor."""
    total = 0
    for holder in (cache, *cache.layers):
        for value in vars(holder).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            )
            for item in values:
                if isinstance(item, torch.Tensor) and item.ndim > 1:
                    if isinstance(holder, WindowLayer):
                        # All tokens that were ever written, until the memory is used again.
                        tokens = min(holder.cumulative_length, holder._capacity)
                        total += item.nbytes // item.shape[-2] * tokens
                        continue
                    reserved = isinstance(holder, ReservedLayer)
                    total += item.nbytes if reserved else item.untyped_storage().nbytes()
    return total


def random_model(config: Any) -> Any:
    """transformers' own model, with weights large enough for every part to matter."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("bits", [PLAIN_KV_BITS, PACKED_KV_BITS])
@pytest.mark.parametrize(("family", "index"), ALL)
def test_a_prompt_in_parts_equals_one_pass_and_the_cache_size_is_predicted(
    family: str, index: int, bits: int
) -> None:
    config = tiny_config(family, index)
    if bits == PACKED_KV_BITS and family in NOT_PACKED:
        pytest.skip("its cache cannot be packed")
    shape = shape_of(config, bits)
    assert shape.exact
    assert (shape.appendable == 0) == (family in IN_ONE_PASS)
    model = random_model(tiny_config(family, index))
    ids = torch.randint(3, 101, (1, 83), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=True, **{CACHE: new_cache(shape, model.config, 100)})
        copied = max((each * min(83, most or 83) for each, most in shape.copied), default=0)
        unpacked = max((each * min(83, most or 83) for each, most in shape.unpacked), default=0)
        assert (unpacked > 0) == (bits == PACKED_KV_BITS)
        assert shape.nbytes(83) - copied - unpacked - shape.copy_bytes == held(cache_of(whole))
        if not shape.appendable:
            return
        cache, logits = new_cache(shape, model.config, 100), []
        for part in ids.split(7, dim=1):  # type: ignore[no-untyped-call]
            output = model(input_ids=part, use_cache=True, **{CACHE: cache})
            assert cache_of(output) is cache
            logits.append(output.logits)
    parts = torch.cat(logits, dim=1)
    # In 8 bits a key that rounds differently before may land on the next code.
    limit = 1e-5 if bits == PLAIN_KV_BITS else 2e-3
    assert float((parts - whole.logits).norm() / whole.logits.norm()) < limit


@pytest.mark.parametrize(
    ("changes", "appendable"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
    ],
)
def test_rotary_scaling_by_the_longest_position_forbids_parts(
    changes: dict[str, Any], appendable: bool
) -> None:
    config = tiny_config("qwen3_moe")
    config.rope_parameters = {**config.rope_parameters, **changes}
    shape = shape_of(config)
    assert shape.exact
    assert bool(shape.appendable) == appendable


def test_long_rotary_factors_allow_parts_up_to_the_original_length() -> None:
    config = tiny_config("phimoe", max_position_embeddings=2048)
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "short_mscale": 1.1,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 512,
    }
    shape = shape_of(config)
    assert (shape.exact, shape.appendable) == (True, 512)
    # The trial leaves no trace: the next one finds the same.
    assert config.rope_parameters["rope_type"] == "longrope"


def test_a_family_that_cannot_be_tried_is_estimated_upwards() -> None:
    register()
    config = tiny_config("qwen3_moe")
    skeleton = build_skeleton(config, torch.float32, IMPLEMENTATION)  # its experts have no layers attached
    shape = cache_shape(skeleton.model, skeleton.model.config, torch.float32)
    assert (shape.exact, shape.appendable, shape.reserved) == (False, 0, False)
    assert new_cache(shape, config, 10) is None
    for entry in skeleton.experts:
        attach(entry.module, Nothing())  # type: ignore[arg-type]
    exact = cache_shape(skeleton.model, skeleton.model.config, torch.float32)
    assert exact.exact
    assert shape.nbytes(200) >= exact.nbytes(200)


@pytest.mark.parametrize("window", [5, 40])
def test_windows_stop_growing(window: int) -> None:
    shape = shape_of(tiny_config("gpt_oss", sliding_window=window))
    each = 2 * 2 * 16 * 4
    assert set(shape.growing) == {(each, None), (each, window - 1 + PREFILL_CHUNK)}
    assert shape.nbytes(100_001) - shape.nbytes(100_000) == each


def test_a_reserved_layer_behaves_like_transformers_own() -> None:
    generator = torch.Generator().manual_seed(1)
    ours, theirs = ReservedLayer(10), DynamicLayer()
    place = 0
    for count in (1, 4, 2, 1, 8, 1):  # the last two need more than was reserved
        keys = torch.randn((1, 2, count, 4), generator=generator)
        values = torch.randn((1, 2, count, 6), generator=generator)
        for ours_part, theirs_part in zip(
            ours.update(keys, values), theirs.update(keys, values), strict=True
        ):
            assert torch.equal(ours_part, theirs_part)
        if ours.get_seq_length() <= 10:
            assert ours.keys.data_ptr() == (place or ours.keys.data_ptr())
            place = ours.keys.data_ptr()
        if count == 2:
            for layer in (ours, theirs):
                layer.crop(-3)
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    ours.reset()
    assert ours.get_seq_length() == 0
    assert torch.equal(ours.update(keys, values)[0], keys)


@pytest.mark.parametrize("index", [0, 1])
def test_a_packed_cache_takes_about_half_of_one_in_16_bits(index: int) -> None:
    for family in ("mixtral", "deepseek_v2", "gpt_oss", "qwen3_next"):
        plain, packed = (
            shape_of(tiny_config(family, index), bits) for bits in (PLAIN_KV_BITS, PACKED_KV_BITS)
        )
        assert packed.bits == PACKED_KV_BITS
        for (theirs, their_limit), (ours, limit) in zip(plain.growing, packed.growing, strict=True):
            assert limit == their_limit
            assert theirs / 4 < ours < theirs / 4 * 1.15  # theirs are float32
        assert packed.read_bytes(10_000) < packed.nbytes(10_000)
        assert plain.read_bytes(10_000) == plain.nbytes(10_000) - plain.copy_bytes


def test_a_cache_that_cannot_be_packed_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="it is a MiniMaxCache, not layers") as caught:
        shape_of(tiny_config("minimax"), PACKED_KV_BITS)
    assert "--kv-bits 16" in str(caught.value.hint)
    register()
    config = tiny_config("qwen3_moe")
    skeleton = build_skeleton(config, torch.float32, IMPLEMENTATION)  # its experts have no layers attached
    with pytest.raises(UnsupportedModelError, match="is not known before the model is loaded"):
        cache_shape(skeleton.model, skeleton.model.config, torch.float32, bits=PACKED_KV_BITS)


HEADS, DIM = 2, 3


def states(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens [first, first + count), all different."""
    tokens = torch.arange(first, first + count, dtype=torch.float32)[None, None, :, None]
    keys = tokens + torch.arange(HEADS * DIM).reshape(1, HEADS, 1, DIM) / 64
    return keys, -keys


def packed_rows(tensor: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((*tensor.shape[:-1], row_bytes(tensor.shape[-1])), dtype=torch.uint8)
    pack(tensor, rows)
    return rows


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """What is left of a tensor in 8 bits."""
    return unpack(packed_rows(tensor), tensor.shape[-1], tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_behaves_like_transformers_own_with_rounded_tokens(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    ours, theirs = ReservedLayer(10, packed=True), DynamicLayer()
    for count in (1, 4, 2, 1, 8, 1):
        # As families give them: heads and tokens of a view in another order.
        keys = torch.randn((1, count, 2, 40), generator=generator).to(dtype).transpose(1, 2)
        values = torch.randn((1, 2, count, 6), generator=generator).to(dtype)
        wanted = theirs.update(rounded(keys), rounded(values))
        assert all(map(torch.equal, ours.update(keys, values), wanted))
        if count == 2:
            for layer in (ours, theirs):
                layer.crop(-3)
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    ours.reset()
    assert torch.equal(ours.update(keys, values)[0], rounded(keys))
    assert ours.next_place().slot == count
    assert not ours.takes_token(2, 40, torch.float16)


def written(layer: Any, first: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a native step does: it writes one token at the place it is given, and reads all that it sees."""
    if not layer.takes_token(HEADS, DIM, torch.float32):
        return None
    place = layer.append_place()
    keys, key_head, values, value_head, before, packed = place
    assert packed == layer.packed
    found = []
    for address, stride, new in ((keys, key_head, 0), (values, value_head, 1)):
        token = states(first, 1)[new]
        rows = packed_rows(token) if packed else token
        size = rows.shape[-1] * rows.itemsize
        step = stride * rows.itemsize
        for head in range(HEADS):
            row = rows[0, head].contiguous()
            ctypes.memmove(address + head * step + before * size, row.data_ptr(), size)
        read = torch.empty((1, HEADS, before + 1, rows.shape[-1]), dtype=rows.dtype)
        for head in range(HEADS):
            ctypes.memmove(read[0, head].data_ptr(), address + head * step, size * (before + 1))
        found.append(unpack(read, DIM, torch.float32) if packed else read)
    return found[0], found[1]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 14), st.booleans()), min_size=1, max_size=25),
    st.booleans(),
)
def test_a_window_layer_behaves_like_transformers_own(
    window: int, most: int, passes: list[tuple[int, bool]], packed: bool
) -> None:
    theirs, ours = DynamicSlidingWindowLayer(window), WindowLayer(window, most, packed=packed)
    kept = rounded if packed else lambda tensor: tensor
    done = 0
    for count, natively in passes:
        seen = None
        if count == 0:
            # Before 5.18 transformers' own reset() left zeros in front of new tokens.
            theirs = DynamicSlidingWindowLayer(window)
            ours.reset()
            done = 0
            continue
        if natively:
            count = 1
            seen = written(ours, done)
        wanted = theirs.update(*map(kept, states(done, count)))
        if seen is None:
            seen = ours.update(*states(done, count))
        done += count
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert ours.get_seq_length() == theirs.get_seq_length() == done
        assert ours.keys is not None
        assert theirs.keys is not None
        for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.equal(unpack(mine, DIM, torch.float32) if packed and mine.numel() else mine, other)
        # transformers returns its whole first pass; a token sees no more than a window of it.
        for mine, other in zip(seen, wanted, strict=True):
            assert torch.equal(mine, other[:, :, -mine.shape[2] :])
            assert mine.shape[2] >= min(done, window - 1 + count)


def test_a_window_layer_stays_within_its_memory() -> None:
    layer = WindowLayer(5, 4)
    layer.update(*states(0, 3))
    memory = {layer.keys.untyped_storage().data_ptr()}
    for token in range(3, 200):
        if written(layer, token) is None:
            layer.update(*states(token, 1))
        memory.add(layer.keys.untyped_storage().data_ptr())
    assert len(memory) == 1
    assert layer.keys.untyped_storage().nbytes() == 4 * HEADS * DIM * (5 - 1 + 4)


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_can_be_cropped_while_it_is_not_full(packed: bool) -> None:
    theirs, ours = DynamicSlidingWindowLayer(9), WindowLayer(9, 16, packed=packed)
    for layer in (theirs, ours):
        kept = rounded if packed and layer is theirs else lambda tensor: tensor
        layer.update(*map(kept, states(0, 6)))
        layer.crop(-2)
        found = layer.update(*map(kept, states(4, 3)))
    assert torch.equal(found[0], theirs.keys)
    assert ours.get_seq_length() == theirs.get_seq_length() == 7


def test_packed_windows_do_not_record_what_leaves_them() -> None:
    with pytest.raises(ValueError, match="does not record"):
        WindowLayer(9, 16, packed=True).activate_past_recording()
