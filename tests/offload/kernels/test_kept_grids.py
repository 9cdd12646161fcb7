"""The GPU kernels over encodings with grids: their table, and experts of two encodings against the CPU's.

``test_packed_linear.py`` compares the values of every encoding, dense.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kept_support import DENSE_ENCODINGS, random_records
from kernel_support import GpuCall, int32

from moechat import _native
from moechat.offload.kernels.kept_form import kept_constants, value_table
from moechat.offload.kernels.triton_kept_grids import grid_place, group_words

GRIDS = [name for name in DENSE_ENCODINGS if _native.kept_form(name)["table"] == "grid"]
# All of them, as gate and up or as down. IQ4 has another part of the same table.
PAIRS = [("iq2_xxs", "iq3_s"), ("iq2_s", "iq1_m"), ("iq2_xs", "iq3_xxs"), ("iq1_s", "iq4_nl")]


def call_of(gate_up: str, down: str, tokens: int) -> GpuCall:
    """One random expert: of one block of 256 columns, or where down has smaller ones of two."""
    rng = np.random.default_rng(7)
    neurons = max(64, _native.kept_encodings()[down][1])
    hidden = 256 if neurons == 256 else 512
    layout = _native.kept_layout(hidden, neurons, gate_up, down, gate_up == "iq2_s")
    records, _ = random_records(rng, layout, 1)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    weights = rng.standard_normal(tokens).astype(np.float32)
    entries = [(0, block) for block in range(layout.blocks)]
    return GpuCall(layout, records, x, [int32(range(tokens))], [weights], entries)


def test_the_table_has_the_values_of_iq4_and_every_grid() -> None:
    table = value_table(torch.device("cpu"))
    assert table[:16].tolist() == _native.kept_form("iq4_nl")["values"]
    dwords = table.view(torch.int32).numpy().view(np.uint32)
    places = set(range(16))
    for name in GRIDS:
        grid = _native.kept_grid(name)
        first = grid_place(kept_constants(name)["SCALES"])
        assert first % 2 == 0  # both dwords of a number are loaded at once
        assert np.array_equal(dwords[first : first + grid.size], grid.ravel())
        mine = set(range(first, first + grid.size))
        assert name == "iq1_m" or not places & mine
        places |= mine
    assert places == set(range(len(table)))


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_groups_have_the_words_of_the_layout(encoding: str) -> None:
    constants = kept_constants(encoding)
    words = group_words(constants["FIRST"], constants["SECOND"], constants["SCALES"])
    assert words == 16 * _native.kept_form(encoding)["steps"]


def test_signs_and_deltas_carry_into_no_other_code() -> None:
    for name in GRIDS:
        codes = _native.kept_grid(name).view(np.uint8)
        if name.startswith("iq1"):
            assert codes.min() >= 2
        else:
            assert _native.kept_form(name)["zero"] == 64
            assert 64 <= codes.min() <= codes.max() < 128


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize(("gate_up", "down"), PAIRS)
def test_pairs_of_grids_match_the_cpu(gate_up: str, down: str, tokens: int) -> None:
    assert call_of(gate_up, down, tokens).error(torch.float32) < 3e-6


def test_codes_of_grids_are_exact_in_sixteen_bits() -> None:
    assert call_of("iq3_xxs", "iq4_nl", 9).error(torch.float16) < 8e-4


def test_a_token_gets_the_same_bits_however_many_are_computed_with_it() -> None:
    call = call_of("iq3_s", "iq4_nl", 3)
    together = call.run(torch.float32)
    call.x, call.tokens_of, call.weights_of = call.x[:1], [int32([0])], [call.weights_of[0][:1]]
    assert torch.equal(call.run(torch.float32)[0], together[0])
