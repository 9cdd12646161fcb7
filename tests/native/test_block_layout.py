import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from integer_model import Matrix

from moechat import _native

sizes = st.integers(1, 9000)
bit_widths = st.sampled_from((2, 3, 4, 6, 8, 16))
FIELDS = ("gate_q", "up_q", "down_q", "gate_sz", "up_sz", "down_sz", "gate_bias", "up_bias", "down_bias")


def field_sizes(layout: _native.BlockLayout) -> dict[str, int]:
    """Bytes of each field as the format describes them."""
    weights = 64 * layout.hidden_padded
    scales = 0 if layout.bits == 16 else weights // 64 * 4
    bias = 64 * 4 if layout.has_bias else 0
    sizes = dict.fromkeys(("gate_q", "up_q", "down_q"), weights * layout.bits // 8)
    sizes |= dict.fromkeys(("gate_sz", "up_sz", "down_sz"), scales)
    sizes |= {"gate_bias": bias, "up_bias": bias}
    return sizes | {"down_bias": layout.down_bias_rows * 4 if layout.has_bias else 0}


@given(hidden=sizes, neurons=sizes, bits=bit_widths, fp16=st.booleans(), bias=st.booleans())
def test_fields_follow_each_other_aligned_and_fill_the_payload(hidden, neurons, bits, fp16, bias):
    layout = _native.BlockLayout(hidden, neurons, bits, fp16, bias)
    end = 0
    for name, size in field_sizes(layout).items():
        offset = getattr(layout, name)
        if size == 0:
            assert offset == -1
            continue
        assert offset == end
        assert offset % 64 == 0
        end += size
    assert layout.payload_bytes == end
    assert layout.record_bytes % 4096 == 0
    assert 0 <= layout.record_bytes - layout.payload_bytes < 4096


@given(hidden=sizes, neurons=sizes, bits=bit_widths)
def test_padding_is_less_than_one_group_and_one_block(hidden, neurons, bits):
    layout = _native.BlockLayout(hidden, neurons, bits)
    assert layout.hidden_padded % 64 == 0
    assert 0 <= layout.hidden_padded - hidden < 64
    assert 0 <= layout.blocks * 64 - neurons < 64


@given(groups=st.integers(1, 200), blocks=st.integers(1, 200))
def test_four_bit_payload_is_108_bytes_a_hidden_column(groups, blocks):
    layout = _native.BlockLayout(64 * groups, 64 * blocks, 4)
    assert layout.payload_bytes == 108 * layout.hidden_padded


@given(hidden=sizes, neurons=sizes)
def test_down_bias_slices_are_whole_tiles_and_cover_all_rows(hidden, neurons):
    layout = _native.BlockLayout(hidden, neurons, 4, has_bias=True)
    assert layout.down_bias_rows % 16 == 0
    assert layout.blocks * layout.down_bias_rows >= layout.hidden_padded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 64, 4), "hidden_size is 0"),
        ((64, -1, 4), "intermediate_size is -1"),
        (((1 << 20) + 1, 64, 4), "hidden_size is 1048577"),
        ((64, 64, 5), "5 bits are not supported"),
        ((64, 64, 0), "0 bits are not supported"),
    ],
)
def test_impossible_layouts_are_refused_with_the_number(arguments, words):
    with pytest.raises(ValueError, match=words):
        _native.BlockLayout(*arguments)


def words_of(record: np.ndarray, offset: int, steps: int) -> np.ndarray:
    """[steps, 16 lanes] little-endian words."""
    return record[offset : offset + steps * 64].view("<u4").reshape(steps, 16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_lie_where_the_format_says(bits):
    rng = np.random.default_rng(bits)
    hidden, neurons = 192, 128
    layout = _native.BlockLayout(hidden, neurons, bits)
    parts = quantised_parts(rng, hidden, neurons, bits)
    records = np.empty((layout.blocks, layout.record_bytes), np.uint8)
    _native.pack_quantized(layout, *[a for part in parts for a in part], None, records)

    per_word, steps = 32 // bits, 2 * bits
    for block, row, col in [(0, 0, 0), (0, 17, 63), (1, 63, 64), (1, 40, 191), (0, 5, 130)]:
        tile, lane = divmod(row, 16)
        group, column = divmod(col, 64)
        step, slot = divmod(column, per_word)
        words = words_of(records[block], layout.gate_q, 4 * 3 * steps)
        code = (words[(tile * 3 + group) * steps + step, lane] >> (slot * bits)) & ((1 << bits) - 1)
        assert code == parts[0][0][block * 64 + row, col]
        at, word = (tile * 3 + group) * 64, parts[0][1][block * 64 + row, group]
        scales = records[block][layout.gate_sz + at :][:64]
        if bits == 8:
            assert scales.view("<u2")[lane] == word & 0xFFFF
            assert scales.view("<u2")[lane + 16] == word >> 16
        else:
            assert scales.view("<u4")[lane] == word
    for block, row, col in [(0, 0, 0), (1, 100, 63), (1, 191, 1)]:
        tile, lane = divmod(row, 16)
        step, slot = divmod(col, per_word)
        words = words_of(records[block], layout.down_q, hidden // 16 * steps)
        code = (words[tile * steps + step, lane] >> (slot * bits)) & ((1 << bits) - 1)
        assert code == parts[2][0][row, block * 64 + col]


@pytest.mark.parametrize("bits", [3, 6])
def test_codes_of_3_and_6_bits_lie_in_two_planes(bits):
    rng = np.random.default_rng(bits)
    layout = _native.BlockLayout(128, 64, bits)
    parts = quantised_parts(rng, 128, 64, bits)
    records = np.empty((1, layout.record_bytes), np.uint8)
    _native.pack_quantized(layout, *[a for part in parts for a in part], None, records)
    words = words_of(records[0], layout.up_q, 4 * 2 * 2 * bits).reshape(4, 2, 2 * bits, 16)
    for row in range(64):
        for column in range(128):
            tile, lane = divmod(row, 16)
            group, col = divmod(column, 64)
            steps = words[tile, group, :, lane]
            if bits == 3:
                low = steps[col // 16] >> (2 * (col % 16)) & 3
                code = low | (steps[4 + col // 32] >> (col % 32) & 1) << 2
            else:
                place = 8 * (col % 8 // 2) + 4 * (col % 16 // 8) + 2 * (col % 2)
                low = steps[col // 8] >> (4 * (col % 8)) & 15
                code = low | (steps[8 + col // 16] >> place & 3) << 4
            assert code == parts[1][0][row, column]


def quantised_parts(
    rng: np.random.Generator, hidden: int, neurons: int, bits: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    shapes = ((neurons, hidden), (neurons, hidden), (hidden, neurons))
    return [Matrix.random(rng, *shape, bits).parts for shape in shapes]
