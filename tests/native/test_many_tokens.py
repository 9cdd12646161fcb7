import json

import pytest
from native_support import run_isa

from moechat import _native

EMULATED = "amx-emulated"  # the tiles of AMX in plain C++: named by tests, never listed or chosen
ISAS = [
    *_native.available_isas(),
    *([EMULATED] if EMULATED in _native.built_isas() and _native.cpu_features()["avx2"] else []),
]
FUSED = [isa for isa in ISAS if isa != "portable"]  # with fused multiply-add


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {}


def result_of(isa: str, results: dict[str, dict]) -> dict:
    if isa not in results:
        done = run_isa("import many_tokens_child; many_tokens_child.main()", isa)
        assert done.returncode == 0, done.stderr
        results[isa] = json.loads(done.stdout)
    return results[isa]


@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens_give_bit_by_bit_what_one_at_a_time_gives(isa, results):
    result = result_of(isa, results)
    assert result["isa"] == isa
    assert len(result["equal"]) == 5 * 3 * 2 * 3 + 3 * 2 + 5 * 2 * 2 * 9
    assert [name for name, equal in result["equal"].items() if not equal] == []


@pytest.mark.parametrize("isa", FUSED[1:])
def test_many_tokens_are_the_same_on_all_instruction_sets_with_fused_multiply_add(isa, results):
    assert result_of(isa, results)["digests"] == result_of(FUSED[0], results)["digests"]


def test_emulated_tiles_are_not_offered():
    assert EMULATED not in _native.available_isas()
